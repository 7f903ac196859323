"""Shared parts of the stages' tasks.

- `stage_task`: stages as Prefect tasks, with cache keys and Parquet output.
- `registry`: all stages and the versions of their code.
- `inputs`: the data and the model of a run, by digest.
- `later_stages`: what later stages would refuse, checked before a release is charged.
- `privacy_budget`: the ledger's checks of a run, and the composed guarantee.
- `arm_texts`: texts of one arm of a comparison.
"""
