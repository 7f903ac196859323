"""Numbers as text, with sensible digits, and nested values by dotted names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def percent(value: float, std: float | None = None, digits: int = 1) -> str:
    """0.741, 0.012 -> '74.1 ± 1.2%'."""
    spread = "" if std is None else f" ± {100 * std:.{digits}f}"
    return f"{100 * value:.{digits}f}{spread}%"


def points(value: float, std: float | None = None) -> str:
    """Format a difference of two rates: 0.012, 0.041 -> '+1.2 ± 4.1 points'."""
    spread = "" if std is None else f" ± {100 * std:.1f}"
    return f"{100 * value:+.1f}{spread} points"


def number(value: Any) -> str:
    """Format a float with four significant digits or without decimals, an integer with all its digits."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def duration(seconds: float) -> str:
    """0.32 -> '0.3 s', 200 -> '3 min 20 s', 7500 -> '2 h 05 min'."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield single values by dotted name, entries of a list by their number: the names of settings."""
    if isinstance(values, Mapping) and values:
        items = values.items()
    elif isinstance(values, list) and values:
        items = enumerate(values)
    else:
        yield name, values
        return
    for key, value in items:
        yield from leaves(value, f"{name}.{key}" if name else str(key))
