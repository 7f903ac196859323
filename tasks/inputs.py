"""What every run begins with: the fingerprint of its data and of its model. Never cached, so never stale."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from prefect import task
from pydantic import BaseModel

from gradmm_core.artifacts import Root
from gradmm_core.data import LabelledTexts, Splits, load_splits
from gradmm_core.demo.shared import demo_of
from gradmm_core.errors import InputError
from gradmm_core.model_reference import ModelReference, resolve_model
from gradmm_core.recipe import Recipe
from gradmm_core.settings import DataSettings, ModelSettings
from gradmm_core.withheld import without_messages
from gradmm_core.wording import ResponseTemplate
from tasks.stage import RunContext, SplitReference

if TYPE_CHECKING:
    from gradmm_core.language_model import LanguageModel
    from gradmm_core.template import TokenisedTemplate

#: Stands for the embedded corpus in `data.path`, and for the embedded model in `model.name`.
DEMO = "builtin:demo"


class DataReference(BaseModel, frozen=True):
    """The three splits, by content."""

    train: SplitReference
    validation: SplitReference
    test: SplitReference


@task(name="demo_material", persist_result=False, result_serializer="json")
def demo_material(recipe: Recipe, root: Root) -> Recipe:
    """Makes the demo's data and model if the recipe names them, and puts their folders in their place."""
    if DEMO not in (recipe.data.path, recipe.model.name):
        return recipe
    made = demo_of(root)
    data, model = recipe.data, recipe.model
    if data.path == DEMO:
        data = data.model_copy(update={"path": str(made.data)})
    if model.name == DEMO:
        model = model.model_copy(update={"name": str(made.model)})
    return recipe.model_copy(update={"data": data, "model": model})


@task(name="dataset_fingerprint", persist_result=False, result_serializer="json")
def dataset_fingerprint(context: RunContext) -> DataReference:
    """Reads the data afresh and names it by its content."""
    _splits.cache_clear()
    splits = without_messages(
        lambda: _splits(context.data, context.labels, context.seed),  # pyright: ignore[reportArgumentType]
        "dataset_fingerprint",
        context.root.errors,
    )
    return DataReference(
        train=_reference("train", splits.train),
        validation=_reference("validation", splits.validation),
        test=_reference("test", splits.test),
    )


@task(name="model_fingerprint", persist_result=False, result_serializer="json")
def model_fingerprint(settings: ModelSettings) -> ModelReference:
    """Pins the model to a digest or commit."""
    return resolve_model(settings)


def drawn_rows(context: RunContext, reference: SplitReference, rows: int, seed: int) -> SplitReference:
    """So many random rows of a split, as evenly over the classes as it goes. Fewer are the first of more."""
    texts = _drawn(context, read_split(context, reference), rows, seed)
    return SplitReference(split=reference.split, digest=texts.digest, rows=len(texts), drawn=(rows, seed))


def read_split(context: RunContext, reference: SplitReference) -> LabelledTexts:
    """The texts behind a reference.

    Raises:
        InputError: if the data has changed since the run began.
    """
    splits = _splits(context.data, context.labels, context.seed)  # pyright: ignore[reportArgumentType]
    texts: LabelledTexts = getattr(splits, reference.split)
    if reference.drawn:
        texts = _drawn(context, texts, *reference.drawn)
    if texts.digest != reference.digest:
        raise InputError("the data changed while the run was going on", reference.split, "run again")
    return texts


def read_model(
    context: RunContext, model: ModelReference, wording: ResponseTemplate, attention: str | None = None
) -> tuple[LanguageModel, TokenisedTemplate]:
    """The frozen model, on the run's device and threads, and the template in its tokens."""
    # Late, see tasks/stage.py.
    import torch

    from gradmm_core.language_model import load_language_model
    from gradmm_core.template import tokenise_template

    if context.threads:
        torch.set_num_threads(context.threads)
    language_model = load_language_model(model, context.device, attention)
    return language_model, tokenise_template(language_model, wording)


def _drawn(context: RunContext, texts: LabelledTexts, rows: int, seed: int) -> LabelledTexts:
    # Late, see tasks/stage.py.
    from gradmm_core.arms import class_counts
    from gradmm_core.finetune_eval import sample_class_rows

    return texts.take(sample_class_rows(texts.labels, class_counts(rows, context.labels), seed))


@lru_cache(maxsize=1)
def _splits(settings: DataSettings, labels: tuple[int, ...], seed: int) -> Splits:
    return load_splits(settings, labels, seed)


def _reference(split: str, texts: LabelledTexts) -> SplitReference:
    return SplitReference(split=split, digest=texts.digest, rows=len(texts))
