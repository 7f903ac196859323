"""The flow of `gradmm audit --contamination`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from gradmm.config.recipe import Recipe
from gradmm.flows.pipeline import stage_runs
from gradmm.flows.runtime.run_names import timed_name
from gradmm.lm.model_reference import ModelReference
from gradmm.storage.artifacts import Root, StageArtifact
from gradmm.storage.location import Location
from gradmm.tasks.contamination import contamination as contamination_stage
from gradmm.tasks.runtime.inputs import DataReference, dataset_fingerprint, demo_material, model_fingerprint


@flow(
    name="gradmm-contamination",
    flow_run_name=lambda: timed_name("contamination"),
    persist_result=False,
    result_serializer="json",
)
def contamination(recipe: Recipe, root: Location = Path("gradmm-root")) -> StageArtifact:
    """Compare a recipe's train rows with its test rows. Reports of runs with this data and model show the result.

    Raises:
        InputError: for data or a model that cannot be read, and for too few rows.
    """
    place = Root(path=root.resolve())
    place.prepare()
    requested, recipe = recipe, demo_material(recipe, place)
    runs = stage_runs(requested, recipe, place)
    data, model = dataset_fingerprint(runs.context), model_fingerprint(recipe.model)
    return runs.run(contamination_stage, **contamination_inputs(data, model, recipe.seed))


def contamination_inputs(data: DataReference, model: ModelReference, seed: int) -> dict[str, Any]:
    """Return the inputs of the stage."""
    return {"train": data.train, "test": data.test, "model": model, "seed": seed}
