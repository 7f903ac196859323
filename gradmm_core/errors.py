"""Errors that a user can act on."""


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
        return f"{self.where}: {self.what}; {self.fix}"


class BudgetExhausted(InputError):
    """One more release would pass the data's privacy budget: refused, with nothing drawn."""
