"""Writing a recipe for a user's own data."""

from __future__ import annotations

import json
import os
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
import yaml

from gradmm.config.loading import validate_recipe
from gradmm.data.shape import DataShape, two_digits
from gradmm.errors import InputError
from gradmm.lm.model_reference import unusable_model

TEMPLATE = Path(__file__).parent / "new_recipe.yaml.jinja"

#: Below this number of rows a run is made short: there is less to teach.
FEW_ROWS = 3000

#: Number of tokens to generate per text, keyed by the typical number of words.
TOKENS_OF_WORDS = {8: 16, 16: 25, 32: 50, 64: 100, 128: 128}


def recipe_text(shape: DataShape, model: str, first_token: Callable[[str], int] | None = None) -> str:
    """Write a recipe, with comments on what to edit.

    Args:
        first_token: returns the first token of a word, in which verbalisers have to differ; None if the model's
            tokenizer is not available locally.

    Raises:
        InputError: for too few rows, and for a tokenizer that does not tell the classes apart.
    """
    few = shape.rows < FEW_ROWS
    held_out = max(1, min(1000, shape.rows // 5))
    train_rows = shape.rows - held_out * sum(shape.splits[part] is None for part in ("validation", "test"))
    labels, names = list(shape.class_names), list(shape.class_names.values())
    if train_rows < 2 * len(names):
        problem = f"{shape.rows} rows leave {train_rows} to train on, for {len(names)} classes"
        raise InputError(problem, shape.path, "give more rows")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    environment.filters["yaml"] = _as_yaml
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        shape=shape,
        name=recipe_name(shape.path),
        model=model,
        classes=[*zip(labels, names, verbalisers(names, first_token), strict=True)],
        held_out=held_out,
        train_rows=two_digits(train_rows),
        text_tokens=TOKENS_OF_WORDS[shape.words],
        per_class=max(50, min(1000, train_rows // len(names))) if few else 1000,
        few=few,
    )
    validate_recipe(yaml.safe_load(text), where="the new recipe")
    return text


def _as_yaml(value: object) -> str:
    """Write a value in JSON, which is YAML but for some characters."""
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


#: Control characters, and those that end a line, which stand as escapes in YAML.
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def recipe_name(path: str) -> str:
    """Make a recipe's name from the name of a data file or folder."""
    name = re.sub(r"[^a-z0-9_-]+", "-", Path(path).resolve().stem.lower()).strip("-_")
    return name[:100] or "data"


def verbalisers(names: Sequence[str], first_token: Callable[[str], int] | None) -> list[str]:
    """Choose a word for each class that differs from the others in its first token.

    It is the class's name; or, if the names begin alike, the first words in which they differ; or a letter.

    Raises:
        InputError: if the tokenizer does not tell enough letters apart.
    """
    words = [re.sub(r"[\W_]+", " ", name).strip() for name in names]
    words = [word.lower() if word.isascii() else word for word in words]
    letters = list(string.ascii_letters.swapcase()[: len(names)])
    later_words = zip(*(word.split()[1:] for word in words), strict=False)
    choices = [words, *later_words, letters]
    key = first_token or (lambda word: hash(word.split()[0]))
    for choice in choices:
        if all(choice) and len({key(f" {word}") for word in choice}) == len(choice):
            return [f" {word}" for word in choice]
    problem = f"the model's tokenizer does not tell {len(names)} letters apart, and the classes' names begin alike"
    raise InputError(problem, "model", "use another model, or write the recipe by hand")


def first_token_of(model: str) -> Callable[[str], int] | None:
    """Return the first token of a word in a local model's tokenizer; None for a model on the hub.

    Raises:
        InputError: for a folder without a tokenizer.
    """
    folder = os.path.expanduser(model)
    if not os.path.isdir(folder):
        return None
    from transformers import AutoTokenizer

    try:
        # Or transformers would ask in the terminal whether to run code that lies in the folder.
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception
        raise unusable_model(model, error) from error
    return lambda word: tokenizer(word, add_special_tokens=False)["input_ids"][0]
