"""Sources and blocks of the cells of a flat netlist."""

import re
from collections.abc import Iterable
from itertools import takewhile

__all__ = ["block_of", "source_of"]

_FOREIGN = ("/share/", "amaranth/")
"""Files of Yosys's cells, and of the library that makes signals of interfaces: not sources of a
design.
"""


def source_of(sources: Iterable[str]) -> str:
    """File and line of the first of these that is a source of the design; empty if none is."""
    for each in sources:
        for one in each.split("|"):
            if one and not one.startswith(_FOREIGN):
                return one
    return ""


def block_of(name: str) -> tuple[str, ...]:
    """Return the blocks around a cell or net of a flat netlist, from the outermost one.

    Cells that tools added for the whole chip, such as clock buffers, have none.
    """
    flat = re.sub(r"^(\$flatten)?\\|(?<=\.)\\", "", name)
    flat = re.sub(r"^\$(glbnet|gbuf)\$", "", flat)
    *parts, _ = flat.split(".")
    blocks = tuple(takewhile(lambda part: not part.startswith("$"), parts))
    # names made by tools contain points
    return blocks
