"""The demo's files for a root, which may be in an object store: there they are one archive.

<root>/demo/<digest of the code that makes them>.zip
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from gradmm_core.artifacts import Root
from gradmm_core.demo.material import DemoMaterial, build_demo, generator_digest, is_complete, put_in_place
from gradmm_core.location import create, read_bytes


def demo_of(root: Root) -> DemoMaterial:
    """The demo's files in the root's folder; of a root in an object store, a copy on this machine.

    The weights depend on the machine that trained them. All that share a store take those that were there first,
    or else none would find another's stages cached.
    """
    if isinstance(root.path, Path):
        return build_demo(root.path / "demo")
    archive = root.path / "demo" / f"{generator_digest()}.zip"
    folder = _cache() / f"demo-{hashlib.sha256(str(archive).encode()).hexdigest()[:12]}"
    if not is_complete(folder):
        try:
            _unpack(read_bytes(archive), folder)
        except FileNotFoundError:
            build_demo(folder)
            try:
                create(archive, _packed(folder))
            except FileExistsError:  # another machine was faster
                shutil.rmtree(folder)
                _unpack(read_bytes(archive), folder)
    return build_demo(folder)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gradmm"


def _packed(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            archive.write(file, file.relative_to(folder))
    return buffer.getvalue()


def _unpack(content: bytes, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            archive.extractall(staging)
        put_in_place(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
