"""The commands of studies: `gradmm compare` and others. Each checks its plan before Prefect starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter

from gradmm.deployments.cli.options import DEFAULT_ROOT, Changes, Quiet, RecipeName, Root, Verbose, Words
from gradmm.deployments.recipe_files import default_ablations, find_ablations

if TYPE_CHECKING:
    from gradmm.config.recipe import Recipe

studies = App()
study = partial(studies.command, group=Group("Run a study", sort_key=3))

# Options with one or more values: `--seeds 0 1 2`.
ONE_OR_MORE = Parameter(consume_multiple=1)
Integers = Annotated[tuple[int, ...], ONE_OR_MORE]
Floats = Annotated[tuple[float, ...], ONE_OR_MORE]
Names = Annotated[tuple[str, ...], ONE_OR_MORE, Parameter(metavar="NAME...")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StudyOptions(Changes):
    """Options of every study.

    Args:
        seeds: Seeds, each of which generates and fine-tunes anew. Default: the recipe's finetune_eval.seeds.
    """

    seeds: Integers = ()
    root: Root = DEFAULT_ROOT
    quiet: Quiet = False
    verbose: Verbose = False

    def load(self, recipe: str) -> Recipe:
        """Load the recipe with its changes and seeds."""
        seeds = [f"finetune_eval.seeds={list(dict.fromkeys(self.seeds))}"] if self.seeds else []
        return super().load(recipe, *seeds)

    def run(self, name: str, recipe: Recipe, words: Sequence[str], **plan: Any) -> None:
        """Run the flow of the study `name` and print its tables."""
        from gradmm.deployments.serving.local_run import local_run, progress_on_stderr

        with local_run(self.root, self.verbose) as wait_for_server:
            from gradmm.flows.studies import flows
            from gradmm.storage.artifacts import Root
            from gradmm.studies.pages import study_page

            wait_for_server()
            with progress_on_stderr(self.quiet):
                record = getattr(flows, name)(recipe, root=str(self.root), **plan, command=("gradmm", *words))
        folder = Root(path=self.root).runs / record.run_id
        print(folder if self.quiet else f"{study_page(record)}\ntables and picture: {folder}")


@study
def compare(
    recipe: RecipeName,
    /,
    *,
    sizes: Integers = (),
    arms: Names = (),
    epsilon: Floats = (),
    options: StudyOptions = StudyOptions(),
    words: Words = (),
) -> None:
    """Compare a recipe's texts with baselines, at several sizes.

    Args:
        sizes: Texts in all. Default: those of 5 10 20 50 100 that the recipe can fill, and all of its texts.
        arms: Baselines: before, 'calibrated model', zero-shot, few-shot, 'soft zero-shot', rerank, herding,
            k-center, random, real-100, real-1k, 'all rows', gradmm; with --epsilon also rivals:
            private-evolution, private-evolution-10, epsvec, epsvec-2, dp-few-shot, dp-adapters.
            Default: all baselines.
        epsilon: Compare releases with these epsilons too. Each one spends privacy budget.
    """
    from gradmm.studies.arms import ARMS
    from gradmm.studies.plans import check_plan, default_sizes

    loaded = options.load(recipe)
    plan = {"sizes": sizes or default_sizes(loaded), "arms": arms or tuple(ARMS), "epsilons": epsilon}
    check_plan(loaded, **plan)
    options.run("compare", loaded, words, **plan)


@study
def scarce(
    recipe: RecipeName, /, *, rows: Integers = (), options: StudyOptions = StudyOptions(), words: Words = ()
) -> None:
    """Compare texts made from few real rows with these rows.

    Args:
        rows: Real rows in all. Default: 5 10 20 50.
    """
    from gradmm.studies.arms import ROWS
    from gradmm.studies.plans import check_scarce

    loaded, rows = options.load(recipe), rows or ROWS
    check_scarce(loaded, rows)
    options.run("scarce", loaded, words, rows=rows)


@study
def transfer(
    recipe: RecipeName,
    /,
    *,
    models: Names = (),
    arms: Names = (),
    options: StudyOptions = StudyOptions(),
    words: Words = (),
) -> None:
    """Train other models on a recipe's texts: a TF-IDF classifier, and language models.

    Args:
        models: Hub ids or folders of language models. Default: the recipe's alone.
        arms: Baselines. Default: before zero-shot random real-1k.
    """
    from gradmm.studies.arms import BASELINES
    from gradmm.studies.plans import all_texts, check_models, check_plan

    loaded, arms = options.load(recipe), arms or BASELINES["transfer"]
    check_models(loaded, models, arms)
    check_plan(loaded, [all_texts(loaded)], arms)
    options.run("transfer", loaded, words, models=models, arms=arms)


@study
def distribution(
    recipe: RecipeName, /, *, arms: Names = (), options: StudyOptions = StudyOptions(), words: Words = ()
) -> None:
    """Measure the distributional distance of a recipe's texts from real texts.

    Args:
        arms: Baselines. Default: zero-shot rerank random.
    """
    from gradmm.studies.arms import BASELINES
    from gradmm.studies.plans import check_distribution

    loaded, arms = options.load(recipe), arms or BASELINES["distribution"]
    check_distribution(loaded, arms)
    options.run("distribution", loaded, words, arms=arms)


def _along_fine_tuning(
    name: str,
    recipe: RecipeName,
    /,
    *,
    arms: Names = (),
    learning_rate: float | None = None,
    steps: int | None = None,
    real_rows: int = 1000,
    options: StudyOptions = StudyOptions(),
    words: Words = (),
) -> None:
    """Run the study `name`, gradients or bounds.

    Args:
        arms: Baselines. Default: zero-shot random.
        learning_rate: Learning rate of every arm. Default: the median of the recipe's.
        steps: Steps of every arm. Default: the median of the recipe's.
        real_rows: Train rows that stand for the real data.
    """
    from gradmm.studies.arms import BASELINES
    from gradmm.studies.plans import check_path, middle_schedule

    loaded = options.load(recipe)
    middle = middle_schedule(loaded)
    plan = {
        "arms": arms or BASELINES[name],
        "learning_rate": middle.learning_rate if learning_rate is None else learning_rate,
        "steps": middle.steps if steps is None else steps,
        "real_rows": real_rows,
    }
    check_path(loaded, **plan)
    options.run(name, loaded, words, **plan)


for _name, _help in {
    "gradients": "Compare gradients of a recipe's texts with real gradients, along fine-tuning.",
    "bounds": "Compare the theory's bounds with the measured gaps, along fine-tuning.",
}.items():
    study(partial(_along_fine_tuning, _name), name=_name, help=_help)


@study
def epsilon(
    recipe: RecipeName, /, *, epsilon: Floats = (), options: StudyOptions = StudyOptions(), words: Words = ()
) -> None:
    """Measure the cost of the noise at several epsilons.

    Args:
        epsilon: Epsilons to measure. Each one spends privacy budget. Default: 0.01 0.05 0.2 1.
    """
    from gradmm.studies.arms import EPSILONS
    from gradmm.studies.plans import check_epsilons

    loaded, epsilons = options.load(recipe), epsilon or EPSILONS
    check_epsilons(loaded, epsilons)
    options.run("epsilon", loaded, words, epsilons=epsilons)


@study
def scale(
    recipe: RecipeName,
    /,
    *,
    sizes: Integers = (),
    methods: Names = (),
    options: StudyOptions = StudyOptions(),
    words: Words = (),
) -> None:
    """Measure accuracy and cost by the number of texts.

    Args:
        sizes: Texts in all. Default: 100 300 1000 3000 10000.
        methods: Generation methods beside the recipe's own. Default: none.
    """
    from gradmm.studies.arms import SCALES
    from gradmm.studies.plans import check_scale

    loaded, plan = options.load(recipe), {"sizes": sizes or SCALES, "methods": methods}
    check_scale(loaded, **plan)
    options.run("scale", loaded, words, **plan)


@study
def ablate(
    recipe: RecipeName,
    /,
    *,
    ablations: Annotated[str | None, Parameter(metavar="NAME")] = None,
    only: Names = (),
    options: StudyOptions = StudyOptions(),
    words: Words = (),
) -> None:
    """Run ablations: the recipe with single parts changed or left out.

    Args:
        ablations: List of ablations: written, search, methods (generation methods by hard and soft labels), or a
            YAML file. Default: the list of the recipe's generation method.
        only: Ablations to run. Default: all.
    """
    from gradmm.studies.ablations import check_ablations, read_ablations

    loaded = options.load(recipe)
    method = loaded.generation.method
    chosen = read_ablations(find_ablations(ablations) if ablations else default_ablations(method), only)
    check_ablations(loaded, chosen)
    options.run("ablate", loaded, words, ablations=chosen)
