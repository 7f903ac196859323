"""The stages of a run one by one in memory, for research: without Prefect, and with no file but the ledger's.

    recipe = gradmm.load_recipe("recipe.yaml")
    language_model = gradmm.load_language_model(recipe.model)
    records = gradmm.LabelledTexts.of(frame["text"], frame["label"])

    target = gradmm.target_gradient(language_model, recipe, records)
    texts = gradmm.generate(language_model, target)
    texts = gradmm.filter_texts(language_model, target, texts)
    labelled = gradmm.label(language_model, target, texts)
    found = gradmm.audit(language_model, target, labelled, members=records, non_members=held_out)

Each function calls the code of the stages of the same purpose, so for the same recipe, records and model it gives
what `gradmm run` gives; only noise is drawn anew. The recipe's `data` and `model` only say where to read from, and
`execution` is not used.

A target with noise is a release. It needs a ledger, and is charged to it in every call: nothing is cached, and no
earlier target is used again. A target without noise has no guarantee and is not counted. Unlike in a run, errors
are not redacted, and may quote records.

The examples run in a folder with a recipe and its model.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float
from torch import Tensor

from gradmm.audits.mechanism_audit import MechanismAudit, mechanism_audit
from gradmm.audits.memorisation import compare_texts
from gradmm.config.extras import check_extras
from gradmm.config.recipe import Recipe
from gradmm.data.splits import LabelledTexts
from gradmm.errors import InputError
from gradmm.evaluation.finetune_eval import Finetuning
from gradmm.evaluation.membership import attack_texts
from gradmm.evaluation.schedule import Schedule
from gradmm.filters.category_balance import balance_categories
from gradmm.filters.label_filter import classify_texts, without_filter
from gradmm.filters.loss_selection import select_by_loss, select_texts
from gradmm.filters.rows import filter_figures, filters_by_probe, kept_texts
from gradmm.generation.generation import generate_shard, merge_shards
from gradmm.generation.per_class import class_records, text_tokens, tilts_words
from gradmm.generation.shards import plan_shards
from gradmm.generation.word_tilt import fit_word_tilts
from gradmm.labelling.labelling import labelled_texts, labelling_figures, uses_release
from gradmm.labelling.teacher import label_texts
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.prompt_template import PromptTemplate
from gradmm.lm.template import TokenisedTemplate, tokenise_template
from gradmm.privacy.guarantee import Guarantee, guarantee
from gradmm.privacy.ledger import Ledger, Release, budget_of, composed_guarantee, release_of
from gradmm.privacy.mechanism import GaussianMechanism
from gradmm.privacy.release_plan import ReleasePlan, release_plan
from gradmm.storage.artifacts import StageRows
from gradmm.target.matched_target import released_moments, released_token_sums
from gradmm.target.preflight import check_rounding
from gradmm.target.probe import Moments
from gradmm.target.tables import matrix_of
from gradmm.target.target_gradient import TargetSums, released_target, target_sums
from gradmm.target.target_space import TargetSpace, from_table, space_of_public_text
from gradmm.target.token_rates import TokenSums


@dataclass(frozen=True, eq=False)
class Target:
    """The target that texts have to match, and everything else that was released with it.

    A target with noise was charged to the ledger. It can be pickled; a lost one has to be released again.

    Attributes:
        recipe: that it was computed by.
        released: the rows of the stage `target_gradient`. Only they are covered by the guarantee. Of the figures,
            `records`, `text_tokens`, `clip_fraction` and `cosine` are of the private records, without noise.
        space: the target space, made of public text; None if the target uses none.
        guarantee: composed with all earlier releases that the ledger knows of.
        mechanism_audit: the audit of the mechanism before the release; None without a release.
    """

    recipe: Recipe
    plan: ReleasePlan
    released: StageRows
    space: StageRows | None
    guarantee: Guarantee
    mechanism_audit: MechanismAudit | None = None

    @property
    def gradients(self) -> dict[int, Float[Tensor, "rows columns"]]:
        """The sum of each class's clipped gradients, with its noise, by label; float32, on the CPU.

        Rows are tokens and columns directions of the target space. A full gradient (`matching=full-gradient`) is
        a flat vector in rows of 256, padded with zeros.
        """
        return {label: matrix_of(self.released.rows, label) for label in self.recipe.class_names}

    def moments(self, language_model: LanguageModel) -> Moments | None:
        """Return the sums that the linear probe is fitted to; None if none were released."""
        if self.plan.target.probe_share == 0:
            return None
        return released_moments(self.released, _template(language_model, self.recipe))

    def token_sums(self, language_model: LanguageModel) -> TokenSums | None:
        """Return the sums that give the token rates; None if none were released."""
        if self.plan.target.token_share == 0:
            return None
        return released_token_sums(self.released, _template(language_model, self.recipe))


@dataclass(frozen=True, eq=False)
class TextAudit:
    """Attacks on synthetic texts. All of it is computed from private records, and not covered by a guarantee.

    Attributes:
        membership: one row for each run of the membership-inference attack, see `gradmm.audits.mia_audit`.
        memorisation: one row for each text, see `gradmm.audits.memorisation`.
        figures: summaries of both, with these names as keys.
    """

    membership: pd.DataFrame
    memorisation: pd.DataFrame
    figures: dict[str, dict[str, Any]]


def target_gradient(
    language_model: LanguageModel, recipe: Recipe, records: LabelledTexts, *, ledger: Ledger | None = None
) -> Target:
    """Compute each class's sum of clipped gradients, with noise if the recipe sets `privacy.epsilon`.

    A record's gradient g is that of the loss of its class's verbaliser after the text, with respect to the output
    head (GRADMM; Nguyen et al., ICML 2025, eq. 6-8), mapped to the target space, less the mean gradient of the
    class's public text if `target_gradient.centred`. The target of a class is the sum of min(1, C / |g|) g over
    its records, plus noise of standard deviation `target.plan.mechanism.sigma` in each coordinate. C is the share
    of `privacy.clipping_norm` that `target.plan.norms.gradient` gives. With `privacy.unit_column` the sum is over
    units, whose g is the mean over their records.

    With noise, the mechanism is audited first, as in every run. The release is then charged, whether or not the
    same target was released before. By default the budget has room for one release: see `privacy.budget_epsilon`.

    Args:
        language_model: with attention="eager" for `matching=full-gradient`.
        records: private texts and their labels, with units if the recipe sets `privacy.unit_column`.
        ledger: counts the releases from these records; `gradmm.Ledger.of(root, recipe.ledger)` is the one of
            `gradmm run`. Required for a target with noise, and refused for one without.

    Raises:
        InputError: for records that do not fit the recipe, for a ledger that is missing, and without noise for
            texts without a gradient.
        BudgetExhausted: if the release would exceed the budget. Nothing was released.
        RuntimeError: if the audit of the mechanism fails. Nothing was released.

    >>> import gradmm
    >>> recipe = gradmm.load_recipe("recipe.yaml", ["privacy.epsilon=null"])
    >>> language_model = gradmm.load_language_model(recipe.model)
    >>> records = gradmm.LabelledTexts.of(["We loved it.", "Fresh bread.", "Never again."], [1, 1, 0])
    >>> target = gradmm.target_gradient(language_model, recipe, records)
    >>> {label: tuple(gradient.shape) for label, gradient in target.gradients.items()}
    {0: (2, 3), 1: (2, 3)}
    >>> target.guarantee.sentence
    'No privacy guarantee: the target gradient has no noise, and gradients can reveal texts.'

    With noise, a ledger counts the release. A second one exceeds the budget:

    >>> from pathlib import Path
    >>> recipe = gradmm.load_recipe("recipe.yaml", ["privacy.epsilon=1"])
    >>> ledger = gradmm.Ledger.of(Path("gradmm-root"), recipe.ledger)
    >>> private = gradmm.target_gradient(language_model, recipe, records, ledger=ledger)
    >>> private.guarantee.epsilon, private.guarantee.releases
    (1.0, 1)
    >>> gradmm.target_gradient(language_model, recipe, records, ledger=ledger)
    Traceback (most recent call last):
    gradmm.errors.BudgetExhausted: privacy.budget_epsilon: this release would bring the composed epsilon to ...
    """
    plan = release_plan(recipe)
    check_extras(recipe)
    _check_records(recipe, records)
    if plan.charged and ledger is None:
        fix = "give ledger=gradmm.Ledger.of(root, recipe.ledger), or set privacy.epsilon=null"
        raise InputError("a target with noise is a release, which a ledger has to count", "ledger", fix)
    if ledger is not None and not plan.charged:
        fix = "leave it out, or set privacy.epsilon without privacy.unsafe_noise_seed"
        raise InputError("a target without a guarantee cannot be counted in a ledger", "ledger", fix)
    release = None
    if ledger is not None and plan.mechanism is not None:
        release = _release_of(language_model, recipe, plan, plan.mechanism, records)
        ledger.check(budget_of(recipe.privacy, plan.mechanism), release)  # fail early; `charge` checks again
        ledger.stated_releases(recipe.privacy.unit_column)  # a damaged ledger is found before the charge
    template = _template(language_model, recipe)
    check_rounding(recipe, template.longest_response)
    space = None
    if plan.target.uses_public_text:
        instructions, norm = recipe.instructions, plan.norms.gradient
        space = StageRows(*space_of_public_text(language_model, template, instructions, plan.target, norm))
    audited = None
    if ledger is not None and release is not None and plan.mechanism is not None:
        audited = mechanism_audit(plan.mechanism, plan.norms, recipe.mechanism_audit, recipe.seed)
        audited.require_pass()
        # Judged again, because other ledgers may count the same records.
        planned = budget_of(recipe.privacy, plan.mechanism), release
        ledger.count_records(records.texts, records.unit_names, planned)
    where = from_table(space and space.rows, template, plan.target, language_model.device)
    sums = target_sums(
        language_model,
        template,
        records,
        plan.target,
        plan.clipping_norm,
        plan.mechanism,
        where,
        rows_per_unit=recipe.privacy.max_rows_per_unit,
    )
    stated = guarantee(recipe.privacy, plan.mechanism)
    if ledger is not None and release is not None and plan.mechanism is not None:
        released = _charged(sums, where, plan.mechanism, ledger, release, recipe)
        stated = composed_guarantee(stated, ledger.stated_releases(recipe.privacy.unit_column))
    else:
        released = StageRows(*released_target(sums, where, plan.mechanism))
    return Target(recipe, plan, released, space, stated, audited)


def generate(language_model: LanguageModel, target: Target, recipe: Recipe | None = None) -> pd.DataFrame:
    """Generate texts of every class: written by the model with tilted words, or searched to match the target.

    With method=search or admm, a text's matching loss compares its gradient with the target, see
    `gradmm.gradients.matching_loss`; admm is Algorithm 1 of GRADMM. The same seed gives the same texts.

    Args:
        recipe: its blocks `generation`, `word_tilt` and `seed` may differ from the target's. Default: the
            target's.

    Returns:
        `generation.per_class` rows for each class. `id`; `label` and `label_name`, of the class that the text is
        written for; `text`; `token_ids`; `matching_loss` and `probe_loss` (nats), NaN for method=written;
        `log_perplexity` (nats for each token); `shard`; `token_passes`, the cost of a text; `loss_history`.
        The stage's figures are in `.attrs`.

    Raises:
        InputError: if an instruction and a text are too long for the model, if its vocabulary has no words to
            write with, if losses are not finite, or if the recipe does not fit the target.

    >>> import gradmm
    >>> recipe = gradmm.load_recipe("recipe.yaml", ["privacy.epsilon=null"])
    >>> language_model = gradmm.load_language_model(recipe.model)
    >>> records = gradmm.LabelledTexts.of(["We loved it.", "Fresh bread.", "Never again."], [1, 1, 0])
    >>> target = gradmm.target_gradient(language_model, recipe, records)
    >>> texts = gradmm.generate(language_model, target)
    >>> texts[["id", "label_name"]].values.tolist()
    [['0-00000', 'bad'], ['0-00001', 'bad'], ['1-00000', 'good'], ['1-00001', 'good']]
    """
    recipe = _fitting(recipe, target)
    template, matching = _template(language_model, recipe), target.plan.target
    lengths = {label: text_tokens(recipe, label, target.released) for label in recipe.class_names}
    word_tilt = None
    if tilts_words(recipe, matching):
        assert target.space is not None
        word_tilt, _ = fit_word_tilts(
            language_model,
            template,
            target.released,
            target.space,
            matching,
            recipe.classes,
            lengths,
            recipe.word_tilt,
            recipe.generation,
            recipe.seed,
        )
    categories = {each.label: each for each in recipe.classes}
    settings = recipe.generation
    made = [
        generate_shard(
            language_model,
            template,
            categories[shard.label],
            shard,
            lengths[shard.label],
            settings,
            recipe.seed,
            target.released,
            target.space,
            class_records(recipe, shard.label, target.released),
            target.plan.clipping_norm,
            matching,
            word_tilt,
        )
        for shard in plan_shards(list(categories), settings.per_class, settings.examples_per_shard)
    ]
    return _with_figures(*merge_shards([texts for texts, _ in made], [figures for _, figures in made]))


def filter_texts(
    language_model: LanguageModel, target: Target, texts: pd.DataFrame, recipe: Recipe | None = None
) -> pd.DataFrame:
    """Filter texts as a run does: by their label, by their matching loss and near duplicates, by class.

    Args:
        texts: rows of `generate`.
        recipe: its filters' blocks may differ from the target's. Default: the target's.

    Returns:
        The rows that reached the last filter, with the columns `predicted` and `probability` (by the label
        filter), `rank` (within the class, 1 is best), `kept` and `reason`. Near duplicates and texts that an
        earlier filter dropped are left out. The figures of the last filter are in `.attrs`.

    Raises:
        InputError: if exemplars and texts are too long for the model, if the recipe does not fit the target, or if
            the label filter drops all texts of a class.
    """
    recipe = _fitting(recipe, target)
    template, matching = _template(language_model, recipe), target.plan.target
    if recipe.label_filter.enabled:
        probed = filters_by_probe(recipe, matching)
        classified, _ = classify_texts(
            language_model,
            PromptTemplate.of(recipe),
            template,
            texts,
            recipe.label_filter,
            target.released if probed else None,
            target.space if probed else None,
        )
        counts = filter_figures(classified)["kept_by_label"]
        if dropped := [label for label, count in counts.items() if not count]:
            fix = "generate more texts (generation.per_class), or relax label_filter"
            raise InputError(f"no text of label {dropped[0]} is left after label_filter", "texts", fix)
    else:
        classified = without_filter(texts)
    candidates, weight = kept_texts(classified), recipe.generation.probe_weight
    if matching.matching != "head":
        selected = select_by_loss(candidates, recipe.loss_selection, weight)
    else:
        selected, _ = select_texts(
            language_model,
            template,
            candidates,
            target.released,
            target.space,
            {label: class_records(recipe, label, target.released) for label in recipe.class_names},
            target.plan.clipping_norm,
            matching,
            recipe.generation.loss,
            weight,
            recipe.loss_selection,
        )
    balanced = balance_categories(kept_texts(selected), recipe.category_balance)
    return _with_figures(balanced, filter_figures(balanced))


def label(
    language_model: LanguageModel, target: Target, texts: pd.DataFrame, recipe: Recipe | None = None
) -> pd.DataFrame:
    """Give each text the probabilities of the classes, by the calibrated model and by what was released.

    The formula and its terms are those of `gradmm.labelling.teacher`.

    Args:
        texts: rows of `generate` or `filter_texts`; of the latter, those that are kept.
        recipe: its block `labelling` may differ from the target's. Default: the target's.

    Returns:
        One row for each text: as given, without `kept` and `reason`, and with `probabilities` (an array in the
        order of the recipe's classes, which adds up to 1) and `written_for`. `label` and `label_name` become those
        of the likeliest class. The stage's figures are in `.attrs`.

    Raises:
        InputError: if the model's logits are not finite, or if the recipe does not fit the target.

    >>> import gradmm
    >>> recipe = gradmm.load_recipe("recipe.yaml", ["privacy.epsilon=null"])
    >>> language_model = gradmm.load_language_model(recipe.model)
    >>> records = gradmm.LabelledTexts.of(["We loved it.", "Fresh bread.", "Never again."], [1, 1, 0])
    >>> target = gradmm.target_gradient(language_model, recipe, records)
    >>> labelled = gradmm.label(language_model, target, gradmm.generate(language_model, target))
    >>> [f"{sum(each):.4f}" for each in labelled["probabilities"]]
    ['1.0000', '1.0000', '1.0000', '1.0000']
    >>> labelled["written_for"].tolist()
    [0, 0, 1, 1]
    """
    recipe = _fitting(recipe, target)
    names, matching = recipe.class_names, target.plan.target
    kept = kept_texts(texts) if "kept" in texts else texts
    if recipe.labelling.labels == "hard":
        labelled = labelled_texts(kept, None, names)
        return _with_figures(labelled, labelling_figures(labelled, names))
    released = uses_release(recipe.labelling, matching)
    return _with_figures(
        *label_texts(
            language_model,
            _template(language_model, recipe),
            kept,
            names,
            recipe.instructions,
            matching,
            recipe.labelling,
            target.released if released else None,
            target.space if released else None,
        )
    )


def audit(
    language_model: LanguageModel,
    target: Target,
    texts: pd.DataFrame,
    members: LabelledTexts,
    non_members: LabelledTexts,
    recipe: Recipe | None = None,
    *,
    schedule: tuple[float, int] | None = None,
) -> TextAudit:
    """Attack labelled texts: membership inference on a model fine-tuned on them, and a search for copies.

    A record is called a member if the loss of the fine-tuned model on it is low (Yeom et al., 2018); copies are
    found by nearest neighbours and common runs of words (Carlini et al., 2021). See `gradmm.audits`. The mechanism
    itself is audited by `target_gradient`.

    Args:
        language_model: loaded from files, because fine-tuning begins with fresh weights in float32.
        texts: rows of `label`.
        members: the records that the target was computed from.
        non_members: unused records from the same source, as many if possible.
        recipe: its blocks `finetune_eval`, `mia_audit` and `seed` may differ from the target's.
        schedule: learning rate and number of steps of the fine-tuning. Default: the recipe's, if it has one only.
            A run takes the pair with the best accuracy on validation.

    Raises:
        InputError: if there are fewer than four members or non-members, for a schedule that is missing, or if the
            recipe does not fit the target.

    >>> import gradmm
    >>> recipe = gradmm.load_recipe("recipe.yaml", ["privacy.epsilon=null"])
    >>> language_model = gradmm.load_language_model(recipe.model)
    >>> texts = ["We loved it.", "Fresh bread.", "Never again.", "Cold coffee."]
    >>> records = gradmm.LabelledTexts.of(texts, [1, 1, 0, 0])
    >>> texts = ["A warm soup.", "Good light.", "Bad chairs.", "Rude staff."]
    >>> others = gradmm.LabelledTexts.of(texts, [1, 1, 0, 0])
    >>> target = gradmm.target_gradient(language_model, recipe, records)
    >>> labelled = gradmm.label(language_model, target, gradmm.generate(language_model, target))
    >>> found = gradmm.audit(language_model, target, labelled, records, others, schedule=(1e-4, 2))
    >>> found.figures["memorisation"]["copies_of_any_member"]
    0
    >>> found.membership["test_records"].tolist()
    [2, 2]
    """
    recipe = _fitting(recipe, target)
    if language_model.reference is None:
        raise InputError("a model in memory cannot be fine-tuned anew", "language_model", "load it from its files")
    for each in (members, non_members):
        _check_labels(recipe, each)
    if members.units is not None:
        members = members.used(recipe.privacy.rows_per_unit)
    finetuning = Finetuning(
        language_model.reference,
        language_model.tokenizer,
        language_model.placement,
        _template(language_model, recipe),
        recipe.finetune_eval,
    )
    mechanism = target.plan.mechanism
    membership, of_membership = attack_texts(
        finetuning,
        texts,
        finetuning.tokenised(members),
        finetuning.tokenised(non_members),
        _schedule(recipe, schedule),
        recipe.mia_audit,
        mechanism and mechanism.epsilon,
        mechanism and mechanism.delta,
        recipe.seed,
    )
    memorisation, of_memorisation = compare_texts(texts, members.texts, non_members.texts, recipe.seed)
    return TextAudit(membership, memorisation, {"membership": of_membership, "memorisation": of_memorisation})


def _template(language_model: LanguageModel, recipe: Recipe) -> TokenisedTemplate:
    return tokenise_template(language_model, PromptTemplate.of(recipe))


def _with_figures(frame: pd.DataFrame, figures: dict[str, Any]) -> pd.DataFrame:
    """Put figures into the frame's `attrs`, in place of those that pandas copies from the frame it was made of."""
    frame.attrs.clear()
    frame.attrs.update(figures)
    return frame


def _fitting(recipe: Recipe | None, target: Target) -> Recipe:
    """Return the recipe, or the target's if it is None.

    Raises:
        InputError: if the recipe would release another target.
    """
    if recipe is None:
        return target.recipe
    blocks = {"classes", "template", "target_gradient", "privacy"}
    differing = sorted(name for name in blocks if getattr(recipe, name) != getattr(target.recipe, name))
    if differing:
        problem = f"the target was computed with other settings of {', '.join(differing)}"
        raise InputError(problem, "recipe", "use those of target.recipe, or compute another target")
    return recipe


def _check_labels(recipe: Recipe, records: LabelledTexts) -> None:
    wrong = [row for row, label in enumerate(records.labels) if label not in recipe.class_names]
    if wrong:
        problem = f"row {wrong[0]} has a label that belongs to no class"
        raise InputError(problem, "records", "add a class, or remove the row")


def _check_records(recipe: Recipe, records: LabelledTexts) -> None:
    """Check labels and units.

    Raises:
        InputError: for a label of no class or a class without a record, and for units without
            `privacy.unit_column` or the other way round.
    """
    _check_labels(recipe, records)
    absent = [label for label in recipe.class_names if label not in records.labels]
    if absent:
        raise InputError(f"no row has the label {absent[0]}", "records", "add rows, or remove the class")
    if (records.units is None) != (recipe.privacy.unit_column is None):
        problem = "records with units of privacy" if records.units else "records without units of privacy"
        fix = "set it and give units, or neither"
        raise InputError(f"{problem} do not fit this setting", "privacy.unit_column", fix)


def _release_of(
    language_model: LanguageModel,
    recipe: Recipe,
    plan: ReleasePlan,
    mechanism: GaussianMechanism,
    records: LabelledTexts,
) -> Release:
    """Describe the release. Its keys are of no stage, so that no run takes it for a target in its cache."""
    model = None if language_model.reference is None else language_model.reference.key
    settings = [plan.target.key_fields(), mechanism.model_dump(mode="json"), recipe.template.key_fields()]
    settings_key = _digest(["in memory", model, *settings, [each.key_fields() for each in recipe.classes]])
    stage_key = _digest([settings_key, records.digest])
    return release_of(recipe.name, mechanism, plan.target, recipe.privacy.unit_column, stage_key, settings_key)


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _charged(
    sums: TargetSums,
    where: TargetSpace,
    mechanism: GaussianMechanism,
    ledger: Ledger,
    release: Release,
    recipe: Recipe,
) -> StageRows:
    """Charge the release, then draw its noise."""
    with ledger.lock():
        budget = ledger.set_budget(budget_of(recipe.privacy, mechanism), unless_set=True)
        with ledger.charge(release, budget) as finish:
            released = StageRows(*released_target(sums, where, mechanism))
            finish(_content_digest(released.rows))
    return released


def _content_digest(rows: pa.Table) -> str:
    buffer = io.BytesIO()
    pq.write_table(rows, buffer)
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def _schedule(recipe: Recipe, given: tuple[float, int] | None) -> Schedule:
    if given is not None:
        return Schedule(*given)
    grid = [*product(recipe.finetune_eval.learning_rates, recipe.finetune_eval.steps)]
    if len(grid) > 1:
        problem = "the recipe has several learning rates or numbers of steps"
        raise InputError(problem, "finetune_eval", "give schedule=(learning rate, steps), or set one of each")
    return Schedule(*grid[0])
