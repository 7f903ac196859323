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

Every setting of a recipe, from `gradmm_core/config/settings.py`: `scripts/settings_page.py` writes this page,
and a test holds it to the code. [recipes.md](recipes.md) explains how they are used, and
`gradmm recipes --show RECIPE` prints those of a recipe. A block is a key of the recipe, and with `--set` a
setting has its full name, as in `--set generation.admm.rho=0.1`. What a recipe leaves out has its default. Names
with [] are of every entry of a list.
"""

#: What pydantic's JSON schema calls a type.
TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "`true`, `false`",
    "null": "`null`",
}


def blocks(block: type[Settings], name: str = "") -> Iterator[tuple[str, type[Settings]]]:
    """List a block and those within it, in the order of the fields."""
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
    """Write a heading, what the block is for, and the table of its own settings."""
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
            yield f" {sign} {schema[key]:g}" if abs(schema[key]) < 1e6 else f" {sign} {schema[key]}"


def default(field: FieldInfo) -> str:
    """Write a default as it stands in YAML; nothing where there is none."""
    if field.is_required():
        return "required"
    return f"`{json.dumps(field.default)}`"


def plain(text: str) -> str:
    """Escape what Markdown would take for markup."""
    return re.sub(r"[<|*]", lambda match: f"\\{match[0]}", text)


def page() -> str:
    """Write the page."""
    return "\n".join([HEAD, *(section(*each) for each in blocks(Recipe))])


if __name__ == "__main__":
    print(page(), end="")
