"""The lists that `scripts/supply` makes are of what `constraints.txt` pins."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pins(text: str) -> dict[str, str]:
    """Versions by normalised names."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", text, re.MULTILINE)
    return {re.sub("[._-]+", "-", name).lower(): version for name, version in found}


PINS = pins((ROOT / "constraints.txt").read_text())


def test_every_pin_has_its_hashes() -> None:
    text = (ROOT / "constraints-hashes.txt").read_text()
    assert pins(text) == PINS
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(PINS)
    for block in blocks:
        first, *hashes = block.replace("\\\n", "").split()
        assert hashes, first
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in hashes), first


def test_every_pin_has_its_licence() -> None:
    rows = re.findall(
        r"^\| (\S+) +\| (\S+) +\| (.+?) +\|$", (ROOT / "docs" / "licences.md").read_text(), re.MULTILINE
    )
    names = "".join(f"{name}=={version.partition('+')[0]}\n" for name, version, _ in rows[1:])
    assert pins(names) == PINS
    assert not [name for name, _, licence in rows if licence in ("UNKNOWN", "")]
