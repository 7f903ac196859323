"""Storage of Prefect's records of finished stages."""

from __future__ import annotations

import hashlib
from pathlib import Path

from prefect.filesystems import RemoteFileSystem
from prefect.results import ResultStorage

from gradmm.storage.artifacts import Root
from gradmm.storage.location import FRESH_LISTINGS


def result_storage(root: Root) -> ResultStorage:
    """Return the root's `results/` as Prefect's result storage.

    For a URL, Prefect needs a block saved on its server. The block holds no credentials. Records are found by
    their keys, so a run with another server finds them too.
    """
    if isinstance(root.results, Path):
        return root.results
    url = str(root.results)
    block = RemoteFileSystem(basepath=url, settings=dict(FRESH_LISTINGS))
    block.save(f"gradmm-{hashlib.sha256(url.encode()).hexdigest()[:12]}", overwrite=True)
    return block
