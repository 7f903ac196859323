"""Reading recipes, overriding settings, and the shipped recipes and presets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gradmm.config.loading import load_recipe, setting_names, validate_recipe
from gradmm.config.recipe import Recipe
from gradmm.config.settings import AdmmSettings, ProjectionSettings, Settings
from gradmm.errors import InputError

MINIMAL = """
name: minimal
data: {hub: someone/something}
model: {name: some/model}
classes:
- {label: 0, name: negative, verbaliser: " bad", instruction: "A bad review:\\n"}
- {label: 1, name: positive, verbaliser: " great", instruction: "A good review:\\n"}
label_filter:
  exemplars:
  - {text: Dull., label: 0}
  - {text: Lovely., label: 1}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path


def refusal(path: Path, *overrides: str, preset: Path | None = None) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(path, overrides, preset)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- Overrides ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("seed=7", 7),
        ("privacy.clipping_norm=0.5", 0.5),
        ("generation.admm.learning_rate=1e-5", 1e-5),
        ("generation.admm.rho=1.", 1.0),
        ("finetune_eval.learning_rates=[1e-5, 3e-4]", (1e-5, 3e-4)),
        ("finetune_eval.steps=300", (300,)),
        ("finetune_eval.steps=[100, 300, 1000]", (100, 300, 1000)),
        ("generation.text_tokens=auto", "auto"),
        ("generation.text_tokens=12", 12),
        ("generation.text_tokens=128", 128),
        ("data.path=/somewhere else", "/somewhere else"),
        ("description=a=b", "a=b"),
        ("model.revision=12e4567", "12e4567"),
        ("model.revision='0123'", "0123"),
        ("classes.1.verbaliser=' good'", " good"),
        ("label_filter.exemplars.0.text=Very dull.", "Very dull."),
        ("finetune_eval.max_validation_rows=null", None),
        ("label_filter.enabled=false", False),
    ],
)
def test_an_override_takes_a_yaml_value(minimal: Path, override: str, value: Any) -> None:
    node: Any = load_recipe(minimal, [override])
    for key in override.partition("=")[0].split("."):
        node = node[int(key)] if key.isdigit() else getattr(node, key)
    assert node == value
    assert type(node) is type(value)


def test_a_block_can_be_overridden_as_a_whole(minimal: Path) -> None:
    recipe = load_recipe(minimal, ["privacy={epsilon: 0.5, delta: 1e-5, declared_records: 500}"])
    assert (recipe.privacy.epsilon, recipe.privacy.delta) == (0.5, 1e-5)


def test_an_entry_of_a_list_can_be_overridden_as_a_whole(minimal: Path) -> None:
    recipe = load_recipe(minimal, ["label_filter.exemplars.1={text: Grand., label: 1}"])
    assert [exemplar.text for exemplar in recipe.label_filter.exemplars] == ["Dull.", "Grand."]


def test_later_overrides_win_and_null_brings_no_privacy_back(minimal: Path) -> None:
    overrides = ["privacy.epsilon=1", "privacy.declared_records=1000"]
    assert load_recipe(minimal, overrides).privacy.epsilon == 1
    assert load_recipe(minimal, [*overrides, "privacy.epsilon=null"]).privacy.epsilon is None


@given(st.floats(1e-300, 1e300))
def test_every_float_survives_an_override(value: float) -> None:
    values = yaml.safe_load(MINIMAL) | {"privacy": {"clipping_norm": repr(value)}}
    assert validate_recipe(values, "here").privacy.clipping_norm == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "set: 'seed' is not of the form a.b=value"),
        ("=1", "set: '=1' is not of the form a.b=value"),
        ("a..b=1", "set: 'a..b=1' is not of the form a.b=value"),
        ("data={hub: [", "set data: '{hub: [' is not a YAML value"),
        ("classes.2.name=x", "set classes.2.name: there is no entry '2' in a list of 2"),
        ("classes.first.name=x", "set classes.first.name: there is no entry 'first' in a list of 2"),
        ("data.hub.x=1", "set data.hub.x: is not a block of settings"),
        ("data.hub.x.y=1", "set data.hub.x.y: is not a block of settings"),
        ("seed=-1", "seed: input should be greater than or equal to 0, not -1"),
        ("seed=1.5", "seed: input should be a valid integer"),
        ("seed=null", "seed: input should be a valid integer, not None"),
        ("privacy.epsilon=0", "privacy.epsilon: input should be greater than 0, not 0"),
        ("privacy.epsilon=.nan", "privacy.epsilon: input should be a finite number, not nan"),
        ("privacy.epsilon=.inf", "privacy.epsilon: input should be a finite number, not inf"),
        ("privacy.delta=1", "privacy.delta: input should be less than 1, not 1"),
        ("generation.text_tokens=many", "generation.text_tokens: input should be a valid integer"),
        (
            "generation.projection.rule=best",
            "generation.projection.rule: input should be 'nearest-of-likely'",
        ),
        ("generation.admm=null", "generation.admm: input should be a valid dictionary"),
        (
            "finetune_eval.learning_rates=[]",
            "finetune_eval.learning_rates: tuple should have at least 1 item",
        ),
        ("finetune_eval.steps=[]", "finetune_eval.steps: tuple should have at least 1 item"),
        ("finetune_eval.steps=0", "finetune_eval.steps.0: input should be greater than or equal to 1, not 0"),
        ("finetune_eval.steps=many", "finetune_eval.steps.0: input should be a valid integer"),
        ("finetune_eval.steps=null", "finetune_eval.steps: input should be a valid tuple, not None"),
        ("finetune_eval.steps=[100, 300, 100]", "finetune_eval.steps: value error, 100 is repeated"),
        ("finetune_eval.seeds=[3, 1, 3]", "finetune_eval.seeds: value error, 3 is repeated"),
        ("finetune_eval.learning_rates=[1e-4, 0.0001]", "0.0001 is repeated"),
        ("name=Not A Name", "name: string should match pattern"),
        ("classes.1.verbaliser=''", "classes.1.verbaliser: string should have at least 1 character, not ''"),
    ],
)
def test_a_bad_override_is_refused_in_one_line(minimal: Path, override: str, message: str) -> None:
    assert message in refusal(minimal, override)


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("generation.admm.rhoo=1", "generation.admm.rho"),
        ("generation.batchsize=1", "generation.batch_size"),
        ("privcy.epsilon=1", "privacy"),
        ("epsilon=1", "privacy.epsilon"),
        ("admm.rho=1", "generation.admm"),
        ("classes.1.verbalizer=x", "classes.1.verbaliser"),
        ("label_filter.exemplars.0.lable=1", "label_filter.exemplars.0.label"),
    ],
)
def test_an_unknown_setting_comes_with_the_nearest_known_one(
    minimal: Path, override: str, suggestion: str
) -> None:
    name = override.partition("=")[0]
    message = refusal(minimal, override)
    assert f"did you mean {suggestion!r}?" in message
    assert f"unknown setting {name!r}" in message or f"unknown setting {name.split('.')[0]!r}" in message


def test_an_unknown_setting_without_a_similar_name_points_to_the_names(minimal: Path) -> None:
    assert "unknown setting 'zzz'; see a recipe for the names" in refusal(minimal, "zzz=1")


def test_every_setting_is_described() -> None:
    blocks = [block for block in Settings.__subclasses__() if block.__module__.startswith("gradmm.config.")]
    undescribed = {
        f"{block.__name__}.{name}"
        for block in blocks
        for name, field in block.model_fields.items()
        if not field.description and "Settings" not in str(field.annotation)
    }
    assert len(blocks) > 20
    assert not undescribed


def test_a_long_value_is_not_repeated_in_full(minimal: Path) -> None:
    assert len(refusal(minimal, "seed=" + "x" * 1000)) < 300


# --- Presets ------------------------------------------------------------------------------------------------


@pytest.fixture
def preset(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "preset.yaml"
        path.write_text(text)
        return path

    return write


def test_a_preset_replaces_the_recipe_and_overrides_replace_the_preset(
    minimal: Path, preset: Callable[[str], Path]
) -> None:
    minimal.write_text(
        MINIMAL + "generation:\n  per_class: 60\n  admm: {rho: 0.5, iterations: 7, inner_steps: 8}\n"
    )
    chosen = preset("generation: {admm: {rho: 0.25, iterations: 9}}\nseed: 3")
    recipe = load_recipe(minimal, ["generation.admm.rho=0.125", "seed=4"], chosen)
    admm = recipe.generation.admm
    assert (admm.rho, admm.iterations, admm.inner_steps) == (0.125, 9, 8)
    assert recipe.seed == 4
    assert recipe.generation.per_class == 60
    assert load_recipe(minimal, [], chosen).generation.admm.rho == 0.25
    assert load_recipe(minimal).generation.admm.rho == 0.5


def test_a_preset_replaces_lists_as_a_whole(minimal: Path, preset: Callable[[str], Path]) -> None:
    chosen = preset("label_filter: {exemplars: [{text: Grand., label: 1}]}\nfinetune_eval: {seeds: [5]}")
    recipe = load_recipe(minimal, ["label_filter.batch_size=3"], chosen)
    assert [exemplar.text for exemplar in recipe.label_filter.exemplars] == ["Grand."]
    assert recipe.finetune_eval.seeds == (5,)
    assert len(recipe.classes) == 2


def test_a_preset_can_complete_a_recipe_and_null_undoes_a_setting(
    minimal: Path, preset: Callable[[str], Path]
) -> None:
    minimal.write_text(
        MINIMAL.replace("data: {hub: someone/something}", "") + "privacy: {epsilon: 1, delta: 1e-5}"
    )
    recipe = load_recipe(minimal, [], preset("data: {path: /there}\nprivacy: {epsilon: null}"))
    assert recipe.data.path == "/there"
    assert recipe.privacy.epsilon is None
    assert recipe.privacy.delta == 1e-5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a mapping of settings"),
        ("a: [", "cannot be read (while parsing"),
        ("seed: 1\nseed: 2", "cannot be read (found the key 'seed' twice"),
        (
            "generation: {admm: {roh: 1}}",
            "unknown setting 'generation.admm.roh'; did you mean 'generation.admm.rho'?",
        ),
        (
            "generation: {method: rerank}",
            "generation.method: input should be 'written', 'search' or 'admm', not 'rerank'",
        ),
        ("generation: {admm: null}", "generation.admm: input should be a valid dictionary"),
        ("generation: 5", "generation: input should be a valid dictionary"),
        ("classes: {0: {name: x}}", "classes: input should be a valid tuple"),
        ("1: 2", "1: keys should be strings, not 1"),
    ],
)
def test_a_bad_preset_is_refused_in_one_line_that_names_its_file(
    minimal: Path, preset: Callable[[str], Path], text: str, message: str
) -> None:
    chosen = preset(text)
    line = refusal(minimal, preset=chosen)
    assert line.startswith(f"{chosen}: ")
    assert message in line


def test_a_missing_setting_is_reported_for_the_recipe(minimal: Path, preset: Callable[[str], Path]) -> None:
    minimal.write_text(MINIMAL.replace("name: minimal", ""))
    line = refusal(minimal, preset=preset("model: {dtype: bfloat16}"))
    assert line.startswith(f"{minimal}: name: field required")


# --- Files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a mapping of settings"),
        ("- 1", "is not a mapping of settings"),
        ("a: [", "cannot be read (while parsing"),
        ("name: x\nname: y", "cannot be read (found the key 'name' twice"),
        ("[name]: x", "cannot be read (found a compound key"),
        ("name: 2001-99-99", "cannot be read (invalid value or nesting too deep: ValueError)"),
        (MINIMAL + "privacy: {epsilon: 1, delta: 1e-5}\nprivacy: {clipping_norm: 2}", "'privacy' twice"),
        (MINIMAL + "privacy:\n  epsilon: 1\n  delta: 1e-5\n  epsilon: null", "'epsilon' twice"),
        (MINIMAL.replace("model:", "modle:"), "unknown setting 'modle'; did you mean 'model'?"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert message in refusal(path)


def test_every_setting_that_is_wrong_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        MINIMAL.replace("label: 0, name", "label: zero, name")
        + "privacy: {epsilon: 0, delta: 2}\ngeneration: {per_clas: 3}"
    )
    with pytest.raises(InputError) as caught:
        load_recipe(path)
    said = [line.removeprefix(f"{path}: ").partition(";")[0] for line in str(caught.value).splitlines()]
    assert said == [
        "unknown setting 'generation.per_clas'",
        "classes.0.label: input should be a valid integer, unable to parse string as an integer, not 'zero'",
        "privacy.epsilon: input should be greater than 0, not 0",
        "privacy.delta: input should be less than 1, not 2",
    ]


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "nowhere.yaml")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(tmp_path / "binary.yaml")


# --- Contradictory settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["classes.1.label=0"], "classes: two classes share a label in [0, 0]"),
        (
            ["data.validation_split=test"],
            "data.validation_split: is also the test split; set null, to hold rows out",
        ),
        (["classes.1.name=negative"], "classes: two classes share a name"),
        (["classes.1.verbaliser=' bad'"], "classes: two classes share a verbaliser"),
        (
            ["data.label_names=[positive, negative]"],
            "classes: the class of label 0 is named 'negative', which is label 1 in data.label_names",
        ),
        (["label_filter.exemplars.0.label=5"], "label_filter.exemplars: no class has the label 5"),
        (
            ["label_filter={enabled: true, exemplars: []}"],
            "label_filter.exemplars: required by label_filter.enabled=true",
        ),
        (["loss_selection.per_class=1001"], "loss_selection.per_class: exceeds generation.per_class"),
        (
            ["template.max_text_tokens=19"],
            "generation.text_tokens: 20 exceeds template.max_text_tokens=19",
        ),
        (["generation.search.draws=1"], "generation.search.draws: the fluency term needs at least 2"),
        (["data.hub=null"], "data: neither data.path nor data.hub is set"),
        (["data.test_split=train"], "data.train_split: is also the validation or test split"),
        (["data.validation_split=train"], "data.train_split: is also the validation or test split"),
        (["privacy.epsilon=1"], "privacy: epsilon requires privacy.delta or privacy.declared_records"),
        (
            ["privacy.unit_column=person"],
            "privacy.unit_column: without privacy.epsilon there is no guarantee per unit",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    minimal: Path, overrides: list[str], message: str
) -> None:
    assert message in refusal(minimal, *overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generation.text_tokens=auto", "generation.text_tokens: 'auto' reads the private texts"),
        ("data.max_per_class=100", "data.max_per_class: adding a record could displace another"),
        (
            "target_gradient={matching: full-gradient, space: full, centred: false, probe_share: 0, "
            "token_share: 0}",
            "target_gradient.matching: the full-gradient ablation is not private",
        ),
        ("target_gradient.batch_size=7", "privacy.declared_records: required by generation.matches=mean"),
        (
            "target_gradient.centred=false",
            "privacy.declared_records: required by target_gradient.probe_dimensions=auto",
        ),
        ("model.dtype=float16", "model.dtype: float16 overflows"),
    ],
)
def test_a_private_run_refuses_what_reads_or_couples_private_records(
    minimal: Path, override: str, message: str
) -> None:
    # The full gradient supports only this method and this loss.
    public = [override, "generation.method=admm", "generation.loss=cosine"]
    load_recipe(minimal, public)
    assert message in refusal(minimal, *public, "privacy.epsilon=1", "privacy.delta=1e-5")


def test_units_need_a_small_target_space(minimal: Path) -> None:
    size = ["privacy.epsilon=1", "privacy.declared_records=1000", "privacy.unit_column=person"]
    assert load_recipe(minimal, size).privacy.rows_per_unit == 10
    message = "privacy.unit_column: needs a small target space; set target_gradient.space"
    assert message in refusal(minimal, *size, "target_gradient.space=full")


@pytest.mark.parametrize(
    ("delta", "records", "message"),
    [
        ("0.01", "100", "privacy.delta: 0.01 is not below 1 / declared_records = 0.01"),
        ("0.0011", "1000", "privacy.delta: 0.0011 is not below 1 / declared_records = 0.001"),
        ("null", "2", "privacy.delta: 0.467 protects too little; set at most 0.01"),
        ("0.011", "null", "privacy.delta: 0.011 protects too little; set at most 0.01"),
    ],
)
def test_a_delta_that_permits_to_publish_a_record_is_refused(
    minimal: Path, delta: str, records: str, message: str
) -> None:
    size = [
        f"privacy.declared_records={records}",
        "target_gradient.probe_share=0",
        "target_gradient.token_share=0",
        "generation.matches=difference",
    ]
    size += ["generation.loss=cosine", "privacy.epsilon=1"]
    assert message in refusal(minimal, *size, f"privacy.delta={delta}")
    load_recipe(minimal, [*size, "privacy.delta=0.0009"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target_gradient.space=full"], "privacy.sampler: 'discrete' needs a small target space"),
        (["privacy.unsafe_noise_seed=1"], "privacy.sampler: 'discrete' does not accept a seed"),
        (["privacy.calibration=paper"], "privacy.sampler: 'discrete' does not support calibration=paper"),
    ],
)
def test_the_discrete_sampler_refuses_unsupported_settings(
    minimal: Path, overrides: list[str], message: str
) -> None:
    discrete = ["privacy={epsilon: 0.5, declared_records: 500, sampler: discrete}"]
    load_recipe(minimal, discrete)
    assert message in refusal(minimal, *discrete, *overrides)


def test_the_ledger_is_named_after_the_source_of_the_data(minimal: Path, tmp_path: Path) -> None:
    hub = ["data={hub: acme/reviews, hub_config: en}"]
    assert load_recipe(minimal, hub).ledger == "acme/reviews/en"
    here = load_recipe(minimal, [f"data={{path: {tmp_path}}}"])
    there = load_recipe(minimal, [f"data={{path: {tmp_path}/../{tmp_path.name}}}"])
    assert here.ledger == there.ledger == str(tmp_path.resolve())
    assert load_recipe(minimal, [*hub, "privacy.ledger=patients"]).ledger == "patients"


def test_a_ledger_is_the_same_from_any_folder(
    minimal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path that leads nowhere from here has a name of its own, not that of other data."""
    names = set()
    (tmp_path / "data").mkdir()
    for folder in (tmp_path, tmp_path / "data"):
        monkeypatch.chdir(folder)
        names.add(load_recipe(minimal, ["data={path: reviews.csv}"]).ledger)
    assert names == {str(tmp_path.resolve() / "reviews.csv"), str(tmp_path.resolve() / "data" / "reviews.csv")}
    assert load_recipe(minimal, ["data={path: 'builtin:demo'}"]).ledger == "builtin:demo"


@pytest.mark.parametrize("override", ["target_gradient.centred=false", "generation.matches=difference"])
def test_the_distance_loss_requires_a_mean_gradient(minimal: Path, override: str) -> None:
    assert load_recipe(minimal).generation.loss == "distance"
    line = refusal(minimal, override)
    assert "generation.loss: distance needs a mean gradient" in line
    assert "set cosine" in line
    load_recipe(minimal, [override, "generation.loss=cosine"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["execution.runner=processes"], "execution.runner: model.device=balanced leaves no GPU to workers"),
        (
            ["generation.compile_layers=true"],
            "generation.compile_layers: needs one device, not model.device=balanced",
        ),
        (
            [
                "target_gradient.matching=full-gradient",
                "target_gradient.space=full",
                "target_gradient.centred=false",
                "target_gradient.probe_share=0",
                "target_gradient.token_share=0",
                "generation.method=admm",
                "generation.loss=cosine",
            ],
            "target_gradient.matching: the full gradient needs one device, not balanced; set head",
        ),
    ],
)
def test_a_model_on_several_devices_leaves_out_what_needs_one(
    minimal: Path, overrides: list[str], message: str
) -> None:
    load_recipe(minimal, ["model.device=balanced"])
    assert message in refusal(minimal, "model.device=balanced", *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "target_gradient.space: the full gradient requires space=full and centred=false"),
        (
            ["target_gradient.space=full"],
            "target_gradient.space: the full gradient requires space=full and centred=false",
        ),
        (
            ["target_gradient.space=full", "target_gradient.centred=false"],
            "target_gradient.probe_share: the full gradient supports no probe; set 0",
        ),
        (
            [
                "target_gradient.space=full",
                "target_gradient.centred=false",
                "target_gradient.probe_share=0",
                "target_gradient.token_share=0",
            ],
            "generation.method: the full gradient is matched by admm only; set admm",
        ),
        (
            [
                "target_gradient.space=full",
                "target_gradient.centred=false",
                "target_gradient.probe_share=0",
                "target_gradient.token_share=0",
                "generation.method=admm",
                "loss_selection.by=set",
            ],
            "loss_selection.by: the full gradient has no closed form for sets; set text",
        ),
    ],
)
def test_the_full_gradient_has_no_closed_forms(minimal: Path, overrides: list[str], message: str) -> None:
    assert message in refusal(minimal, "target_gradient.matching=full-gradient", *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["generation.method=search", "generation.per_class=5001"],
            "loss_selection.by: a set is selected among at most 5000 texts per class, and "
            "generation.per_class=5001; set text",
        ),
        (["generation.method=written"], "loss_selection.by: texts of method=written match no target; set text"),
    ],
)
def test_a_set_is_selected_among_few_texts_that_match_a_target(
    minimal: Path, overrides: list[str], message: str
) -> None:
    load_recipe(minimal, overrides)
    load_recipe(minimal, ["loss_selection.by=set", "generation.method=search", "generation.per_class=5000"])
    assert message in refusal(minimal, "loss_selection.by=set", *overrides)


def test_setting_names_are_valid_in_overrides() -> None:
    names = setting_names()
    assert {"seed", "privacy", "privacy.epsilon", "generation.admm.rho", "classes.N.label"} <= set(names)
    assert len(set(names)) == len(names)


# --- Shipped recipes ----------------------------------------------------------------------------------------

SHIPPED = {
    "sst2": (0, 1),
    "rotten_tomatoes": (0, 1),
    "sentence_polarity": (0, 1),
    "imdb": (0, 1),
    "tweet_emotions": (0, 1),
    "tweet_emotions_six": (0, 1, 2, 3, 4, 5),
}


def shipped(name: str, *overrides: str, preset: Path | None = None) -> Recipe:
    return load_recipe(Path(str(files("gradmm.deployments") / "recipes" / f"{name}.yaml")), overrides, preset)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_is_valid_and_named_after_its_file(name: str) -> None:
    recipe = shipped(name)
    assert recipe.name == name
    assert recipe.description
    assert tuple(sorted(c.label for c in recipe.classes)) == SHIPPED[name]
    assert recipe.privacy.epsilon is None


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_needs_only_epsilon_to_be_private(name: str) -> None:
    recipe = shipped(name, "privacy.epsilon=0.05")
    assert recipe.privacy.epsilon == 0.05
    assert recipe.privacy.declared_records is not None


PRESETS = sorted(file.stem for file in (Path(str(files("gradmm.deployments"))) / "presets").glob("*.yaml"))


def shipped_preset(name: str) -> Path:
    return Path(str(files("gradmm.deployments") / "presets" / f"{name}.yaml"))


def test_shipped_presets_are_the_paper_the_baselines_and_the_search() -> None:
    assert PRESETS == ["paper", "rerank", "search", "zero-shot"]
    paper, rerank, search, zero_shot = (shipped("demo", preset=shipped_preset(name)) for name in PRESETS)
    assert (search.generation.method, search.generation.per_class) == ("search", 50)
    assert search.target_gradient.token_share == 0
    assert paper.target_gradient.token_share == 0
    assert paper.generation.method == "admm"
    assert paper.generation.admm == AdmmSettings(
        rho=0.1,
        iterations=30,
        inner_steps=50,
        learning_rate=0.008,
        gradient_clip=1.0,
        initial_draws=5,
        initial_steps=0,
        patience=None,
        keep="last",
    )
    assert paper.generation.loss == "cosine"
    assert paper.generation.projection == ProjectionSettings(rule="nearest-of-likely", candidates=200)
    assert not paper.target_gradient.uses_public_text
    assert paper.privacy.calibration == "paper"
    assert (paper.loss_selection.by, paper.loss_selection.near_duplicate) == ("text", 1.0)
    for recipe, draws in ((rerank, 150), (zero_shot, 1)):
        search = recipe.generation.search
        assert recipe.generation.method == "search"
        assert (search.draws, search.rounds, search.fluency) == (draws, 0, 0.0)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", SHIPPED)
def test_every_preset_combines_with_every_recipe_in_a_private_run(name: str, preset: str) -> None:
    chosen = shipped(name, "privacy.epsilon=0.5", preset=shipped_preset(preset))
    assert chosen.name == name
    assert chosen.classes == shipped(name).classes


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_exemplars_are_few_different_and_balanced(name: str) -> None:
    exemplars = shipped(name).label_filter.exemplars
    assert len({exemplar.text for exemplar in exemplars}) == len(exemplars)
    counts = Counter(exemplar.label for exemplar in exemplars)
    assert set(counts) == set(SHIPPED[name])
    assert len(set(counts.values())) == 1
    assert all(exemplar.text == exemplar.text.strip() for exemplar in exemplars)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_verbalisers_and_suffixes_begin_with_a_space(name: str) -> None:
    recipe = shipped(name)
    assert recipe.template.suffix.startswith(" ")
    assert not recipe.template.suffix.endswith(" ")
    for c in recipe.classes:
        assert c.verbaliser[0] == " " != c.verbaliser[1]


@pytest.mark.material
@pytest.mark.parametrize("name", SHIPPED)
def test_no_shipped_sentence_is_from_the_data(material: Path, name: str) -> None:
    """Exemplars and instructions must be public, so none of their lines may be a record."""
    import pyarrow.parquet as pq

    records = {
        text.strip().lower()
        for file in sorted((material / "data").glob("*/*.parquet"))
        for text in pq.read_table(file)["text"].to_pylist()
    }
    recipe = shipped(name)
    lines = [exemplar.text for exemplar in recipe.label_filter.exemplars]
    lines += [line.strip(' "') for c in recipe.classes for line in c.instruction.splitlines()]
    assert not [line for line in lines if line and line.lower() in records]


@pytest.mark.material
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_verbalisers_differ_in_their_first_tokens(material: Path, name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(material / "models" / "reviews-phi-9m")
    tokens = [tokenizer(c.verbaliser, add_special_tokens=False)["input_ids"] for c in shipped(name).classes]
    assert len({ids[0] for ids in tokens}) == len(tokens)
    assert all(len(ids) == 1 for ids in tokens)


@pytest.mark.parametrize("given", ["privacy.epsilon=true", "seed=yes", "generation.per_class=on"])
def test_true_is_no_number(given: str) -> None:
    with pytest.raises(InputError, match="expected a number, not true or false"):
        shipped("sst2", given)


@pytest.mark.parametrize("given", ["privacy.epsilon=", "privacy.unit_column=  "])
def test_an_override_without_a_value_is_refused(given: str) -> None:
    """As of a shell's variable that is not set: it would take the guarantee away."""
    with pytest.raises(InputError, match="has no value; write null to unset a setting"):
        shipped("sst2", "privacy.epsilon=1", given)
    assert shipped("sst2", "privacy.epsilon=1", "privacy.epsilon=null").privacy.epsilon is None
