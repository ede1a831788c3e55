"""Pictures of a design on its chip: cells in the colours of their blocks, and wires in use."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from nearstep_sim.bitstream.placement import GRIDS, Grid, Placement, groups

__all__ = ["FORMATS", "draw_placed", "draw_routed"]

FORMATS = ("svg", "png")
DOTS_PER_INCH = 110
CELLS = 4  # a tile is drawn as four slices below each other, each two LUTs and two flip-flops
REST = "#9a9a9a"
COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00",
    "#56b4e9", "#7a5195", "#8c6d31", "#b2182b", "#3f7f3f",
)  # fmt: skip
EMPTY, ROOM = "#fbfbfb", "#eef1f4"
MEMORIES, MULTIPLIERS = "#dfe7d8", "#efe3d0"
PATH = "#111111"
WIDE = {"DP16KD": 2}
"""Tiles covered by a cell's drawing; one if not listed."""
BLOCKS = ("DP16KD", "MULT18X18D", "ALU54B", "EHXPLLL", "DCCA", "TRELLIS_IO", "DQSBUFM")
"""Cells drawn as rectangles, in the order of the legend."""


def draw_placed(
    placement: Placement, stem: Path, title: str, path: Sequence[tuple[int, int]] = ()
) -> list[Path]:
    """Draw cells at their places; each of the largest blocks of the design has a colour.

    Parameters
    ----------
    stem : of the files, which have the suffixes of `FORMATS`.
    path : columns and rows of a path drawn above the cells.

    Returns
    -------
    list[Path] : the files.
    """
    grid = GRIDS[placement.chip]
    figure, axes = _chip(grid, title)
    counted = groups(placement.cells)
    colours = dict(zip((each for each in counted if each), COLOURS, strict=False))
    image = _background(grid)
    for cell in placement.cells:
        colour = colours.get(_group(cell.blocks, colours), REST)
        if cell.bel.startswith("SLICE") and (at := _inside(cell.bel)):
            image[cell.row * CELLS + at[0], cell.column * CELLS + at[1]] = to_rgb(colour)
        elif cell.kind in BLOCKS:
            corner = (cell.column - 0.5, cell.row - 0.5)
            width = WIDE.get(cell.kind, 1)
            box = Rectangle(corner, width, 1, facecolor=colour, edgecolor="black", linewidth=0.4)
            axes.add_patch(box)
    _show(axes, image, grid)
    handles: list[Patch | Line2D] = [
        Patch(
            facecolor=colours.get(block, REST),
            label=f"{'.'.join(block) or 'the rest'}: {count:,} cells",
        )
        for block, count in counted.items()
    ]
    handles += [
        Patch(facecolor=ROOM, edgecolor="#cccccc", label="logic"),
        Patch(facecolor=MEMORIES, edgecolor="#cccccc", label="row of block RAM"),
        Patch(facecolor=MULTIPLIERS, edgecolor="#cccccc", label="row of multipliers"),
    ]
    _finish(axes, handles, path)
    return _saved(figure, stem)


def draw_routed(
    placement: Placement, stem: Path, title: str, path: Sequence[tuple[int, int]] = ()
) -> list[Path]:
    """Draw how many wires of each tile are in use. Parameters as of `draw_placed`."""
    grid = GRIDS[placement.chip]
    figure, axes = _chip(grid, title)
    image = np.zeros((grid.rows, grid.columns))
    for (column, row), count in placement.wires.items():
        image[row, column] = count
    shown = axes.imshow(
        np.ma.masked_equal(image, 0),
        cmap="YlOrRd",
        vmin=0,
        extent=(-0.5, grid.columns - 0.5, grid.rows - 0.5, -0.5),
        interpolation="nearest",
    )
    bar = figure.colorbar(shown, ax=axes, fraction=0.03, pad=0.02)
    bar.set_label("wires in use in a tile")
    bar.outline.set_visible(False)
    _finish(axes, [], path)
    return _saved(figure, stem)


def _chip(grid: Grid, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(11.5, 7.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-1, grid.columns)
    axes.set_ylim(grid.rows, -1)
    axes.set_aspect("equal", anchor="NW")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xticks(range(0, grid.columns, 20))
    axes.set_yticks(range(0, grid.rows, 20))
    axes.tick_params(length=0, labelsize=8, colors="#777777")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_facecolor(EMPTY)
    return figure, axes


def _background(grid: Grid) -> "np.ndarray[tuple[int, int, int], np.dtype[np.float64]]":
    image = np.empty((grid.rows * CELLS, grid.columns * CELLS, 3))
    image[:] = to_rgb(ROOM)
    for rows, colour in ((grid.memories, MEMORIES), (grid.multipliers, MULTIPLIERS)):
        for row in rows:
            image[row * CELLS : (row + 1) * CELLS] = to_rgb(colour)
    image[:CELLS] = image[-CELLS:] = to_rgb(EMPTY)
    image[:, :CELLS] = image[:, -CELLS:] = to_rgb(EMPTY)
    return image


def _inside(bel: str) -> tuple[int, int] | None:
    """Row and column in a tile of `SLICEB.K1` or `SLICEB.FF0`; none of the write port of a
    memory."""
    slice_, _, part = bel.partition(".")
    columns = {"K0": 0, "K1": 1, "FF0": 2, "FF1": 3}
    return ("ABCD".index(slice_[-1]), columns[part]) if part in columns else None


def _group(blocks: tuple[str, ...], known: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the innermost known block."""
    for depth in range(len(blocks), 0, -1):
        if blocks[:depth] in known:
            return blocks[:depth]
    return ()


def _show(axes: Axes, image: "np.ndarray", grid: Grid) -> None:  # type: ignore[type-arg]
    axes.imshow(
        image,
        extent=(-0.5, grid.columns - 0.5, grid.rows - 0.5, -0.5),
        interpolation="nearest",
        zorder=0,
    )


def _finish(axes: Axes, handles: list[Patch | Line2D], path: Sequence[tuple[int, int]]) -> None:
    if path:
        columns, rows = zip(*path, strict=True)
        axes.plot(columns, rows, color="white", linewidth=3.2, zorder=5)
        (line,) = axes.plot(
            columns, rows, color=PATH, linewidth=1.3, marker="o", markersize=2.6, zorder=6
        )
        line.set_label("critical path")
        handles = [*handles, line]
    if handles:
        axes.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(1.0 if len(handles) > 1 else 0, 1),
            fontsize=8.5, frameon=len(handles) == 1, handlelength=1.1, handleheight=1.1,
        )  # fmt: skip


def _saved(figure: Figure, stem: Path) -> list[Path]:
    """Write the files, deterministically for a picture."""
    files = [stem.with_suffix(f".{each}") for each in FORMATS]
    with mpl.rc_context({"svg.hashsalt": stem.name}):
        for file in files:
            none = {"Date": None, "Creator": None} if file.suffix == ".svg" else {"Software": None}
            figure.savefig(file, dpi=DOTS_PER_INCH, metadata=none)
    return files
