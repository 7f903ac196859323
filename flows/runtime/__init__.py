"""Execution of stages by Prefect.

- `recipe_parameters`: a flow's parameters from the blocks of a recipe.
- `deployed`: a run's parameters merged over those of its deployment.
- `run_names`: names of flow runs.
- `stage_runs`: runs stages and keeps a record of each.
- `shard_runners`: runs shards in process, or on workers of a process pool, Ray or Dask.
- `result_storage`: storage of Prefect's records of finished stages.
- `stopping`: reliable Ctrl-C and SIGTERM.
- `ui_logs`: logs of `gradmm` in Prefect's UI.
"""
