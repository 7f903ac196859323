"""Reference to a model: its name and the digest or commit of its content. Does not load the model."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gradmm.config.settings import ModelSettings
from gradmm.errors import InputError
from gradmm.storage.hub import hub_or_its_cache


class ModelReference(BaseModel, frozen=True):
    """Exact reference to weights: a folder or hub id, and the digest or commit of its content.

    `dtype` is what the weights are loaded in, never "auto".
    """

    name: str
    revision: str | None
    digest: str
    dtype: str
    trust_remote_code: bool

    @property
    def source(self) -> str:
        """Folder or hub id for transformers."""
        return self.name if self.revision else os.path.expanduser(self.name)

    @property
    def key(self) -> str:
        """Identity of the model's outputs for cache keys; independent of the folder's path."""
        # Its own code may compute something else than transformers' for the same weights.
        return f"{self.digest}/{self.dtype}{'/own code' if self.trust_remote_code else ''}"


def resolve_model(settings: ModelSettings) -> ModelReference:
    """Pin a model by the digest of a folder's files or the commit of a hub revision, and its dtype.

    Raises:
        InputError: if the folder or hub model cannot be found.
    """
    folder = Path(os.path.expanduser(settings.name))
    if os.path.isdir(folder):
        revision, digest, config = None, _folder_digest(folder), _folder_config(folder)
    elif folder.is_absolute() or settings.name.startswith((".", "~")) or settings.name.count("/") > 1:
        raise InputError(f"no folder {settings.name!r}", "model.name", "give a model folder or a hub id")
    else:
        revision, config = _hub_config(settings)
        digest = revision
    return ModelReference(
        name=settings.name,
        revision=revision,
        digest=digest,
        dtype=_stored_dtype(config) if settings.dtype == "auto" else settings.dtype,
        trust_remote_code=settings.trust_remote_code,
    )


def unusable_model(name: str, error: Exception) -> InputError:
    """Build the error for a model that transformers cannot load."""
    first_line = str(error).strip().partition("\n")[0]
    fix = "give a causal language model with safetensors weights"
    if "couldn't connect" in first_line:
        fix = "check the network, or give a model folder"
    if "trust_remote_code" in str(error):
        fix = "review its Python code and set model.trust_remote_code, or use another model"
    return InputError(f"{name!r} cannot be loaded ({first_line or type(error).__name__})", "model.name", fix)


#: Files of a model folder that no code reads: model cards, licences, pictures and Git's files.
_DOCUMENTATION = re.compile(
    r"(README|LICEN[CS]E|NOTICE|USE_POLICY|\.git).*|.*\.(md|rst|png|jpe?g|gif|svg|pdf)", re.IGNORECASE
)


def _folder_digest(folder: Path) -> str:
    """Digest all files except documentation, which does not affect the model's outputs."""
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.is_file() and not _DOCUMENTATION.fullmatch(p.name)):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _folder_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Loading the model reports any error in it."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _stored_dtype(config: dict[str, Any]) -> str:
    """Return the dtype in which to load the weights of a model: that of the text part, where it has several."""
    part = config.get("text_config")
    config = config | (part if isinstance(part, dict) else {})
    stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return "bfloat16" if stored in ("bfloat16", "float16") else "float32"


def _hub_config(settings: ModelSettings) -> tuple[str, dict[str, Any]]:
    """Return the commit of a revision, and its configuration."""
    from transformers import AutoConfig

    try:
        with hub_or_its_cache():
            config = AutoConfig.from_pretrained(
                settings.name, revision=settings.revision or "main", trust_remote_code=settings.trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise unusable_model(settings.name, error) from error
    return config._commit_hash, config.to_dict()
