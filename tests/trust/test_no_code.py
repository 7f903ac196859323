"""What others wrote is data: no pickle is read, no Python that comes with a model is run, nothing is evaluated."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradmm.config.settings import ModelSettings
from gradmm.errors import InputError
from gradmm.lm.loading import load_language_model
from gradmm.lm.model_reference import ModelReference, resolve_model
from tests.trust.told import told

ROOT = Path(__file__).parents[2]

#: Modules whose file formats can execute code when they are read.
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "torch.load", "np.load", "np.fromfile"),
    *("yaml.unsafe_load", "yaml.full_load", "pd.read_pickle"),
}
#: The last five write tables, whose cells a spreadsheet may execute as formulas.
FORBIDDEN_METHODS = {
    *("read_pickle", "to_pickle", "load_pickle"),
    *("to_csv", "to_excel", "writerow", "writerows", "write_csv"),
}


def calls(folders: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
    for folder in folders:
        for file in (ROOT / folder).rglob("*.py"):
            yield from ((file.name, node) for node in ast.walk(ast.parse(file.read_text())))


def offence(node: ast.AST) -> str | None:
    """What is wrong with a piece of code, if anything."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else {node.module}
        return ", ".join(sorted(FORBIDDEN_MODULES & names)) or None
    if not isinstance(node, ast.Call):
        return None
    called = ast.unparse(node.func)
    if called in FORBIDDEN_CALLS or called.rpartition(".")[2] in FORBIDDEN_METHODS:
        return called
    if called == "yaml.load" and ast.unparse(node) != "yaml.load(text, _UniqueKeyLoader)":
        return called
    values = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    trusts = values.get("trust_remote_code", "settings.trust_remote_code")
    if "allow_pickle" in values or (trusts != "False" and not trusts.endswith(".trust_remote_code")):
        return f"{called}({values})"
    if called == "AutoTokenizer.from_pretrained" and "trust_remote_code" not in values:
        return f"{called} asks in the terminal whether to run a model's code"
    if called.endswith("Model.from_pretrained") or ("AutoModelFor" in called and "from_pretrained" in called):
        return None if values.get("use_safetensors") == "True" else f"{called} without use_safetensors=True"
    if called in ("task", "Task", "flow") and values.get("result_serializer") != "'json'":
        return f"{called} without result_serializer='json'"
    return None


def test_no_code_of_ours_reads_what_could_run_or_writes_for_spreadsheets() -> None:
    """Exports are Parquet, JSON, Markdown, HTML and YAML: a text that begins with = or @ is no formula in any."""
    found = [(file, what) for file, node in calls(("gradmm_core", "tasks", "flows", "deployments"))
             if (what := offence(node))]  # fmt: skip
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        *(
            "import pickle",
            "from joblib import load",
            "torch.load(f)",
            "np.load(f)",
            "eval(text)",
            "frame.to_csv(f)",
            "csv.writer(f).writerow(fields)",
        ),
        *("yaml.load(f, yaml.Loader)", "np.lib.load(f, allow_pickle=True)", "load(name, trust_remote_code=True)"),
        *("AutoModelForCausalLM.from_pretrained(name)", "task(name='a', persist_result=False)"),
    ],
)
def test_the_walk_finds_what_it_looks_for(code: str) -> None:
    assert any(offence(node) for node in ast.walk(ast.parse(code)))


class Executes:
    """Unpickling one leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.file,))


@pytest.fixture
def model_folder(tiny_model: ModelReference, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model.source, folder)
    return folder


def load(folder: Path, trust: bool = False) -> object:
    reference = resolve_model(ModelSettings(name=str(folder), trust_remote_code=trust))
    return told(lambda: load_language_model(reference, "cpu"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickled_weights_are_refused_unread(model_folder: Path, tmp_path: Path, name: str) -> None:
    (model_folder / "model.safetensors").unlink()
    content = pickle.dumps({"weight": Executes(tmp_path / "executed")})
    pickle.loads(content)
    assert (tmp_path / "executed").exists()
    (tmp_path / "executed").unlink()
    (model_folder / name).write_bytes(content)
    assert "model.name: " in str(load(model_folder))
    torch.save({"weight": torch.zeros(2)}, model_folder / name)
    assert "cannot be loaded" in str(load(model_folder))
    assert not (tmp_path / "executed").exists()


def test_python_that_comes_with_a_model_is_run_only_if_that_was_said(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = json.loads((model_folder / "config.json").read_text())
    config |= {"model_type": "stranger", "auto_map": {
        "AutoConfig": "stranger.StrangerConfig", "AutoModelForCausalLM": "stranger.Stranger",
    }}  # fmt: skip
    (model_folder / "config.json").write_text(json.dumps(config))
    executed = tmp_path / "executed"
    (model_folder / "stranger.py").write_text(
        f"import pathlib\npathlib.Path({str(executed)!r}).touch()\nraise ImportError('its work is done')\n"
    )
    said = load(model_folder)
    assert "review its Python code and set model.trust_remote_code" in str(said)
    assert not executed.exists()
    with pytest.raises(InputError):
        load_language_model(resolve_model(ModelSettings(name=str(model_folder), trust_remote_code=True)), "cpu")
    assert executed.exists()
