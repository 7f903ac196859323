"""Studies of a recipe: its texts compared with baselines, and its gradients with the theory.

- `arms`: the arms of a comparison.
- `arm_recipes`: the recipes of the baselines.
- `ablations`: variants of a recipe without one of its parts.
- `plans`: checks of a study's arguments.
- `compare`: the accuracy of each arm over seeds, beside the product's.
- `measures`: fluency, diversity and distances from real text.
- `gradient_path`: gradients along fine-tuning, and the proof of the bounds.
- `gradients`: gradient errors over seeds.
- `bounds`: the bounds and the observed gaps over seeds.
- `record`: the record and the folder of a study.
- `pages`: the page of a study in Markdown.
- `plots`: the pictures of a study.
"""
