"""Entry points: the command line, serving, and the recipes that come with gradmm.

- `api`: `gradmm.distil`, for scripts and notebooks.
- `recipe_files`: finds recipes and presets by name or path.
- `new_recipe`: writes a recipe for a user's own data, from new_recipe.yaml.jinja.
- `cli`: the command `gradmm`.
- `serving`: local runs, and the service that runs deployed recipes.

Data files: recipes/, presets/, ablations/ (variants for `gradmm ablate`), prefect.yaml (deployments for a work
pool).
"""
