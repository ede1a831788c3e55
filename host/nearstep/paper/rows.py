"""Printed figures of a paper as rows, beside nearstep's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from nearstep.errors import ArgumentError

Relation = Literal["=", ">", "<"]
Label = Literal["paper", "fitted", "chosen"]
Kind = Literal["counted", "modelled", "fitted", "chosen", "measured", "input"]


@dataclass(frozen=True, kw_only=True)
class Input:
    """An input of a model.

    Attributes
    ----------
    value : with its unit.
    label : `paper` if the paper prints it; `fitted` if it is solved for rows; `chosen` otherwise.
    source : where the input is printed, how it is fitted, or why it is chosen.
    on : names of the rows that the input is taken from, fitted on, or chosen on.
    """

    name: str
    value: str
    label: Label
    source: str
    on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.label == "fitted" and not self.on:
            raise ArgumentError(f"input {self.name!r} is fitted: `on` must name a row")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A printed figure.

    Attributes
    ----------
    unit : `x` of a ratio, `%`, `+%` of a change in percent, `M` (2 bytes a parameter), `B` of
        billions, `GB/s` and so on.
    relation : `>` and `<` of a bound.
    found : None if not measured yet; `note` names the bench.
    ours : figure with nearstep's algorithm, if `found` is with the paper's; None without a second
        algorithm.
    kind : `counted`, `modelled` or `measured`; or the label of an input that is taken from the
        figure (`input`), fitted on it or chosen on it.
    mean : whether the mean errors count it.
    """

    name: str
    section: str
    unit: str
    paper: float
    found: float | None
    relation: Relation = "="
    ours: float | None = None
    kind: Kind = "modelled"
    mean: bool = False
    note: str = ""

    @property
    def error(self) -> float | None:
        """For `%` and `M` the difference from the printed figure, else `fraction`."""
        if self.found is None or self.relation != "=" or self.unit not in ("%", "M"):
            return self.fraction
        return self.found - self.paper

    @property
    def fraction(self) -> float | None:
        """The difference as a fraction of the printed figure, or, for `+%`, of the printed ratio;
        None for bounds, for 0, and without a figure from here."""
        of = self.paper + (100 if self.unit == "+%" else 0)
        if self.found is None or self.relation != "=" or not of:
            return None
        return (self.found - self.paper) / of

    @property
    def apart(self) -> bool:
        """Whether no input is taken from the figure, fitted on it or chosen on it."""
        return self.kind not in ("input", "fitted", "chosen")

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
        """Kind of the figure from here; without one, the note on how to get it."""
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

    @property
    def beside(self) -> str:
        """The figure with nearstep's algorithm as text."""
        return "" if self.ours is None else self._text(self.ours)

    def _text(self, value: float) -> str:
        sign, unit = ("+", "%") if self.unit == "+%" else ("", self.unit)
        return f"{value:{sign}.{4 if unit == 'M' else 2}f} {unit}".strip()


def labelled(rows: Iterable[Row], inputs: Sequence[Input]) -> Iterator[Row]:
    """Give each row that an input is taken from, fitted on or chosen on that input's label; of
    several, `fitted` before `chosen` before `paper`."""
    ranked = sorted(inputs, key=lambda each: ("paper", "chosen", "fitted").index(each.label))
    kinds = {name: each.label for each in ranked for name in each.on}
    for each in rows:
        label = kinds.get(each.name)
        kind: Kind = each.kind if label is None else "input" if label == "paper" else label
        yield replace(each, kind=kind)


@dataclass(frozen=True)
class Errors:
    """Errors of printed figures, as fractions.

    Attributes
    ----------
    mean : of the absolute values.
    largest : the row with the largest error.
    """

    mean: float
    largest: Row
    count: int


def errors(rows: Iterable[Row], *, apart: bool = False) -> Errors | None:
    """Errors of the rows that the mean counts; None if there are none.

    Parameters
    ----------
    apart : leave out rows that an input is taken from, fitted on or chosen on.
    """
    counted = [each for each in rows if each.mean and (each.apart or not apart)]
    found = [(abs(each.fraction), each) for each in counted if each.fraction is not None]
    if not found:
        return None
    largest = max(found, key=lambda each: each[0])[1]
    return Errors(fmean(each for each, _ in found), largest, len(found))


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Printed speedups under a changed assumption.

    Attributes
    ----------
    gpu : share of its peak, fitted again unless set by the variant.
    mean, largest : errors.
    of : the row with the largest error.
    """

    variant: str
    gpu: float
    mean: float
    largest: float
    of: str


def sensitive(variant: str, gpu: float | None, rows: Iterable[Row]) -> dict[str, Any]:
    """Fields of a `Sensitivity`: errors of some rows under a variant."""
    found = errors(rows)
    if found is None:
        raise ArgumentError("rows must have one that the mean counts")
    largest, of = float(found.largest.fraction or 0.0), found.largest.name
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
    name: str,
    section: str,
    low: float,
    high: float,
    found: Sequence[float],
    unit: str = "x",
    **others: Any,
) -> Iterator[Row]:
    """Make the rows of a range: the least and the most of some figures; the mean counts `x`."""
    others = {"mean": unit == "x", **others}
    for end, paper, pick in (("least", low, min), ("most", high, max)):
        yield row(f"{name}, {end}", section, unit, paper, pick(found), **others)
