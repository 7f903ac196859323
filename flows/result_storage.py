"""Where Prefect keeps its records of finished stages."""

from __future__ import annotations

import hashlib
from pathlib import Path

from prefect.filesystems import RemoteFileSystem
from prefect.results import ResultStorage

from gradmm_core.artifacts import Root
from gradmm_core.location import FRESH_LISTINGS


def result_storage(root: Root) -> ResultStorage:
    """The root's `results/`. For a URL that has to be a block that Prefect's server has saved.

    The block holds no credentials. Records are found by their keys: a run with another server finds them too.
    """
    if isinstance(root.results, Path):
        return root.results
    url = str(root.results)
    block = RemoteFileSystem(basepath=url, settings=dict(FRESH_LISTINGS))
    block.save(f"gradmm-{hashlib.sha256(url.encode()).hexdigest()[:12]}", overwrite=True)
    return block
