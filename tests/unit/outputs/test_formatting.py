"""Numbers as text."""

from __future__ import annotations

from gradmm.outputs.formatting import duration, number, percent, points


def test_numbers_have_sensible_digits() -> None:
    assert percent(0.74123) == "74.1%"
    assert percent(0.74123, 0.0125) == "74.1 ± 1.2%"
    assert percent(1.0, digits=0) == "100%"
    assert points(-0.0123, 0.04) == "-1.2 ± 4.0 points"
    assert [number(v) for v in (None, 12345, 0.0123456, 2541.4, 61234.5, "auto", True)] == [
        "none",
        "12,345",
        "0.01235",
        "2,541",
        "61,234",
        "auto",
        "True",
    ]
    assert [duration(s) for s in (0.04, 9.94, 9.96, 59.7, 200.0, 3599.6, 7500.0)] == [
        "0.0 s",
        "9.9 s",
        "10 s",
        "1 min 00 s",
        "3 min 20 s",
        "1 h 00 min",
        "2 h 05 min",
    ]
