"""Budgets: a number of bytes, or a share of the parameters'."""

from __future__ import annotations

import re
from fractions import Fraction

from nearstep.torch.errors import BudgetFormatError

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

_TEXT = re.compile(r"(\d+(?:\.\d+)?) ?(%|[KMGT]iB|B|)", re.ASCII)

EXPECTED = "bytes of at least 1, as in '2GiB' or 2147483648, or a share, as in '25%'"


def share_of(nbytes: int, total: int) -> str:
    """The least share of `total` bytes that is a budget of `nbytes`, to hundredths of a percent."""
    return f"{-(-nbytes * 10000 // total) / 100:g}%"


def budget_bytes(budget: int | str, total: int, name: str = "budget") -> int:
    """A budget in bytes, rounded down.

    Parameters
    ----------
    budget : bytes; or text, with a unit out of `UNITS` or `%`.
    total : bytes of which a share is one, such as of all parameters.
    name : of the argument, for the error.

    Raises
    ------
    BudgetFormatError
    """
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise BudgetFormatError(name, EXPECTED, budget)
    if isinstance(budget, int):
        found = budget
    else:
        match = _TEXT.fullmatch(budget.strip())
        if match is None:
            raise BudgetFormatError(name, EXPECTED, budget)
        number, unit = Fraction(match[1]), match[2]
        found = int(number * total / 100 if unit == "%" else number * UNITS[unit])
    if found < 1:
        raise BudgetFormatError(name, EXPECTED, budget)
    return found
