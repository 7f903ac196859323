"""The data and the model of a run: references by digest, computed anew in every run, and reading by reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, update_wrapper, wraps
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from prefect import task
from pydantic import BaseModel

from gradmm.config.recipe import BUILTIN, Recipe
from gradmm.config.settings import DataSettings, ModelSettings
from gradmm.data.splits import LabelledTexts, Splits, load_splits
from gradmm.demo.shared import demo_of
from gradmm.errors import InputError
from gradmm.lm.model_reference import ModelReference, resolve_model
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import Root
from gradmm.storage.redaction import redact_errors
from gradmm.tasks.runtime.stage_task import RunContext, SplitReference

if TYPE_CHECKING:
    from gradmm.lm.language_model import LanguageModel
    from gradmm.lm.template import TokenisedTemplate

#: Name of the demo's data in `data.path` and of its model in `model.name`.
DEMO = f"{BUILTIN}demo"

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result", bound=BaseModel)


class InputTask(Generic[Arguments, Result]):
    """A task whose result nearly all other tasks get, and that has no edges in a run's graph.

    Prefect draws an edge from a task to every task that gets the result or one of its fields. Edges from these
    would hide those between stages. Prefect knows results by identity, one level deep: a copy of what a list holds
    is unknown to it.

    Attributes:
        fn: the function itself.
    """

    def __init__(self, fn: Callable[Arguments, Result]) -> None:
        @wraps(fn)
        def listed(*args: Arguments.args, **kwargs: Arguments.kwargs) -> list[Result]:
            return [fn(*args, **kwargs)]

        self.fn = fn
        self._task = task(name=fn.__name__, persist_result=False, result_serializer="json")(listed)
        update_wrapper(self, fn)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        (result,) = self._task(*args, **kwargs)
        return result.model_copy()


class DataReference(BaseModel, frozen=True):
    """References to the three splits."""

    train: SplitReference
    validation: SplitReference
    test: SplitReference


@InputTask
def demo_material(recipe: Recipe, root: Root) -> Recipe:
    """Build the demo's data and model if the recipe names them; return the recipe with their folders instead."""
    if DEMO not in (recipe.data.path, recipe.model.name):
        return recipe
    material = demo_of(root)
    data, model = recipe.data, recipe.model
    if data.path == DEMO:
        data = data.model_copy(update={"path": str(material.data)})
    if model.name == DEMO:
        model = model.model_copy(update={"name": str(material.model)})
    return recipe.model_copy(update={"data": data, "model": model})


@InputTask
def dataset_fingerprint(context: RunContext) -> DataReference:
    """Read the data again and return the digests of its splits."""
    _splits.cache_clear()
    return redact_errors(partial(refer_to_data, context), "dataset_fingerprint", context.root.errors)


def refer_to_data(context: RunContext) -> DataReference:
    """Read the data; return the digests of its splits."""
    splits = _splits(context.data, context.labels, context.seed, context.unit_column)  # pyright: ignore[reportArgumentType]
    return DataReference(
        train=_reference("train", splits.train),
        validation=_reference("validation", splits.validation),
        test=_reference("test", splits.test),
    )


@InputTask
def model_fingerprint(settings: ModelSettings) -> ModelReference:
    """Pin the model to a digest or commit."""
    return resolve_model(settings)


def drawn_rows(context: RunContext, reference: SplitReference, rows: int, seed: int) -> SplitReference:
    """Draw random rows of a split, in equal numbers per class as far as possible; return a reference to them.

    With the same seed, a smaller sample is the beginning of a larger one.
    """
    texts = _drawn(context, read_split(context, reference), rows, seed)
    return SplitReference(split=reference.split, digest=texts.digest, rows=len(texts), drawn=(rows, seed))


def read_split(context: RunContext, reference: SplitReference) -> LabelledTexts:
    """Read the texts of a reference.

    Raises:
        InputError: if the data changed after the reference was made.
    """
    splits = _splits(context.data, context.labels, context.seed, context.unit_column)  # pyright: ignore[reportArgumentType]
    texts: LabelledTexts = getattr(splits, reference.split)
    if reference.drawn:
        texts = _drawn(context, texts, *reference.drawn)
    if texts.digest != reference.digest:
        raise InputError("the data changed during the run", reference.split, "run again")
    return texts


def read_model(
    context: RunContext, model: ModelReference, prompt_template: PromptTemplate, attention: str | None = None
) -> tuple[LanguageModel, TokenisedTemplate]:
    """Load the frozen model for the run's device and number of threads; tokenise the prompt template."""
    # Imported here because torch and transformers take seconds to import, and cached stages do not need them.
    import torch

    from gradmm.lm.loading import load_language_model
    from gradmm.lm.template import tokenise_template

    if context.threads:
        torch.set_num_threads(context.threads)
    language_model = load_language_model(model, context.device, attention)
    return language_model, tokenise_template(language_model, prompt_template)


def _drawn(context: RunContext, texts: LabelledTexts, rows: int, seed: int) -> LabelledTexts:
    from gradmm.data.examples import class_counts, sample_class_rows  # imported here because it imports torch

    return texts.take(sample_class_rows(texts.labels, class_counts(rows, context.labels), seed))


@lru_cache(maxsize=1)
def _splits(settings: DataSettings, labels: tuple[int, ...], seed: int, unit_column: str | None) -> Splits:
    return load_splits(settings, labels, seed, unit_column)


def _reference(split: str, texts: LabelledTexts) -> SplitReference:
    return SplitReference(split=split, digest=texts.digest, rows=len(texts))
