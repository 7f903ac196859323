"""Errors that a user can act on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def printable(text: str) -> str:
    """Return `text` on one line for a terminal, with control and invisible characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _shorten(text: str, max_length: int = 300) -> str:
    """Cut the middle out of a text longer than `max_length`."""
    return text if len(text) <= max_length else f"{text[: max_length - 100]} … {text[-97:]}"


class InputError(Exception):
    """Input from the user is invalid. Printed on one line; the process exits with status 2.

    Args:
        what: the problem, with the offending value.
        where: the setting, file or column that contains it.
        fix: how to resolve it.
    """

    def __init__(self, what: str, where: str, fix: str) -> None:
        super().__init__(what, where, fix)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        return printable(f"{_shorten(self.where)}: {_shorten(self.what)}; {_shorten(self.fix)}")


class InputErrors(InputError):
    """Several problems of the input, found together. Printed on one line each."""

    def __init__(self, problems: Sequence[InputError]) -> None:
        super().__init__(problems[0].what, problems[0].where, problems[0].fix)
        self.args = (problems,)  # what `pickle` calls the class with
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Call all; return their results.

    Raises:
        InputError: with the problems of all calls that raised one.
    """
    results, problems = [], []
    for call in calls:
        try:
            results.append(call())
        except InputError as error:
            found = error.problems if isinstance(error, InputErrors) else [error]
            # One cause, such as a missing folder, may stop several calls.
            problems += [problem for problem in found if str(problem) not in map(str, problems)]
    if len(problems) > 1:
        raise InputErrors(problems)
    if problems:
        raise problems[0]
    return results


class ServerGone(InputError):
    """The server stopped responding; no further reports can be delivered."""


class BudgetExhausted(InputError):
    """A release would exceed the data's privacy budget. Raised before any noise is drawn."""


class RedactedError(Exception):
    """An internal or library error. Its original message is in a file readable only by the root's owner."""
