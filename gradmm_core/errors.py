"""Errors that a user can act on."""


def printable(text: str) -> str:
    """A text as one line for a terminal: what would control it, or is not to be seen, is spelt out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _short(text: str, longest: int = 300) -> str:
    """Its beginning and its end, if it is longer."""
    return text if len(text) <= longest else f"{text[: longest - 100]} … {text[-97:]}"


class InputError(Exception):
    """Something the user gave cannot be used. Printed as one line; the process ends with status 2.

    Args:
        what: what is wrong, with the offending value.
        where: the setting, file or column it was found in.
        fix: what to do about it.
    """

    def __init__(self, what: str, where: str, fix: str) -> None:
        super().__init__(what, where, fix)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        return printable(f"{_short(self.where)}: {_short(self.what)}; {_short(self.fix)}")


class ServerGone(InputError):
    """What a run reports to does not answer any more: nothing that is left to send will arrive."""


class BudgetExhausted(InputError):
    """One more release would pass the data's privacy budget: refused, with nothing drawn."""


class WithheldError(Exception):
    """A fault of ours, or of a library, whose own message is in a file for the root's owner only."""
