"""The stages in memory: their examples, and that no private target escapes the ledger.

`tests/flows/test_in_memory.py` compares them with a run.
"""

from __future__ import annotations

import doctest
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import yaml
from scipy.special import softmax

import gradmm
import gradmm.data.splits
import gradmm.in_memory
from gradmm.audits.mechanism_audit import MechanismAudit
from gradmm.errors import BudgetExhausted
from gradmm.labelling.teacher import Readings, Teacher
from gradmm.lm.language_model import LanguageModel
from gradmm.lm.model_reference import ModelReference

TEXTS = [
    *("the soup was warm", "a quiet room , great book", "we liked every page", "fresh bread , good light"),
    *("the train came late", "cold coffee again", "a terrible smell", "never again"),
]
RECIPE = {
    "name": "memory",
    "data": {"path": "reviews.csv"},
    "classes": [
        {"label": 0, "name": "bad", "verbaliser": " bad", "instruction": "a bad day :\n"},
        {"label": 1, "name": "good", "verbaliser": " good", "instruction": "a good day :\n"},
    ],
    "model": {"device": "cpu"},
    "privacy": {"epsilon": 1, "declared_records": 2000},
    "target_gradient": {
        "subspace_dimensions": 3,
        "probe_dimensions": 2,
        "public_texts": 20,
        "public_text_tokens": 5,
    },
    "word_tilt": {"iterations": 1, "texts": 10},
    "generation": {"per_class": 2, "text_tokens": 6},
    "mechanism_audit": {"draws": 400, "canaries": 20, "guesses": 10},
    "mia_audit": {"runs": 2},
}


@pytest.fixture
def folder(tiny_model: ModelReference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `recipe.yaml`."""
    values = RECIPE | {"model": {"name": tiny_model.name, "device": "cpu"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def recipe(folder: Path) -> Callable[..., gradmm.Recipe]:
    return lambda *changes: gradmm.load_recipe(folder / "recipe.yaml", changes)


@pytest.fixture
def language_model(tiny_model: ModelReference) -> LanguageModel:
    return gradmm.load_language_model(tiny_model)


@pytest.fixture
def records() -> gradmm.LabelledTexts:
    return gradmm.LabelledTexts.of(TEXTS, [1] * 4 + [0] * 4)


@pytest.fixture
def ledger(folder: Path) -> gradmm.Ledger:
    return gradmm.Ledger.of(folder / "root", "reviews")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("module", "examples"), [(gradmm.in_memory, 20), (gradmm.data.splits, 1)])
def test_the_examples_in_docstrings_are_true(module: ModuleType, examples: int) -> None:
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert tried >= examples
    assert failed == 0


def test_a_target_with_noise_needs_a_ledger_and_one_without_takes_none(
    recipe: Callable[..., gradmm.Recipe],
    language_model: LanguageModel,
    records: gradmm.LabelledTexts,
    ledger: gradmm.Ledger,
) -> None:
    with pytest.raises(gradmm.InputError, match="a release, which a ledger has to count"):
        gradmm.target_gradient(language_model, recipe(), records)
    for changes in (["privacy.epsilon=null"], ["privacy.unsafe_noise_seed=1"]):
        with pytest.raises(gradmm.InputError, match="without a guarantee cannot be counted"):
            gradmm.target_gradient(language_model, recipe(*changes), records, ledger=ledger)
    assert ledger.all_entries() == []


def test_every_call_is_another_release(
    recipe: Callable[..., gradmm.Recipe],
    language_model: LanguageModel,
    records: gradmm.LabelledTexts,
    ledger: gradmm.Ledger,
) -> None:
    settings = recipe("privacy.budget_epsilon=2")
    first, second = (gradmm.target_gradient(language_model, settings, records, ledger=ledger) for _ in range(2))
    assert not torch.equal(first.gradients[0], second.gradients[0])
    assert first.mechanism_audit is not None
    entries = ledger.entries()
    assert len({entry.sha256 for entry in entries} - {None}) == 2
    assert entries[0].release.sigma == first.plan.mechanism.sigma  # pyright: ignore[reportOptionalMemberAccess]
    assert [first.guarantee.releases, second.guarantee.releases] == [1, 2]
    composed = second.guarantee.composed_epsilon
    assert composed == pytest.approx(ledger.spent(entries[0].release.delta, "add-or-remove"))
    assert composed is not None
    assert 1 < composed < 2


def test_the_same_records_count_under_another_name(
    recipe: Callable[..., gradmm.Recipe],
    language_model: LanguageModel,
    records: gradmm.LabelledTexts,
    ledger: gradmm.Ledger,
    folder: Path,
) -> None:
    gradmm.target_gradient(language_model, recipe(), records, ledger=ledger)
    other = gradmm.Ledger.of(folder / "root", "other")
    one_more = gradmm.LabelledTexts.of([*TEXTS, "a great page"], [*records.labels, 1])
    with pytest.raises(BudgetExhausted, match="above the budget of 1"):
        gradmm.target_gradient(language_model, recipe(), one_more, ledger=other)
    assert other.entries() == []


def test_a_release_that_fails_is_charged(
    recipe: Callable[..., gradmm.Recipe],
    language_model: LanguageModel,
    records: gradmm.LabelledTexts,
    ledger: gradmm.Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gradmm.in_memory, "released_target", killed)
    with pytest.raises(KeyboardInterrupt):
        gradmm.target_gradient(language_model, recipe(), records, ledger=ledger)
    assert [entry.sha256 for entry in ledger.entries()] == [None]


def test_nothing_is_charged_while_another_ledger_of_the_root_is_damaged(
    recipe: Callable[..., gradmm.Recipe],
    language_model: LanguageModel,
    records: gradmm.LabelledTexts,
    ledger: gradmm.Ledger,
) -> None:
    """The guarantee states the releases of all ledgers, and could not be stated after the charge."""
    other = ledger.file.with_name("other.jsonl")
    other.parent.mkdir(parents=True)
    other.write_text("{}\n")
    with pytest.raises(gradmm.InputError, match=r"other\.jsonl: line 1 or one before it is damaged"):
        gradmm.target_gradient(language_model, recipe(), records, ledger=ledger)
    assert ledger.entries() == []


def test_a_mechanism_that_fails_its_audit_releases_nothing(
    recipe: Callable[..., gradmm.Recipe],
    language_model: LanguageModel,
    records: gradmm.LabelledTexts,
    ledger: gradmm.Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MechanismAudit, "failed", ["noise is 0"])
    with pytest.raises(RuntimeError, match="the mechanism's audit failed twice: noise is 0"):
        gradmm.target_gradient(language_model, recipe(), records, ledger=ledger)
    assert ledger.all_entries() == []


def test_units_are_given_where_the_recipe_asks_for_them(
    recipe: Callable[..., gradmm.Recipe],
    language_model: LanguageModel,
    records: gradmm.LabelledTexts,
    ledger: gradmm.Ledger,
) -> None:
    by_user = gradmm.LabelledTexts.of(TEXTS, records.labels, units=["ann", "ann", "bob", "eve"] * 2)
    with_units = recipe("privacy.unit_column=user")
    for settings, data in ((recipe(), by_user), (with_units, records)):
        with pytest.raises(gradmm.InputError, match=r"privacy\.unit_column: records with(out)? units of privacy"):
            gradmm.target_gradient(language_model, settings, data, ledger=ledger)
    target = gradmm.target_gradient(language_model, with_units, by_user, ledger=ledger)
    assert target.guarantee.unit == "all records with the same 'user'"
    assert target.released.figures["records"] == {"0": 3, "1": 3}


def test_records_fit_the_classes(
    recipe: Callable[..., gradmm.Recipe], language_model: LanguageModel, records: gradmm.LabelledTexts
) -> None:
    settings = recipe("privacy.epsilon=null")
    with pytest.raises(gradmm.InputError, match="row 1 has a label that belongs to no class"):
        gradmm.target_gradient(language_model, settings, gradmm.LabelledTexts.of(TEXTS[:2], [0, 2]))
    with pytest.raises(gradmm.InputError, match="no row has the label 0"):
        gradmm.target_gradient(language_model, settings, gradmm.LabelledTexts.of(TEXTS[:2], [1, 1]))


def test_rows_without_text_or_unit_are_refused_by_number() -> None:
    with pytest.raises(gradmm.InputError, match="row 1 has no text"):
        gradmm.LabelledTexts.of(["good", " "], [1, 0])
    with pytest.raises(gradmm.InputError, match="row 0 has no text"):
        gradmm.LabelledTexts.of([None, "bad"], [1, 0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(gradmm.InputError, match="row 1 has no unit"):
        gradmm.LabelledTexts.of(["good", "bad"], [1, 0], units=["ann", None])
    with pytest.raises(gradmm.InputError, match="row 0 has no unit"):
        gradmm.LabelledTexts.of(["good", "bad"], [1, 0], units=[" ", "ann"])
    assert gradmm.LabelledTexts.of(["good", "bad"], [1, 0], units=["ann ", "ann"]).units == (0, 0)
    with pytest.raises(TypeError):
        gradmm.LabelledTexts.of(["good"], ["1"])  # pyright: ignore[reportArgumentType]


def test_a_recipe_that_would_release_another_target_is_refused(
    recipe: Callable[..., gradmm.Recipe], language_model: LanguageModel, records: gradmm.LabelledTexts
) -> None:
    target = gradmm.target_gradient(language_model, recipe("privacy.epsilon=null"), records)
    more = gradmm.generate(language_model, target, recipe("privacy.epsilon=null", "generation.per_class=3"))
    assert len(more) == 6
    with pytest.raises(gradmm.InputError, match="with other settings of privacy, target_gradient"):
        gradmm.generate(language_model, target, recipe("target_gradient.subspace_dimensions=2"))


def test_parts_of_the_release_are_tensors(
    recipe: Callable[..., gradmm.Recipe], language_model: LanguageModel, records: gradmm.LabelledTexts
) -> None:
    target = gradmm.target_gradient(language_model, recipe("privacy.epsilon=null"), records)
    moments, tokens = target.moments(language_model), target.token_sums(language_model)
    assert moments is not None
    assert tokens is not None
    assert moments.class_means().counts.tolist() == pytest.approx([4, 4], rel=1e-5)
    assert tokens.class_rates().counts.tolist() == pytest.approx([4, 4], rel=1e-5)
    alone = recipe("privacy.epsilon=null", "target_gradient.probe_covariance=public")
    sums = gradmm.target_gradient(language_model, alone, records).moments(language_model)
    assert sums is not None
    assert sums.second_moment is None
    assert sums.class_means().counts.tolist() == pytest.approx([4, 4], rel=1e-5)
    plain = recipe("privacy.epsilon=null", "target_gradient.probe_share=0", "target_gradient.token_share=0")
    target = gradmm.target_gradient(language_model, plain, records)
    assert target.moments(language_model) is target.token_sums(language_model) is None


def test_a_target_can_be_kept_in_a_file(
    recipe: Callable[..., gradmm.Recipe], language_model: LanguageModel, records: gradmm.LabelledTexts
) -> None:
    target = gradmm.target_gradient(language_model, recipe("privacy.epsilon=null"), records)
    kept = pickle.loads(pickle.dumps(target))
    assert kept.released.rows.equals(target.released.rows)
    texts = gradmm.generate(language_model, target)
    assert gradmm.generate(language_model, kept)["text"].tolist() == texts["text"].tolist()
    # One of a version whose settings had fewer fields.
    for settings in (target.plan.target, target.recipe.target_gradient):
        vars(settings).pop("probe_covariance")
    older = pickle.loads(pickle.dumps(target))
    assert older.plan.target.probe_covariance == "auto"
    assert gradmm.generate(language_model, older)["text"].tolist() == texts["text"].tolist()


def test_labels_are_less_the_mean_of_the_released_scores(
    recipe: Callable[..., gradmm.Recipe],
    language_model: LanguageModel,
    records: gradmm.LabelledTexts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = gradmm.target_gradient(language_model, recipe("privacy.epsilon=null"), records)
    texts = gradmm.generate(language_model, target)
    probabilities = []
    for offset in ([0.0, 0.0], [0.5, -0.5]):

        def mean(
            _: Teacher, __: Readings, written_for: torch.Tensor, offset: list[float] = offset
        ) -> torch.Tensor:
            assert written_for.tolist() == texts["label"].tolist()
            return torch.tensor(offset, dtype=torch.float64)

        monkeypatch.setattr("gradmm.labelling.teacher.mean_released_scores", mean)
        labelled = gradmm.label(language_model, target, texts)
        assert labelled.attrs["classifier_offset"] == dict(zip("01", offset, strict=True))
        probabilities.append(np.stack(labelled["probabilities"].tolist()))
    expected = softmax(np.log(probabilities[0]) - [0.5, -0.5], axis=1)
    np.testing.assert_allclose(probabilities[1], expected, rtol=1e-9)


def test_an_audit_needs_one_schedule_and_a_model_from_files(
    recipe: Callable[..., gradmm.Recipe], language_model: LanguageModel, records: gradmm.LabelledTexts
) -> None:
    target = gradmm.target_gradient(language_model, recipe("privacy.epsilon=null"), records)
    texts = gradmm.label(language_model, target, gradmm.generate(language_model, target))
    with pytest.raises(gradmm.InputError, match="several learning rates or numbers of steps"):
        gradmm.audit(language_model, target, texts, records, records)
    in_memory = LanguageModel(language_model.model, language_model.tokenizer)
    with pytest.raises(gradmm.InputError, match="cannot be fine-tuned anew"):
        gradmm.audit(in_memory, target, texts, records, records, schedule=(1e-4, 2))


def test_a_model_is_named_by_its_folder_by_settings_or_by_reference(
    recipe: Callable[..., gradmm.Recipe], tiny_model: ModelReference
) -> None:
    loaded = gradmm.load_language_model(tiny_model.name)
    assert loaded is gradmm.load_language_model(tiny_model)
    assert loaded is gradmm.load_language_model(recipe().model)
    assert loaded.reference == tiny_model
