"""The blocks of a recipe as parameters of a flow, listed only in `Recipe`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gradmm.config.recipe import Recipe

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_recipe(function: Function) -> Function:
    """Replace a function's `**blocks` by one keyword parameter for each field of `Recipe`.

    Prefect's UI and its validation use the names, types and defaults in the signature, and the descriptions in the
    docstring. The function's own docstring must end with its `Args`, because the blocks are appended there.
    """
    own = inspect.signature(function, eval_str=True).parameters.values()
    blocks = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=field.annotation,
            default=inspect.Parameter.empty if field.is_required() else field.default,
        )
        for name, field in Recipe.model_fields.items()
    ]
    named = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    signature = inspect.Signature([*named, *blocks])
    setattr(function, "__signature__", signature)  # noqa: B010  (the type checker knows no such attribute)
    descriptions = [f"    {name}: {_description(field)}" for name, field in Recipe.model_fields.items()]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), *descriptions])
    return function


def _description(field: FieldInfo) -> str:
    """Return the field's description, or the first line of its block's docstring."""
    if field.description:
        return field.description
    block = field.annotation
    docstring = block.__doc__ if isinstance(block, type) and issubclass(block, BaseModel) else ""
    return (docstring or "").partition("\n")[0]
