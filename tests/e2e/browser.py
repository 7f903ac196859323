"""Looking at pages in chromium, without a window."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


def browse(url: str, folder: Path, *options: str) -> str:
    """What chromium prints of a page; it waits for what the page fetches."""
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"),
        *("--virtual-time-budget=20000", "--window-size=1400,2200", *options, url),
    ]
    return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode()


def pixels_of_plots(url: str, folder: Path) -> int:
    """How many there are of the blue of the plots' lines: the UI itself has other blues."""
    picture = folder / "page.png"
    browse(url, folder, f"--screenshot={picture}")
    with Image.open(picture) as image:
        colours = np.asarray(image.convert("RGB")).astype(np.int64)
    return int((np.abs(colours - [0, 0x72, 0xB2]).max(axis=2) <= 6).sum())


def eventually(look: Callable[[], Any]) -> Any:
    """The first answer that is one, within a minute: on a busy machine a page can miss its time."""
    deadline = time.monotonic() + 60
    while not (answer := look()) and time.monotonic() < deadline:
        time.sleep(1)
    return answer
