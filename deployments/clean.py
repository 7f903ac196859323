"""`gradmm clean`: removes what no run needs, or says what it would."""

from __future__ import annotations

import time
from pathlib import Path

from gradmm_core.clean import removable, remove
from gradmm_core.errors import InputError
from gradmm_core.location import Location

SECONDS_PER_DAY = 86400


def clean(root: Location, keep_days: float, dry_run: bool) -> None:
    """Prints a line for each file or folder, with its size, and removes it unless told not to.

    Raises:
        InputError: if the root is no local folder, or if what a run or a ledger refers to cannot be read.
    """
    if not keep_days >= 0:  # not a number is none either
        raise InputError(f"{keep_days:g} days have not come yet", "--keep-days", "give 0 or more")
    if not isinstance(root, Path):
        raise InputError("is in an object store, where nothing is removed", str(root), "clean a local root")
    root = root.resolve()
    if not root.is_dir():
        raise InputError("no such folder", str(root), "give the --root that runs were made with")
    found = removable(root, before=time.time() - keep_days * SECONDS_PER_DAY)
    if not dry_run:
        remove(found)
    for each in found:
        print(f"{_in_words(each.size):>10}  {each.path.relative_to(root)}  ({each.reason})")
    total = _in_words(sum(each.size for each in found))
    print(f"{len(found)} to remove, {total}" if dry_run else f"{len(found)} removed, {total}")


def _in_words(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
