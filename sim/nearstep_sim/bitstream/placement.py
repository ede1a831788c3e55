"""Places of cells and wires, from nextpnr's routed netlist."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nearstep_hw.boards.free_rows import MODULE
from nearstep_sim.bitstream.errors import BitstreamError
from nearstep_sim.bitstream.sources import block_of

__all__ = ["GRIDS", "Grid", "Placed", "Placement", "groups", "read_placement"]


@dataclass(frozen=True)
class Grid:
    """Tiles of a chip.

    Attributes
    ----------
    memories, multipliers : rows that have block RAM, and multipliers, in place of logic.
    """

    columns: int
    rows: int
    memories: tuple[int, ...]
    multipliers: tuple[int, ...]


GRIDS: Mapping[str, Grid] = MappingProxyType(
    {
        "lfe5u_25f": Grid(73, 51, memories=(25, 37), multipliers=(13,)),
        "lfe5u_45f": Grid(91, 72, memories=(10, 34, 58), multipliers=(22, 46)),
        "lfe5u_85f": Grid(127, 96, memories=(22, 46, 70, 82), multipliers=(10, 34, 58)),
    }
)
"""Chips that can be drawn, by nextpnr's names (Project Trellis, tilegrid.json)."""

_BEL = re.compile(r"X(\d+)/Y(\d+)/(\S+)")
_WIRE = re.compile(r"X(\d+)/Y(\d+)/")


@dataclass(frozen=True)
class Placed:
    """A cell of a type, in a column and a row of tiles, in a place `bel` there.

    Attributes
    ----------
    blocks : enclosing blocks, from the outermost one.
    """

    kind: str
    blocks: tuple[str, ...]
    column: int
    row: int
    bel: str


@dataclass(frozen=True)
class Placement:
    """A design on its chip.

    Attributes
    ----------
    chip : nextpnr's name.
    cells : all but those of `nearstep_hw.boards.free_rows`.
    wires : in use, by column and row of tiles.
    sources : attributes `src` of cells, by name.
    """

    chip: str
    cells: tuple[Placed, ...]
    wires: Mapping[tuple[int, int], int]
    sources: Mapping[str, str]


def read_placement(path: Path, top: str) -> Placement:
    """Parse nextpnr's output of `--write`.

    Raises
    ------
    BitstreamError : the chip is not known, or no cell is placed.
    """
    module = json.loads(path.read_bytes())["modules"][top]
    chip = module["settings"]["arch.type"]
    if chip not in GRIDS:
        raise BitstreamError(f"the chip must be one of {', '.join(GRIDS)}, not {chip!r}")
    cells = tuple(_placed(module["cells"]))
    if not cells:
        raise BitstreamError(f"{path} has no cell with a place, expected at least one")
    wires: Counter[tuple[int, int]] = Counter()
    for net in module["netnames"].values():
        # wire;pip;strength of each
        for wire in net["attributes"].get("ROUTING", "").split(";")[::3]:
            if match := _WIRE.match(wire):
                wires[int(match[1]), int(match[2])] += 1
    sources = {
        name: cell["attributes"]["src"]
        for name, cell in module["cells"].items()
        if "src" in cell["attributes"]
    }
    return Placement(chip, cells, wires, sources)


def _placed(cells: Mapping[str, Any]) -> Iterable[Placed]:
    for name, cell in cells.items():
        blocks = block_of(name)
        match = _BEL.fullmatch(cell["attributes"].get("NEXTPNR_BEL", ""))
        if match and blocks[:1] != (MODULE,):
            yield Placed(cell["type"], blocks, int(match[1]), int(match[2]), match[3])


def groups(
    cells: Iterable[Placed], *, most: int = 10, least: float = 0.02
) -> dict[tuple[str, ...], int]:
    """Return the blocks to draw, each with its number of cells outside the others; largest first.

    The largest block is repeatedly split into its inner blocks.

    Parameters
    ----------
    most : of groups.
    least : share of all cells that a group has.
    """
    counts = Counter(each.blocks for each in cells)
    whole: Counter[tuple[str, ...]] = Counter()
    for blocks, count in counts.items():
        for depth in range(len(blocks) + 1):
            whole[blocks[:depth]] += count
    floor = least * whole[()]
    own = Counter({(): whole[()]})
    closed: set[tuple[str, ...]] = set()
    while open_ := [each for each, count in own.items() if count and each not in closed]:
        room = most - sum(1 for count in own.values() if count)
        block = max(open_, key=lambda each: (own[each], each))
        inside = sorted(
            (each for each in whole if each and each[:-1] == block and whole[each] >= floor),
            key=lambda each: (-whole[each], each),
        )
        emptied = sum(whole[each] for each in inside) == own[block]
        if len(inside) > room + emptied:
            inside = inside[: max(room, 0)]
        for each in inside:
            own[each] = whole[each]
            own[block] -= whole[each]
        closed.add(block)
    return {block: count for block, count in own.most_common() if count}
