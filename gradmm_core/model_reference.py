"""Which model, exactly: its name, and the digest or commit of its content. Nothing here loads it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pydantic import BaseModel

from gradmm_core.errors import InputError
from gradmm_core.settings import ModelSettings


class ModelReference(BaseModel, frozen=True):
    """Which weights, exactly: a folder or hub id, and the digest or commit of its content."""

    name: str
    revision: str | None
    digest: str
    dtype: str
    trust_remote_code: bool

    @property
    def source(self) -> str:
        """What transformers loads from: the folder, or the hub id."""
        return self.name if self.revision else os.path.expanduser(self.name)

    @property
    def key(self) -> str:
        """What decides the model's outputs, for cache keys. The folder's place does not."""
        return f"{self.digest}/{self.dtype}"


def resolve_model(settings: ModelSettings) -> ModelReference:
    """Pins a model: the digest of a folder's files, or the commit of a hub revision.

    Raises:
        InputError: if the folder or the hub's model cannot be found.
    """
    folder = Path(os.path.expanduser(settings.name))
    if os.path.isdir(folder):
        revision, digest = None, _folder_digest(folder)
    elif folder.is_absolute() or settings.name.startswith((".", "~")) or settings.name.count("/") > 1:
        raise InputError(f"no folder {settings.name!r}", "model.name", "give a model folder or a hub id")
    else:
        revision = digest = _hub_commit(settings)
    return ModelReference(
        name=settings.name,
        revision=revision,
        digest=digest,
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code,
    )


def unusable_model(name: str, error: Exception) -> InputError:
    """What to raise where transformers cannot load a model."""
    first_line = str(error).strip().partition("\n")[0]
    fix = "give a causal language model with safetensors weights"
    if "trust_remote_code" in str(error):
        fix = "read its Python and set model.trust_remote_code, or give one that needs none"
    return InputError(f"{name!r} cannot be loaded ({first_line or type(error).__name__})", "model.name", fix)


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.is_file()):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _hub_commit(settings: ModelSettings) -> str:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            settings.name, revision=settings.revision or "main", trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise unusable_model(settings.name, error) from error
    return config._commit_hash
