"""Printed figures of a paper as rows, beside nearstep's."""

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
    unit : `x` of a ratio, `%`, `M` (2 bytes a parameter), `B` of billions, `GB/s` and so on.
    relation : `>` and `<` of a bound.
    found : None if not measured yet; `note` names the bench.
    kind : `counted`, `modelled`, `fitted` if a constant is fitted to it, `input` if the figure is
        an input, or `measured`.
    speedup : whether the mean error counts it.
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
        """For `%` and `M` the difference from the printed figure, else the difference as a fraction
        of it; None for bounds and without a figure from here."""
        if self.found is None or self.relation != "=":
            return None
        difference = self.found - self.paper
        return difference if self.unit in ("%", "M") else difference / self.paper

    @property
    def holds(self) -> bool | None:
        """Whether a bound holds; None for other figures."""
        if self.found is None or self.relation == "=":
            return None
        return self.found > self.paper if self.relation == ">" else self.found < self.paper

    @property
    def printed(self) -> str:
        """The printed figure as text."""
        return f"{self.relation.strip('=')} {self._text(self.paper)}".strip()

    @property
    def here(self) -> str:
        """The figure from here as text."""
        return "" if self.found is None else self._text(self.found)

    @property
    def how(self) -> str:
        """Where the figure from here is from, or will be."""
        return self.note if self.found is None else self.kind

    @property
    def off(self) -> str:
        """Error as text, or whether a bound holds."""
        if self.holds is not None:
            return "holds" if self.holds else "does not"
        if self.error is None:
            return ""
        if self.unit == "M":
            return f"{self.error:+.4f}"
        return f"{self.error:+.1f} points" if self.unit == "%" else f"{self.error:+.1%}"

    def _text(self, value: float) -> str:
        return f"{value:.{4 if self.unit == 'M' else 2}f} {self.unit}".strip()


@dataclass(frozen=True)
class Errors:
    """Errors of printed speedups.

    Attributes
    ----------
    mean : of the absolute values.
    largest : the row with the largest.
    """

    mean: float
    largest: Row
    count: int


def errors(rows: Iterable[Row]) -> Errors:
    """Errors of the speedups among some rows, at least one."""
    found = [(abs(row.error), row) for row in rows if row.speedup and row.error is not None]
    largest = max(found, key=lambda each: each[0])[1]
    return Errors(fmean(each for each, _ in found), largest, len(found))


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Printed speedups under a changed assumption.

    Attributes
    ----------
    gpu : share of its peak, fitted again unless set by the variant.
    mean, largest : errors.
    of : the row with the largest.
    """

    variant: str
    gpu: float
    mean: float
    largest: float
    of: str


def sensitive(variant: str, gpu: float | None, rows: Iterable[Row]) -> dict[str, Any]:
    """Fields of a `Sensitivity`: errors of some rows under a variant."""
    found = errors(rows)
    largest, of = float(found.largest.error or 0.0), found.largest.name
    return {
        "variant": variant,
        "gpu": float(gpu or 0.0),
        "mean": found.mean,
        "largest": largest,
        "of": of,
    }


def row(
    name: str, section: str, unit: str, paper: float, found: float | None, **others: Any
) -> Row:
    """Make a row; `others` are fields of `Row`."""
    return Row(name=name, section=section, unit=unit, paper=paper, found=found, **others)


def spread(
    name: str, section: str, low: float, high: float, found: Sequence[float], unit: str = "x"
) -> Iterator[Row]:
    """Make the rows of a range: the least and the most of some figures; `x` are speedups."""
    for end, paper, pick in (("least", low, min), ("most", high, max)):
        yield row(f"{name}, {end}", section, unit, paper, pick(found), speedup=unit == "x")
