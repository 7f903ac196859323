"""`gradmm clean`: remove unused files, or list them."""

from __future__ import annotations

import time
from pathlib import Path

from rich.filesize import decimal

from gradmm.errors import InputError
from gradmm.outputs.housekeeping import check_root, removable, remove
from gradmm.storage.location import Location

SECONDS_PER_DAY = 86400


def clean(root: Location, keep_days: float, dry_run: bool) -> None:
    """Print each unused file or folder with its size, and remove it unless `dry_run`.

    Raises:
        InputError: if the root is not a local folder that runs have written to, or if a run or a ledger in it
            cannot be read.
    """
    if not keep_days >= 0:  # NaN too
        raise InputError(f"{keep_days:g} is not a number of days", "keep_days", "give 0 or more")
    if not isinstance(root, Path):
        raise InputError("is in an object store, where nothing is removed", str(root), "clean a local root")
    root = root.resolve()
    if not root.is_dir():
        raise InputError("no such folder", str(root), "give the --root of your runs")
    check_root(root)
    found = removable(root, before=time.time() - keep_days * SECONDS_PER_DAY)
    if not dry_run:
        remove(found)
    for each in found:
        print(f"{decimal(each.size):>12}  {each.path.relative_to(root)}  ({each.reason})")
    total = decimal(sum(each.size for each in found))
    print(f"{len(found)} to remove, {total}" if dry_run else f"{len(found)} removed, {total}")
