"""Shared parts of the stages' tasks.

- `stage_task`: stages as Prefect tasks, with cache keys and Parquet output.
- `registry`: all stages and the versions of their code.
- `inputs`: the data and the model of a run, by digest.
- `input_checks`: what later stages would refuse, checked before anything is computed or charged.
- `privacy_budget`: the ledger's checks of a run, and the composed guarantee.
- `arm_texts`: texts of one arm of a comparison.
"""
