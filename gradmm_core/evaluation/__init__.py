"""Evaluation of texts by training a model on them.

- `arm`: one arm of a comparison, and the texts that it takes.
- `finetune_eval`: fine-tuning, and accuracies on held-out rows.
- `membership`: membership inference on a model fine-tuned on the texts.
- `schedule`: learning rate and number of steps of a fine-tuning.
- `trainable`: the parameters that fine-tuning updates.
- `memory_plan`: the memory that each stage of a run needs, known before it begins.
- `peak_memory`: the memory that a stage took.
- `tfidf_classifier`: a classifier that is not a language model.
- `coresets`: herding and k-center selection of real rows.
"""
