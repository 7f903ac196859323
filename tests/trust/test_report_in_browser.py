"""A report with scripts as texts, opened in a browser: none is run, with the page's policy and without."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.browser import needs_chromium
from tests.unit.outputs.test_release import SENTIMENT, run_record, texts_of
from tests.unit.outputs.test_report import in_browser, report

pytestmark = [pytest.mark.slow, needs_chromium]

PAYLOADS = [
    "<script>window.executed = 1</script>",
    '<img src="x" onerror="window.executed = 1">',
    "</td></table></pre></style><script>window.executed = 1</script>",
    "<svg onload='window.executed = 1'></svg>",
    '" onmouseover="window.executed = 1" autofocus onfocus="window.executed = 1',
    "<iframe srcdoc='<script>parent.executed = 1</script>'></iframe>",
    "{{ 7 * 7 }} {% raw %} ${7 * 7}",
    '=HYPERLINK("javascript:window.executed=1")',
]

STRANGE = "script, img, iframe, object, embed, form, input, [onload], [onerror], [onmouseover], [onfocus]"


def looked_at(folder: Path, html: str) -> dict[str, object]:
    """Return whether a script ran, the number of elements that could run one, and of payloads that are missing."""
    folder.mkdir()
    text = "page.document.body.innerText"
    found = {
        "executed": "page.executed ?? 0",
        "elements": f"page.document.querySelectorAll({json.dumps(STRANGE)}).length",
        "unreadable": f"{json.dumps(PAYLOADS)}.filter(payload => !{text}.includes(payload)).length",
    }
    script = f"JSON.stringify({{{', '.join(f'{name}: {value}' for name, value in found.items())}}})"
    # "</script>" would end a script element even within a string.
    return json.loads(in_browser(folder, html, 1280, script.replace("</", "<\\/")))


def test_scripts_in_texts_are_read_and_not_run(tmp_path: Path) -> None:
    texts = texts_of(SENTIMENT, PAYLOADS)
    report(tmp_path, run_record(SENTIMENT, rows=len(texts)), texts)
    html = (tmp_path / "report.html").read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', html)
    assert policy
    inert = {"executed": 0, "elements": 0, "unreadable": 0}
    assert looked_at(tmp_path / "with", html) == inert
    assert looked_at(tmp_path / "without", html.replace(policy.group(), "")) == inert
    raw = html.replace(policy.group(), "").replace("<h1", f"{PAYLOADS[0]}<h1", 1)
    assert looked_at(tmp_path / "raw", raw)["executed"] == 1  # the check sees an executed script
    assert looked_at(tmp_path / "policy", html.replace("<h1", f"{PAYLOADS[0]}<h1", 1))["executed"] == 0
