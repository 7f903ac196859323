"""Prefect flows: a run of a recipe, and studies of it.

- `distil`: the main flow, `gradmm`.
- `contamination`: a check of the public model, whose result the reports show.
- `pipeline`: the stages from a recipe to its filtered texts, shared by all flows.
- `finetune_plan`: fine-tunings of several arms and seeds, with one search for the learning rate per arm.
- `runtime`: execution of stages by Prefect.
- `ui`: display of a run in Prefect's UI.
- `studies`: flows that compare variants of a recipe.
"""
