"""`nearstep decompressor check`: the shipped example passes, and what is wrong is found."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nearstep_sim import decompressor_check
from nearstep_sim.bench.record_bench import KINDS, RecordBench
from nearstep_sim.decompressor_check import exactness, rates, round_trips
from nearstep_sim.drive_rate import drive_rate
from nearstep_spec.updater.decompressor import Decompressor, load

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ternary.py"
TERNARY = f"{EXAMPLE}:TERNARY"
LANES = 2  # builds in two seconds
RUNS = 12 * len(KINDS)  # each kind in every format, with every stall

MISTAKES = {
    "a sign is lost": ("signed = value ^ (code[1] << 31)", "signed = value", "element .* is 0x"),
    "a beat is lost": (
        "ended.eq(beat.end & ~more)]",
        "ended.eq(0)]",
        r"\(done, cause, position\) is \(0, 0, 0\), expected \(1, 0, 0\); \d+ of \d+ beats given",
    ),
    "a beat changes as it waits": (
        "Mux(there & code[0], signed, 0)",
        "Mux(there & code[0] & self.o.ready, signed, 0)",
        "violations of the stream rules",
    ),
    "the second beat is the first": (
        "word_select(part * self.lanes + lane, 2)",
        "word_select(lane, 2)",
        "element .* is 0x",
    ),
    "numpy rounds otherwise": (
        "np.where(code & np.uint32(1), flipped,",
        "np.where(code & np.uint32(1), flipped ^ np.uint32(k == 15),",
        "element .* is 0x",
    ),
}


def mistaken(tmp_path: Path, mistake: str) -> Decompressor:
    """The example with a mistake."""
    before, after, _ = MISTAKES[mistake]
    text = EXAMPLE.read_text()
    assert text.count(before) == 1
    path = tmp_path / "mistaken.py"
    path.write_text(text.replace(before, after))
    return load(f"{path}:TERNARY")


def test_the_example_is_exact_in_every_kind_of_run() -> None:
    bench = RecordBench(load(TERNARY), lanes=LANES)
    try:
        found = exactness(bench, runs=RUNS, seed=1)
        measured = rates(bench, (0.01, 1.0), seed=1)
    finally:
        bench.close()
    print(found, measured)
    assert found.passed, found.first
    assert (found.checks, found.outcomes["dry"]) == (RUNS, RUNS)
    assert min(found.outcomes["done"], found.outcomes["wrong"]) > RUNS // 4
    assert found.compared > 50_000
    # Eight beats a record, one a cycle; the first comes when it has been widened and checked.
    assert [each.records for each in measured] == [4096, 4096]
    assert all(0 <= each.cycles - 8 * 4096 < 12 for each in measured)
    assert measured[0].nonzero < measured[1].nonzero == 65_536


def test_the_example_loses_nothing_when_it_is_compressed_again() -> None:
    found = round_trips(load(TERNARY), trips=60, seed=2)
    assert found.passed, found.first
    assert (found.checks, found.compared > 10_000) == (60, True)


def test_compressors_that_lose_are_found(tmp_path: Path) -> None:
    path = tmp_path / "lossy.py"
    text = EXAMPLE.read_text()
    path.write_text(text.replace("np.maximum(sent.sum(axis=1), 1)", "16"))
    found = round_trips(load(f"{path}:TERNARY"), trips=60, seed=3)
    assert re.search(r"trip 0: .* element \d+ was 0x\w+ and is 0x\w+ when", found.first)
    path.write_text(text.replace("(code << 2 * k)", "(code * 2 << 2 * k)"))
    assert (
        "record 0 that compress gave is wrong"
        in round_trips(load(f"{path}:TERNARY"), trips=60, seed=3).first
    )
    path.write_text(
        text.replace("np.where(code & np.uint32(1), flipped,", "np.where(False, flipped,")
    )
    found = round_trips(load(f"{path}:TERNARY"), trips=60, seed=3)
    assert found.first == "seed 3: nothing but zeros was ever sent"


def test_rates_are_beside_those_of_the_drive() -> None:
    drive = drive_rate()
    assert (drive.read, drive.write, drive.origin) == (3.2e9, 2.0e9, "datasheet")
    assert drive.beside(6.4e9).startswith("6.40 GB/s, 2.00 times what a drive reads (3.20 GB/s, ")
    assert drive.beside(6.4e9).endswith(" and 3.20 times what it writes (2.00)")


def test_a_unit_with_other_ports_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ports.py"
    path.write_text(
        EXAMPLE.read_text().replace("lanes=lanes, records=records))", "lanes=1, records=records))")
    )
    result = CliRunner().invoke(decompressor_check.app, ["check", f"{path}:TERNARY"])
    assert result.exit_code == 1
    assert "A unit must be a Component of UnitSignature(lanes=16, records=16)" in result.output
    result = CliRunner().invoke(decompressor_check.app, ["check", f"{path}:NONE"])
    assert (result.exit_code, "there are: TERNARY" in result.output) == (2, True)


@pytest.mark.deep
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_with_its_place(mistake: str, tmp_path: Path) -> None:
    bench = RecordBench(mistaken(tmp_path, mistake), lanes=LANES)
    try:
        found = exactness(bench, runs=RUNS, seed=1)
    finally:
        bench.close()
    print(found.first)
    assert not found.passed
    assert re.search(MISTAKES[mistake][2], found.first)


@pytest.mark.deep
@pytest.mark.parametrize(("lanes", "cut"), [(4, False), (8, True), (16, True)])
def test_every_width_is_exact(lanes: int, cut: bool) -> None:
    bench = RecordBench(load(TERNARY), lanes=lanes, cut=cut)
    try:
        found = exactness(bench, runs=RUNS, seed=lanes)
    finally:
        bench.close()
    assert found.passed, found.first


@pytest.mark.deep
def test_the_command_reports_rates_and_area() -> None:
    result = CliRunner().invoke(decompressor_check.app, ["check", TERNARY, "--area"])
    print(result.output)
    assert result.exit_code == 0, result.output
    compared = re.search(r"324 checks of (\d+) elements, seed 1: (\d+) runs done", result.output)
    assert compared
    assert (int(compared[1]) > 500_000, int(compared[2]) > 100) == (True, True)
    for text in (
        r"15\.9\d+ elements and 0\.99\d records a cycle, measured",
        r"out: 12\.78 GB/s, 3\.99 times",
        "keeps up",
        r"0 DSP48E2, [1-9]\d* LUT, [1-9]\d* FF",
    ):
        assert re.search(text, result.output), text


@pytest.mark.deep
def test_a_mistake_fails_the_command_and_no_rate_is_told(tmp_path: Path) -> None:
    name = mistaken(tmp_path, "a sign is lost").name
    result = CliRunner().invoke(decompressor_check.app, ["check", name])
    assert result.exit_code == 1
    assert re.search(r"made, \d+ records of \d+ elements, FP32, stalls free", result.output)
    assert "elements a cycle" not in result.output
