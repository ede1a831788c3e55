"""Bars of printed figures, each beside nearstep's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nearstep.paper.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER, HERE, OURS = "#b0b0b0", "#1f77b4", "#2ca02c"
LOGARITHMIC = 30
"""Ratio of the largest figure to the smallest from which an axis is logarithmic."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw all rows that have a figure, by unit.

    Parameters
    ----------
    path : of any kind that matplotlib writes.
    """
    from matplotlib.figure import Figure  # in the extra `torch`, which the rows do not need

    units: dict[str, list[Row]] = {}
    for each in rows:
        if each.found is not None:
            units.setdefault(each.unit, []).append(each)
    heights = [0.34 * len(each) + 1.2 for each in units.values()] or [1.0]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, group in zip(axes, units.values(), strict=False):
        bars(axis, group)
    figure.savefig(path)


def bars(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw rows of a unit, hatched if an input is taken from, fitted on or chosen on them."""
    series = [("paper", PAPER, [row.paper for row in rows], [row.printed for row in rows])]
    here = [row.found or 0.0 for row in rows]
    series.append(("here", HERE, here, [f"{row.here}, {row.kind}" for row in rows]))
    if any(row.ours is not None for row in rows):
        ours = [row.ours or 0.0 for row in rows]
        series.append(("nearstep's algorithm", OURS, ours, [row.beside for row in rows]))
    width, found = 0.8 / len(series), []
    for number, (label, colour, values, texts) in enumerate(series):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(rows))]
        drawn = axes.barh(places, values, width, color=colour, label=label)
        axes.bar_label(drawn, texts, padding=3, fontsize=6)
        found.append(drawn)
    figures = [value for _, _, values, _ in series[:2] for value in values]
    least, most = min(figures), max(figures)
    if 0 < LOGARITHMIC * least < most:
        axes.set_xscale("log")
        axes.set_xlim(least / 2, 10 * most)
    else:
        axes.margins(x=0.2)
    unit = rows[0].unit
    axes.set_yticks(range(len(rows)), [f"{row.name} ({row.section})" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(
        {"+%": "change, %", "x": "ratio", "B": "billions", "": "number"}.get(unit, unit), fontsize=8
    )
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    for drawn in found[1:]:  # after the legend, which would be hatched as its first bar
        for bar, row in zip(drawn, rows, strict=True):
            bar.set_hatch("" if row.apart else "////")
