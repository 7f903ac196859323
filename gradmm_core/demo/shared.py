"""The demo's files for a root. An object store holds them as one archive.

<root>/demo/<digest of the code that builds them>.zip
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from gradmm.demo.material import DemoMaterial, build_demo, generator_digest, is_complete, put_in_place
from gradmm.storage.artifacts import Root
from gradmm.storage.location import create, read_bytes


def demo_of(root: Root) -> DemoMaterial:
    """Build the demo in the root's folder, or fetch a local copy for a root in an object store.

    The weights depend on the machine that trained them. Machines that share a store use the first archive, so that
    they share cached stages.
    """
    if isinstance(root.path, Path):
        return build_demo(root.path / "demo")
    archive = root.path / "demo" / f"{generator_digest()}.zip"
    folder = _cache_folder() / f"demo-{hashlib.sha256(str(archive).encode()).hexdigest()[:12]}"
    if not is_complete(folder):
        try:
            _unpack(read_bytes(archive), folder)
        except FileNotFoundError:
            build_demo(folder)
            try:
                create(archive, _pack(folder))
            except FileExistsError:  # another machine was first
                shutil.rmtree(folder)
                _unpack(read_bytes(archive), folder)
    return build_demo(folder)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gradmm"


def _pack(folder: Path) -> bytes:
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
