"""Reference to a model: its name and the digest or commit of its content. Does not load the model."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from pydantic import BaseModel

from gradmm.config.settings import ModelSettings
from gradmm.errors import InputError
from gradmm.storage.hub import hub_or_its_cache


class ModelReference(BaseModel, frozen=True):
    """Exact reference to weights: a folder or hub id, and the digest or commit of its content."""

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
        return f"{self.digest}/{self.dtype}"


def resolve_model(settings: ModelSettings) -> ModelReference:
    """Pin a model by the digest of a folder's files or the commit of a hub revision.

    Raises:
        InputError: if the folder or hub model cannot be found.
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


def _hub_commit(settings: ModelSettings) -> str:
    from transformers import AutoConfig

    try:
        with hub_or_its_cache():
            config = AutoConfig.from_pretrained(
                settings.name, revision=settings.revision or "main", trust_remote_code=settings.trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise unusable_model(settings.name, error) from error
    return config._commit_hash
