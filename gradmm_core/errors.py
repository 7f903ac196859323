"""Errors that a user can act on."""


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


class ServerGone(InputError):
    """The server stopped responding; no further reports can be delivered."""


class BudgetExhausted(InputError):
    """A release would exceed the data's privacy budget. Raised before any noise is drawn."""


class RedactedError(Exception):
    """An internal or library error. Its original message is in a file readable only by the root's owner."""
