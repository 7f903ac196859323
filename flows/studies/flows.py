"""The flows of the studies: each varies one thing about a recipe, and compares it with the recipe's own texts.

compare        the texts: baselines, at several sizes (the paper's Table 1)
scarce         the data: few real rows (Figure 1)
transfer       the model that is trained (Table 2)
ablate         the recipe's settings (Tables 4 and 5, and more)
scale          the number of texts, by generation method
epsilon        the noise (Figure 3c)
distribution   nothing: distances from real texts instead of accuracies (Table 3, Figure 3b)
gradients      nothing: gradients along fine-tuning instead of accuracies (Figure 3a)
bounds         nothing: the lemma and the theorem of `gradmm.studies.gradient_path` along fine-tuning

Each checks its arguments before it computes anything, and makes every release before it fine-tunes: a release that
the privacy budget refuses must not cost hours of work. Common arguments are

    root: the folder, or the URL in an object store, that keeps stages and runs.
    arms: names of `gradmm.studies.arms.ARMS`. The product's arm is always included.
    command: the command line, for the record.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import ParamSpec

from prefect import Flow, Task, flow
from prefect.runtime import flow_run

from gradmm.config.recipe import Recipe
from gradmm.config.settings import FinetuneEvalSettings
from gradmm.evaluation.arm import CALIBRATED, Arm
from gradmm.flows.runtime.run_names import timed_name
from gradmm.flows.runtime.ui_logs import logs_in_ui
from gradmm.flows.studies.study import Study
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.storage.artifacts import StageArtifact
from gradmm.storage.location import Location
from gradmm.studies.ablations import Ablation, ablated, check_ablations
from gradmm.studies.arm_recipes import scaled, with_epsilon
from gradmm.studies.arms import (
    ARMS,
    BASELINES,
    CLASSIFIER,
    EPSILONS,
    PRODUCT,
    REAL_ROWS,
    RIVALS,
    ROWS,
    SCALES,
    private_arm,
)
from gradmm.studies.plans import (
    all_texts,
    check_distribution,
    check_epsilons,
    check_models,
    check_path,
    check_plan,
    check_scale,
    check_scarce,
    check_test_rows,
    default_sizes,
)
from gradmm.studies.record import StudyRecord
from gradmm.tasks.runtime.input_checks import other_model_check
from gradmm.tasks.runtime.inputs import drawn_rows, model_fingerprint
from gradmm.tasks.studies import tables
from gradmm.tasks.studies.distribution import distribution as distribution_stage
from gradmm.tasks.studies.gradient_path import gradient_path

logger = logging.getLogger("gradmm.flow")

ROOT = Path("gradmm-root")

Arguments = ParamSpec("Arguments")

#: Draws the real rows of gradients and bounds. Seeds of recipes, which draw the arm `random`, are not negative.
REAL_SEED = -1


def study_flow(
    function: Callable[Arguments, StudyRecord], name: str | None = None
) -> Flow[Arguments, StudyRecord]:
    """Make the flow `gradmm-<name>` of a study, by default named as its function. Its log reaches Prefect's UI."""

    # Not `logs_in_ui()(function)`: worker processes get a copy of the flow, and a context manager has none.
    @functools.wraps(function)
    def logged(*args: Arguments.args, **kwargs: Arguments.kwargs) -> StudyRecord:
        with logs_in_ui():
            return function(*args, **kwargs)

    logged.__signature__ = inspect.signature(function, eval_str=True)  # pyright: ignore[reportAttributeAccessIssue]
    study = name or function.__name__
    return flow(
        name=f"gradmm-{study}",
        flow_run_name=lambda: timed_name(f"{study} {flow_run.parameters['recipe'].name}"),
        persist_result=False,
        result_serializer="json",
    )(logged)  # pyright: ignore


@study_flow
def compare(
    recipe: Recipe,
    root: Location = ROOT,
    sizes: tuple[int, ...] | None = None,
    arms: tuple[str, ...] = tuple(ARMS),
    epsilons: tuple[float, ...] = (),
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Fine-tune on every arm at every size and with every seed.

    Every seed of `finetune_eval.seeds` has its own generation, draw of random rows and order of fine-tuning. The
    target, with its noise, is released once for all.

    Args:
        sizes: numbers of texts in all classes together; default, the paper's sizes that the recipe can fill.
        epsilons: adds the product's arm, and those rivals that `arms` names, under these guarantees. Each is one
            more release from the data.
    """
    sizes = tuple(sorted(set(default_sizes(recipe) if sizes is None else sizes)))
    epsilons = tuple(sorted(set(epsilons)))
    check_plan(recipe, sizes, arms, epsilons)
    study = Study("compare", recipe, root, command)
    study.check_budget([with_epsilon(study.recipe, value) for value in epsilons], arms)
    study.check_rivals(arms)
    _ = study.target_context  # the first release
    private = {private_arm(epsilon): study.private(epsilon) for epsilon in epsilons}
    texts = study.arms(arms) | {arm: variant.texts for arm, variant in private.items()}
    for name, epsilon in product(RIVALS, epsilons):
        if name in arms:
            texts |= study.rival(name, epsilon)
    (evaluations,) = study.evaluate([study.trials(texts, sizes)])
    measures = study.measure(texts, sizes)
    return study.finish(tables.compare, texts, sizes, private, evaluations=evaluations, measures=measures)


@study_flow
def scarce(
    recipe: Recipe, root: Location = ROOT, rows: tuple[int, ...] = ROWS, command: tuple[str, ...] = ()
) -> StudyRecord:
    """Generate many texts from few real rows, and fine-tune on either.

    Every seed draws its own rows. The validation and test splits stay complete, so the learning rate and the
    number of steps are chosen as with plentiful data, for all arms alike.

    Args:
        rows: numbers of real rows, as evenly over the classes as possible. Smaller draws are parts of larger ones.
    """
    rows = tuple(sorted(set(rows)))
    check_scarce(recipe, rows)
    study = Study("scarce", recipe, root, command)
    study.check_rows(max(rows))
    before, calibrated, zero_shot, product = (ARMS[n] for n in ("before", CALIBRATED, "zero-shot", PRODUCT))
    untrained = {arm: study.texts(arm) for arm in (before, calibrated)}
    written = {zero_shot: study.texts(zero_shot)}
    few, plans = [0, study.size], [study.trials(untrained, [0]), study.trials(written, [study.size])]
    for count in rows:
        variants = {seed: study.from_rows(count, seed) for seed in study.seeds}
        few += [count, count]
        rows_alone = [study.trial(v.target_context, REAL_ROWS, None, count, seed) for seed, v in variants.items()]
        synthetic = [
            study.trial(v.target_context, product, v.texts[seed], study.size, seed) for seed, v in variants.items()
        ]
        plans += [[rows_alone], [synthetic]]
    arms = (before, calibrated, zero_shot, REAL_ROWS, product)
    return study.finish(tables.scarce, arms, rows, few=few, evaluations=study.evaluate(plans))


@study_flow
def transfer(
    recipe: Recipe,
    models: tuple[str, ...] = (),
    root: Location = ROOT,
    arms: tuple[str, ...] = BASELINES["transfer"],
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Train the recipe's model, others, and a TF-IDF classifier on the same texts.

    Args:
        models: hub ids or folders of causal language models. The recipe's other `model` settings apply to all.
    """
    check_models(recipe, models, arms)
    check_plan(recipe, [all_texts(recipe)], arms)
    study = Study("transfer", recipe, root, command)
    model = study.recipe.model
    settings = [model, *(model.model_copy(update={"name": name, "revision": None}) for name in models)]
    # Before any work: refuses a model that cannot be read, or that the recipe's texts do not fit.
    references = {each.name: model_fingerprint(each) for each in settings}
    for name in models:
        other_model_check(study.runs.context, name, references[name], PromptTemplate.of(study.recipe))
    texts, context = study.arms(arms), study.target_context
    classified = study.classify(texts, [study.size])  # first: it takes seconds
    plans = [study.trials(texts, [study.size], replace(context, model=model)) for model in references.values()]
    return study.finish(
        tables.transfer,
        texts,
        [study.size],
        models=[*references, CLASSIFIER],
        evaluations=[*study.evaluate(plans), classified],
    )


@study_flow
def ablate(
    recipe: Recipe, ablations: tuple[Ablation, ...], root: Location = ROOT, command: tuple[str, ...] = ()
) -> StudyRecord:
    """Fine-tune on the recipe's texts and on those of each ablation.

    Args:
        ablations: in a private run, each one that changes the target is one more release.
    """
    check_ablations(recipe, ablations)
    study = Study("ablate", recipe, root, command)
    recipes = [ablated(study.recipe, ablation) for ablation in ablations]
    study.check_budget(recipes)
    variants = {ARMS[PRODUCT]: study.product}
    for ablation, changed in zip(ablations, recipes, strict=True):
        arm = Arm(ablation.name, "written" if ablation.unranked else "synthetic")
        variants[arm] = study.variant(ablation.name, changed)
    texts = {ARMS["before"]: None} | {arm: variant.texts for arm, variant in variants.items()}
    (evaluations,) = study.evaluate([study.trials(texts, [study.size])])
    return study.finish(
        tables.ablate,
        texts,
        [study.size],
        arms=[arm.name for arm in variants],
        generations=[list(variant.generated.values()) for variant in variants.values()],
        evaluations=evaluations,
        measures=study.measure(texts, [study.size]),
    )


@study_flow
def scale(
    recipe: Recipe,
    root: Location = ROOT,
    sizes: tuple[int, ...] = SCALES,
    methods: tuple[str, ...] = (),
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Fine-tune on more and more texts of each generation method, and tell what the texts cost.

    Each method generates the largest number once for each seed; smaller numbers are the first of these texts in
    the order of writing, since the best of more texts would cost as much as all of them. The target is released
    once for all methods.

    Args:
        sizes: numbers of texts in all classes together.
        methods: generation methods beside the recipe's own.
    """
    sizes, methods = tuple(sorted(set(sizes))), tuple(dict.fromkeys(methods))
    check_scale(recipe, sizes, methods)
    own = recipe.generation.method
    study = Study("scale", scaled(recipe, max(sizes), own), root, command)
    variants = {Arm(PRODUCT, "written"): study.product}
    for method in methods:
        if method != own:
            variants[Arm(method, "written")] = study.variant(method, scaled(study.recipe, max(sizes), method))
    texts = {arm: variant.texts for arm, variant in variants.items()}
    real = [size for size in sizes if size <= study.target_context.data.train.rows]
    plans = [study.trials({ARMS["before"]: None, **texts}, sizes), study.trials({ARMS["random"]: None}, real)]
    generated = {arm: variant.generated[study.seeds[0]] for arm, variant in variants.items()}
    return study.finish(
        tables.scale,
        [*texts, ARMS["random"]],
        sizes,
        arms={arm.name: own if arm.name == PRODUCT else arm.name for arm in texts},
        generations=list(generated.values()),
        evaluations=[*chain.from_iterable(study.evaluate(plans))],
    )


@study_flow
def epsilon(
    recipe: Recipe, root: Location = ROOT, epsilons: tuple[float, ...] = EPSILONS, command: tuple[str, ...] = ()
) -> StudyRecord:
    """Fine-tune on texts under each guarantee and without noise, and on texts written without data.

    Args:
        recipe: without privacy; `privacy.budget_epsilon` has to allow all releases together.
        epsilons: each is one release from the data.
    """
    epsilons = tuple(sorted(set(epsilons)))
    check_epsilons(recipe, epsilons)
    study = Study("epsilon", recipe, root, command)
    study.check_budget([with_epsilon(study.recipe, value) for value in epsilons])
    clean = study.target_context.target
    private = {private_arm(value): study.private(value) for value in epsilons}
    texts = study.arms(["before", "zero-shot"]) | {arm: variant.texts for arm, variant in private.items()}
    (evaluations,) = study.evaluate([study.trials(texts, [study.size])])
    return study.finish(
        tables.epsilon,
        texts,
        [study.size],
        private,
        clean=clean,
        epsilons={arm.name: value for arm, value in zip(private, epsilons, strict=True)},
        targets=[variant.target_context.target for variant in private.values()],
        evaluations=evaluations,
        measures=study.measure(texts, [study.size]),
    )


@study_flow
def distribution(
    recipe: Recipe,
    root: Location = ROOT,
    arms: tuple[str, ...] = BASELINES["distribution"],
    command: tuple[str, ...] = (),
) -> StudyRecord:
    """Measure distances of each arm's texts from test rows, without fine-tuning.

    Args:
        arms: those that cannot have as many texts as the product are left out.
    """
    check_distribution(recipe, arms)
    size = all_texts(recipe)
    study = Study("distribution", recipe, root, command)
    check_test_rows(study.target_context.data.test.rows)
    texts = study.arms(name for name in arms if ARMS[name].sizes([size]) == [size])
    seed = study.seeds[0]
    return study.finish(
        distribution_stage,
        texts,
        [size],
        arms=list(texts),
        made=[None if source is None else source[seed] for source in texts.values()],
        measures=study.measure(texts, [size]),
        size=size,
        seed=seed,
        **study.target_context.inputs("train", "test"),
    )


def _path_study(table: Task[..., StageArtifact]) -> Flow[..., StudyRecord]:
    """Make the flow of a study whose `table` tabulates gradient paths, which are cached for all such studies."""

    def along_fine_tuning(
        recipe: Recipe,
        learning_rate: float,
        steps: int,
        real_rows: int,
        root: Location = ROOT,
        arms: tuple[str, ...] = BASELINES[table.name],
        command: tuple[str, ...] = (),
    ) -> StudyRecord:
        """Measure the gradients of each arm's texts and of real rows, along fine-tuning on the arm.

        Args:
            learning_rate, steps: of every arm.
            real_rows: random train rows that represent the real data, drawn once.
        """
        check_path(recipe, arms, learning_rate, steps, real_rows)
        study = Study(table.name, recipe, root, command)
        settings = study.recipe.finetune_eval
        real = drawn_rows(study.runs.context, study.target_context.data.train, real_rows, REAL_SEED)
        texts = study.arms(arms)
        inputs = [
            {
                "arm": trial.arm,
                "made": trial.made,
                "size": study.size,
                "real": real,
                **study.target_context.inputs("train"),
                # Only the settings that decide a path: others would change its cache key.
                "settings": FinetuneEvalSettings(
                    steps=(steps,),
                    batch_size=settings.batch_size,
                    evaluate_every=settings.evaluate_every,
                    learning_rates=(learning_rate,),
                    seeds=(trial.seed,),
                ),
            }
            for trials in study.trials(texts, [study.size])
            for trial in trials
        ]
        paths = study.quiet.run_each(gradient_path, inputs, study.recipe.execution)
        for arm, path in zip(texts, paths[:: len(study.seeds)], strict=True):
            missing = study.size - path.figures["texts"]
            if missing > 0:
                logger.warning("%s has %d texts fewer than %d", arm.name, missing, study.size)
        return study.finish(table, texts, [study.size], paths=paths)

    return study_flow(along_fine_tuning, table.name)


gradients = _path_study(tables.gradients)
bounds = _path_study(tables.bounds)
