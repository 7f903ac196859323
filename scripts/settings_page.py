"""Print docs/guide/settings.md: every setting of a recipe, its values, default and meaning.

.venv/bin/python scripts/settings_page.py >docs/guide/settings.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from gradmm.config.recipe import Recipe
from gradmm.config.settings import Settings

HEAD = """# Settings

All settings of a recipe. `scripts/settings_page.py` generates this page from `gradmm_core/config/settings.py`,
and a test checks that it is up to date. [recipes.md](recipes.md) explains how to use them, and
`gradmm recipes --show RECIPE` prints the values in a recipe. Each section below is a block of the recipe; `--set`
takes the full name of a setting, as in `--set generation.admm.rho=0.1`. A setting that a recipe omits keeps its
default. `[]` marks a list, whose entries each have the settings shown.
"""

#: Types in a JSON schema, and how the page names them.
TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "`true`, `false`",
    "null": "`null`",
}


def blocks(block: type[Settings], name: str = "") -> Iterator[tuple[str, type[Settings]]]:
    """Yield the names and classes of a block and of those nested in it, in the order of their fields."""
    yield name, block
    for key, field in block.model_fields.items():
        for within in _settings_in(field.annotation):
            list_of = "[]" if get_origin(field.annotation) is tuple else ""
            yield from blocks(within, f"{name}.{key}{list_of}".removeprefix("."))


def _settings_in(annotation: Any) -> list[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for part in get_args(annotation) for found in _settings_in(part)]


def section(name: str, block: type[Settings]) -> str:
    """Write a block's heading, its description and a table of its own settings, without nested blocks."""
    properties = block.model_json_schema()["properties"]
    own = {key: field for key, field in block.model_fields.items() if not _settings_in(field.annotation)}
    lines = [f"## {name or 'The recipe'}", "", " ".join((block.__doc__ or "").split()), ""]
    lines += ["| setting | values | default | meaning |", "|---|---|---|---|"]
    for key, field in own.items():
        full = f"{name}.{key}".removeprefix(".")
        cells = [f"`{full}`", values(properties[key]), default(field), plain(field.description or "")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def values(schema: dict[str, Any]) -> str:
    """Describe the values that a schema allows."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(values(part) for part in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "array":
        return f"list ({values(schema['items'])})"
    return TYPES[schema["type"]] + ",".join(_bounds(schema))


def _bounds(schema: dict[str, Any]) -> Iterator[str]:
    for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")):
        if key in schema:
            yield f" {sign} {schema[key]}"


def default(field: FieldInfo) -> str:
    """Write a field's default as in YAML, or that the field is required."""
    return "required" if field.is_required() else f"`{json.dumps(field.default)}`"


def plain(text: str) -> str:
    """Escape characters that have a meaning in a Markdown table."""
    return re.sub(r"[<|*]", lambda match: f"\\{match[0]}", text)


def page() -> str:
    """Write the whole page."""
    return "\n".join([HEAD, *(section(*each) for each in blocks(Recipe))])


if __name__ == "__main__":
    print(page(), end="")
