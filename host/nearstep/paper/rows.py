"""Printed figures of a paper as rows, and what is there beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

Relation = Literal["=", ">", "<"]
Kind = Literal["counted", "modelled", "fitted", "measured", "input"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A printed figure.

    Attributes
    ----------
    unit : `x` of a ratio, `%`, `M` (2 bytes a parameter), `GB/s` and so on.
    relation : `>` and `<` of a bound.
    found : None if it is not measured yet; `note` says how.
    kind : `counted`, `modelled`, `fitted` if a constant is chosen so, `input` if what is printed is
        one, or `measured`.
    speedup : it is a printed speedup, which the mean error is of.
    """

    name: str
    section: str
    unit: str
    paper: float
    found: float | None
    relation: Relation = "="
    kind: Kind = "modelled"
    speedup: bool = False
    note: str = ""

    @property
    def error(self) -> float | None:
        """Of `%` and `M` their difference, of others a fraction; None of bounds."""
        if self.found is None or self.relation != "=":
            return None
        return error(self.unit, self.paper, self.found)

    @property
    def holds(self) -> bool | None:
        """Whether a bound does; None of what is none."""
        if self.found is None or self.relation == "=":
            return None
        return self.found > self.paper if self.relation == ">" else self.found < self.paper


def error(unit: str, paper: float, found: float) -> float:
    """Error of a figure: the difference of `%` and `M`, else a fraction of the printed figure."""
    difference = found - paper
    return difference if unit in ("%", "M") else difference / paper


@dataclass(frozen=True)
class Errors:
    """Of printed speedups.

    Attributes
    ----------
    mean : of their absolute values.
    largest : the row whose error is.
    """

    mean: float
    largest: Row
    count: int


def errors(rows: Iterable[Row]) -> Errors:
    """Of the speedups among some rows, of which there must be one."""
    found = [(abs(row.error), row) for row in rows if row.speedup and row.error is not None]
    largest = max(found, key=lambda each: each[0])[1]
    return Errors(fmean(each for each, _ in found), largest, len(found))


def row(name: str, section: str, unit: str, paper: float, found: float, **others: Any) -> Row:
    """A row; `others` are those of `Row`."""
    return Row(name=name, section=section, unit=unit, paper=paper, found=found, **others)


def spread(
    name: str, section: str, low: float, high: float, found: Sequence[float]
) -> Iterator[Row]:
    """Rows of a printed range: the least and the most of some speedups."""
    yield row(f"{name}, least", section, "x", low, min(found), speedup=True)
    yield row(f"{name}, most", section, "x", high, max(found), speedup=True)
