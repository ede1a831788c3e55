# amaranth: UnusedElaboratable=no
"""Every top that ships has its row, and what the row names is there."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from . import page, rows
from .page import text
from .rows import CELLS, ROOT, Block, Top, cells_checked, problems, problems_of, read

PAGE = ROOT / "docs" / "verification.md"

PENDING: set[tuple[str, str]] = set()
"""Cells whose evidence is not there yet. A cell leaves the list when it leaves `pending`."""


def test_every_top_that_ships_has_a_row_without_an_empty_cell() -> None:
    tops, blocks = read()
    assert problems(tops, blocks, PENDING) == []
    checked = cells_checked(tops)
    print(f"{len(tops)} tops, {len(blocks)} rows of blocks, {checked} entries")
    assert len(tops) >= 12
    assert checked > len(CELLS) * len(tops)


def test_the_page_is_that_of_the_file() -> None:
    assert text(*read()) == PAGE.read_text(encoding="utf-8"), "`make docs` writes it again"


def test_a_number_that_is_not_that_of_its_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tops, blocks = read()
    known, shares = rows.mutants(), rows.covered()
    for name, row in known.items():
        changed = {**row, "killed": row["killed"] - 1, "survived": row["survived"] + 1}
        monkeypatch.setattr(page, "mutants", lambda new=known | {name: changed}: new)
        assert text(tops, blocks) != PAGE.read_text(encoding="utf-8"), name
        monkeypatch.setattr(rows, "mutants", page.mutants)
        assert any("are listed" in each for each in problems(tops, blocks, PENDING)), name
    monkeypatch.setattr(page, "mutants", lambda: known)
    for top in shares:
        changed = shares[top] | {"toggle": "0.0 %"}
        monkeypatch.setattr(page, "covered", lambda new=shares | {top: changed}: new)
        assert text(tops, blocks) != PAGE.read_text(encoding="utf-8"), top
    print(f"{len(known)} scores, {len(shares)} tops with coverage")
    assert len(known) >= 3
    assert shares


def test_a_reason_of_no_survivor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {r"a\.py x \$1\.Y\[0\] inv": "it is right", "x": "it is not"}
    monkeypatch.setattr(rows, "MUTATED", {"reduce": {"reasons": reasons}})
    monkeypatch.setattr(page, "MUTATED", rows.MUTATED)
    row = {**rows.mutants()["reduce"], "survived": 1, "survivors": ["a.py:7 x $1.Y[0] inv"]}
    monkeypatch.setattr(page, "mutants", lambda: {"reduce": row})
    monkeypatch.setattr(rows, "mutants", page.mutants)
    said = [each for each in problems(*read(), PENDING) if "survivor" in each]
    assert said == ["reduce: no survivor has the reason of 'x'"]
    assert "| reduce | `` a.py:7 x $1.Y[0] inv `` | it is right |" in text(*read())


def _whole() -> Top:
    test = "tests/formal/test_serial.py::test_the_framer_holds_what_it_offers"
    bench = "tests/hw/coarse/test_device.py::test_other_shapes"
    return Top(
        name="a top",
        what="a top",
        command="rtl fp32_add --depth 5",
        specified="axdimm.md#modes",
        exact=bench,
        device="sim:smartssd",
        cocotb=[{"test": bench, "of": "as shipped"}],
        runs=[{"test": test, "of": "as shipped"}],
        proofs=[{"test": test, "of": "frames"}],
        area=[{"family": "ecp5", "row": "fp32_add"}],
        stands=[{"what": "one for another", "test": test}],
        none={"faults": "there is nothing to go wrong"},
    )


def test_a_whole_row_has_no_problem() -> None:
    assert problems_of(_whole()) == []


BENCH, FILE = "tests/hw/coarse/test_device.py", "tests/formal/test_serial.py"
COVER = "tests/formal/test_dram.py::test_interesting_cases_are_reached"
WRONG: dict[str, tuple[Callable[[Top], Top], str]] = {
    "no proofs": (lambda top: replace(top, proofs=[]), "proofs: is empty"),
    "no faults and no reason": (lambda top: replace(top, none={}), "faults: is empty"),
    "a reason of a word": (lambda top: replace(top, none={"faults": "none"}), "has no reason"),
    "a reason for no cell": (
        lambda top: replace(top, none={**top.none, "speed": "nobody asked for it"}),
        "'speed' is no cell",
    ),
    "some, and none": (
        lambda top: replace(top, none={**top.none, "proofs": "there is not any"}),
        "proofs: says that there is none, and has some",
    ),
    "no heading": (
        lambda top: replace(top, specified="axdimm.md#nothing"),
        "specified: axdimm.md has no heading",
    ),
    "a class without a docstring": (
        lambda top: replace(top, specified="tests/shipped/rows.py#Entry"),
        "class with a docstring, 'Entry'",
    ),
    "no comparison of bits": (lambda top: replace(top, exact=""), "exact: is empty"),
    "a comparison that is elsewhere": (
        lambda top: replace(top, exact="tests/formal/test_x.py::test_y"),
        "is no test of cocotb or runs",
    ),
    "no file": (
        lambda top: replace(top, proofs=[{"test": "tests/formal/test_x.py::test_y", "of": "x"}]),
        "there is no file tests/formal/test_x.py",
    ),
    "a file that is no test": (
        lambda top: replace(top, proofs=[{"test": "bench/page.py::main", "of": "x"}]),
        "there is no file bench/page.py",
    ),
    "no test": (
        lambda top: replace(top, proofs=[{"test": f"{FILE}::test_y", "of": "x"}]),
        "there is no test 'test_y'",
    ),
    "no name of a test": (
        lambda top: replace(top, proofs=[{"test": FILE, "of": "x"}]),
        "there is no test ''",
    ),
    "a proof that is no proof": (
        lambda top: replace(top, proofs=[{"test": f"{BENCH}::test_other_shapes", "of": "x"}]),
        "has no mark 'formal'",
    ),
    "a proof that only reaches cases": (
        lambda top: replace(top, proofs=[{"test": COVER, "of": "x"}]),
        "proves nothing: it reaches cases",
    ),
    "a bench that is no bench": (
        lambda top: replace(top, cocotb=[{**top.proofs[0], "of": "as shipped"}]),
        "has no mark 'cocotb'",
    ),
    "a bench of something smaller alone": (
        lambda top: replace(top, cocotb=[{**top.cocotb[0], "of": "four lanes"}]),
        "cocotb: has nothing about the top as shipped",
    ),
    "an entry of nothing": (
        lambda top: replace(top, proofs=[{**top.proofs[0], "of": ""}]),
        "must have of, test",
    ),
    "no block of that name": (
        lambda top: replace(top, command="rtl fp32_foo"),
        "command: 'rtl fp32_foo'",
    ),
    "no option of that name": (
        lambda top: replace(top, command="rtl fp32_add --lanes 3"),
        "there is no such option",
    ),
    "a configuration that cannot be made": (
        lambda top: replace(top, command="rtl adam_kernel --lanes 3"),
        "lanes must be one of",
    ),
    "a clock that the board has not": (
        lambda top: replace(top, command="bitstream ulx3s_85f --clock-mhz 999"),
        "clock_mhz",
    ),
    "no command": (lambda top: replace(top, command="area --md"), "writes no top"),
    "no device": (lambda top: replace(top, device=""), "device: is empty"),
    "a device of no RTL": (lambda top: replace(top, device="golden:axdimm"), "is not simulated"),
    "a device of no such option": (
        lambda top: replace(top, device="sim:smartssd?speed=3"),
        "there is no such option",
    ),
    "an area without its units": (
        lambda top: replace(top, area=[{"family": "ecp5", "row": "axpby"}]),
        "is without axpby_fu: not of the whole",
    ),
    "an area of another top": (
        lambda top: replace(top, area=[{"family": "ecp5", "row": "fp32_mul"}]),
        "the row fp32_mul is not of what `rtl fp32_add --depth 5` writes",
    ),
    "no area": (
        lambda top: replace(top, area=[{"family": "ecp5", "row": "nothing"}]),
        "nothing has no row for ecp5",
    ),
    "an area that no page says": (
        lambda top: replace(top, area=[{"page": "boards.md", "says": "| 1 | 2 |", "of": "x"}]),
        "boards.md does not say '| 1 | 2 |' once",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_found(case: str) -> None:
    change, said = WRONG[case]
    found = problems_of(change(_whole()))
    assert any(said in each for each in found), found


def test_tops_and_blocks_that_are_missing_or_twice_are_found() -> None:
    tops, blocks = read()
    names = {top.name: top for top in tops}
    cases: list[tuple[list[Top], list[Block], set[tuple[str, str]], str]] = [
        ([top for top in tops if top.name != "adam_kernel"], blocks, PENDING, "and it has 0 rows"),
        ([*tops, names["adam_kernel"]], blocks, PENDING, "and it has 2 rows"),
        ([*tops, names["adam_kernel"]], blocks, PENDING, "adam_kernel: has two rows"),
        (tops, blocks[1:], PENDING, "fp32_add: nearstep rtl writes it, and it has 0 rows"),
        (
            tops,
            [*blocks, replace(blocks[0], names=["foo"])],
            PENDING,
            "foo: nearstep rtl does not write",
        ),
        (tops, [replace(blocks[0], part_of=["foo"]), *blocks[1:]], PENDING, "there is no foo"),
        (tops, [replace(blocks[0], tests=[]), *blocks[1:]], PENDING, "has an empty cell"),
        (tops, [replace(blocks[0], specified="x.md"), *blocks[1:]], PENDING, "no file x.md"),
        (tops, [replace(blocks[0], mutants=["foo"]), *blocks[1:]], PENDING, "no mutants of it"),
        ([replace(top, mutants=[]) for top in tops], blocks, PENDING, "mutants are in no row"),
        ([top for top in tops if top.name != "nvme_card"], blocks, PENDING, "has coverage, and no"),
        (
            [top for top in tops if not top.command.startswith("bitstream orangecrab")],
            blocks,
            PENDING,
            "orangecrab_85f: is a board without a row",
        ),
        (tops, blocks, {*PENDING, ("adam_kernel", "proofs")}, "proofs is listed and not pending"),
        (
            [replace(names["adam_kernel"], pending={"proofs": "none yet: a proof of it"}), *tops],
            blocks,
            PENDING,
            "proofs is pending, and not listed",
        ),
    ]
    for given, others, pending, said in cases:
        found = problems(given, others, pending)
        assert any(said in each for each in found), (said, found)
    assert problems(tops, blocks, PENDING) == []
