"""Rows of an ECP5-85F without logic, whose wires are free for the adjacent rows.

nextpnr places logic as densely as possible in the middle of the chip, where wires run short while
half of the chip is empty; its option for a lower density has no effect on an ECP5. Lookup tables
fixed in all places of every third row, but its ends, keep logic out of these rows.
"""

from collections.abc import Iterator

__all__ = ["FILE", "KEPT", "MODULE", "free_rows"]

MODULE = "free_rows"
FILE = f"{MODULE}.v"

EVERY = 3
COLUMNS, ROWS = range(3, 124), range(2, 94)
"""Columns and rows of tiles with slices, without the outermost columns. No row of multipliers or
block RAM among them is a multiple of `EVERY` (Project Trellis, tilegrid.json of LFE5U-85F)."""
PLACES = tuple(f"SLICE{slice_}.K{half}" for slice_ in "ABCD" for half in "01")


def _bels() -> Iterator[str]:
    for row in ROWS:
        if row % EVERY == 0:
            for column in COLUMNS:
                for place in PLACES:
                    yield f"X{column}/Y{row}/{place}"


KEPT = sum(1 for _ in _bels())
"""Lookup tables not available to logic."""


def free_rows() -> str:
    """Return the Verilog of the module: unused lookup tables."""
    lines = (
        f'(* keep, BEL="{bel}" *) LUT4 #(.INIT(16\'h0)) k{number} '
        "(.A(1'b0), .B(1'b0), .C(1'b0), .D(1'b0));"
        for number, bel in enumerate(_bels())
    )
    return "\n".join((f"module {MODULE};", *lines, "endmodule", ""))
