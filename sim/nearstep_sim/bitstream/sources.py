"""Names of the sources, and of the blocks, that a flat netlist was made of."""

import re
from collections.abc import Iterable
from itertools import takewhile

__all__ = ["block_of", "source_of"]

_FOREIGN = ("/share/", "amaranth/")
"""Of the cells of Yosys, and of the library in which signals of interfaces are made: no source of
what a design does."""


def source_of(sources: Iterable[str]) -> str:
    """File and line of the first of these that is a source of the design; empty if none is."""
    for each in sources:
        for one in each.split("|"):
            if one and not one.startswith(_FOREIGN):
                return one
    return ""


def block_of(name: str) -> tuple[str, ...]:
    """The blocks that a cell or net of a flat netlist lies in, from the outermost one.

    Of what tools have added for the whole chip, as clock buffers, there are none.
    """
    flat = re.sub(r"^(\$flatten)?\\|(?<=\.)\\", "", name)
    flat = re.sub(r"^\$(glbnet|gbuf)\$", "", flat)
    *parts, _ = flat.split(".")
    blocks = tuple(takewhile(lambda part: not part.startswith("$"), parts))
    # names of tools have points of their own
    return blocks
