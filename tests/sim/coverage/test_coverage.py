"""Holes of a small design that is Verilated, and files of counts that are whole or not."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.coverage import __main__ as coverage
from nearstep_sim.coverage.__main__ import SHIPPED, main, verilog_of_command
from nearstep_sim.coverage.design import modules_of
from nearstep_sim.coverage.records import CoverageFileError, merged, read_points
from nearstep_sim.coverage.table import (
    CONSTANT,
    EMPTY,
    KINDS,
    SECOND_NAME,
    UNNAMED,
    Design,
    Exclusion,
    StaleReasonError,
    designs_of,
    exclusions,
)
from nearstep_sim.verilate.build import COVERAGE_OFF, COVERAGE_ON, OPTIMISE, coverage_flags
from nearstep_spec.boards.coarse_board import CoarseBoardConfig
from nearstep_spec.boards.config import BoardConfig

HERE = Path(__file__).parent
DEAD = {
    ("branch", "(x == 3'h7)"),
    ("branch", "fsm_state is 2'h2"),
    ("state", "fsm_state is 2'h2"),
    ("transition", "fsm_state from 2'h1 to 2'h2"),
}


def run(folder: Path, *sequences: str) -> None:
    """Run the small design in a process of its own, which leaves its counts in the folder."""
    environment = os.environ | {"NEARSTEP_COVERAGE": str(folder), OPTIMISE: "-O0"}
    subprocess.run([sys.executable, HERE / "tiny.py", *sequences], env=environment, check=True)


def design(folder: Path, *excluded: Exclusion) -> Design:
    (only,) = designs_of(merged(folder.glob("*.dat")), excluded)
    return only


def holes(found: Design) -> set[tuple[str, str]]:
    return {(h.kind, h.what) for block in found.blocks.values() for h in block.holes}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counts")
    run(folder, "1,3", "2,4,9")
    return folder


def test_a_state_that_no_stimulus_reaches_is_a_hole_until_one_does(counted: Path) -> None:
    before = design(counted)
    assert before.top == "Tiny"
    assert holes(before) >= DEAD
    place = {h.place for b in before.blocks.values() for h in b.holes if h.kind == "state"}
    assert len(place) == 1
    assert place.pop().startswith("coverage/tiny.py:")
    assert (before.total("state").covered, before.total("state").total) == (2, 3)
    assert (before.total("transition").covered, before.total("transition").total) == (1, 2)
    files = len(list(counted.glob("*.dat")))
    run(counted, "1,7,1,1")
    assert len(list(counted.glob("*.dat"))) == files + 1
    after = design(counted)
    assert holes(after).isdisjoint(DEAD)
    assert after.total("branch").total == before.total("branch").total
    for kind in ("line", "branch", "state", "transition"):
        assert after.total(kind).covered == after.total(kind).total, kind


def test_constants_second_names_and_results_of_operators_are_told_apart(counted: Path) -> None:
    found = design(counted)
    assert found.excluded[CONSTANT]["toggle"] == 2 * (2 + 2 + 2)  # `scale` twice, padding
    assert found.excluded[SECOND_NAME]["toggle"] > 0
    assert found.excluded[UNNAMED]["toggle"] > 0
    assert found.excluded[EMPTY]["branch"] == 1  # RUN, for `y`
    named = {what.partition(":")[0] for kind, what in holes(found) if kind == "toggle"}
    assert "scale" not in named


def test_an_exclusion_takes_its_holes_out_of_the_total_and_counts_them(counted: Path) -> None:
    reason = Exclusion(
        tops=["Tiny"], kinds=["toggle"], block=r".*tiny\.py:\d+", what="y: .*", reason="upper bits"
    )
    run(counted, "1")
    before, after = design(counted), design(counted, reason)
    gone = before.total("toggle").total - after.total("toggle").total
    assert gone == after.excluded["upper bits"]["toggle"] > 0
    assert before.total("toggle").covered == after.total("toggle").covered
    assert not any(what.startswith("y: ") for _, what in holes(after))
    known = {row["name"] for row in tomllib.loads(SHIPPED.read_text(encoding="utf-8"))["top"]}
    for each in exclusions():
        assert each.reason
        assert each.kinds
        assert each.tops
        assert set(each.tops) <= known


def test_a_reason_for_some_bits_leaves_the_others(counted: Path) -> None:
    before = design(counted)
    named = next(what for kind, what in holes(before) if kind == "toggle" and what.count("[") > 2)
    name, _, edges = named.partition(": ")
    edge, *others = edges.split(" ")
    reason = Exclusion(
        tops=["Tiny"],
        kinds=["toggle"],
        block=".*",
        what=re.escape(f"{name}: {edge}"),
        reason="a bit",
    )
    after = design(counted, reason)
    gone = before.total("toggle").total - after.total("toggle").total
    assert gone == after.excluded["a bit"]["toggle"] > 0
    assert ("toggle", f"{name}: {' '.join(others)}") in holes(after)


def test_a_reason_that_fits_no_hole_of_its_top_is_refused(counted: Path) -> None:
    other = Exclusion(tops=["Other"], kinds=["branch"], block=".*", what="x", reason="of another")
    assert design(counted, other).excluded.keys().isdisjoint({"of another"})
    stale = replace(other, tops=["Other", "Tiny"])
    with pytest.raises(StaleReasonError, match=r"fit none: Tiny: \.\* x"):
        design(counted, stale)


def test_what_stands_around_a_shipped_top_is_not_counted_with_it(counted: Path) -> None:
    """And a top of which the Verilog differs in a letter is another."""
    points = merged(counted.glob("*.dat"))
    (path,) = points
    whole = path.read_text()
    shipped = whole.replace(COVERAGE_OFF, "").replace(COVERAGE_ON, "")
    (alone,) = designs_of(points, shipped={"as shipped": shipped})
    before = design(counted)
    assert (alone.top, alone.sha) == ("as shipped", before.sha)
    assert alone.blocks == before.blocks
    around = path.with_name(path.name.replace(before.sha, "0" * 24))
    around = counted / around.name
    around.write_text(whole + "module around();\nendmodule\n")
    more = dict.fromkeys(points[path], 1) | {
        replace(next(iter(points[path])), module="around", line=10**6): 1
    }
    (both,) = designs_of({path: points[path], around: more}, shipped={"as shipped": shipped})
    for kind in KINDS:
        assert both.total(kind).total == before.total(kind).total > 0, kind
    assert both.total("branch").covered == both.total("branch").total
    (other,) = designs_of(points, shipped={"another": shipped.replace("module", "Module", 1)})
    assert other.top == "Tiny"
    (other,) = designs_of(points, shipped={"Tiny": shipped.replace("module", "Module", 1)})
    assert other.top == "Tiny, as it is not shipped"


def test_the_command_writes_json_and_a_page(
    counted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, shown = tmp_path / "coverage.json", tmp_path / "coverage.md"
    (counted / "tests-1.txt").write_text("tests/a.py::test_b", encoding="utf-8")
    assert main([str(counted), "--json", str(kept), "--page", str(shown), "--top", "Tiny"]) == 0
    (top,) = json.loads(kept.read_text())["tops"]
    assert top["top"] == "Tiny"
    assert sum(block["branch"]["total"] for block in top["blocks"].values()) > 5
    text = shown.read_text()
    for part in (top["sha256"], "pytest tests/a.py::test_b\n", "| `nvme_card` | not yet", CONSTANT):
        assert part in text
    assert "Tiny" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])


def test_commands_of_boards_are_their_configurations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEARSTEP_COVERAGE", "build/coverage")
    monkeypatch.setattr(coverage, "board_verilog", repr)

    def kept(key: str, make: Callable[[], str], sources: list[Path]) -> Path:
        path = tmp_path / "made.v"
        path.write_text(make())
        return path

    monkeypatch.setattr(coverage, "verilog_of", kept)
    for command, config in (
        ("bitstream ulx3s_85f", BoardConfig(board="ulx3s_85f")),
        (
            "bitstream orangecrab_85f --memory blockram",
            BoardConfig(board="orangecrab_85f", memory="blockram"),
        ),
        ("bitstream ulx3s_85f --design coarse", CoarseBoardConfig(board="ulx3s_85f")),
    ):
        assert verilog_of_command(command) == repr(config)
    assert "fp32_add" in verilog_of_command("rtl fp32_add")
    assert verilog_of_command("nearstep_hw.boards.nitefury project") == ""


def test_files_that_are_damaged_are_refused(counted: Path, tmp_path: Path) -> None:
    whole = min(counted.glob("*.dat")).read_text()
    points = sum(read_points(min(counted.glob("*.dat"))).values())
    assert points > 0
    for damaged, line in ((whole[:-40], whole.count("\n")), (whole.replace("# S", "S"), 1)):
        path = tmp_path / "damaged.dat"
        path.write_text(damaged)
        with pytest.raises(CoverageFileError, match=f"damaged.dat:{line}: expected"):
            read_points(path)


def test_without_the_variable_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEARSTEP_COVERAGE", raising=False)
    plain = to_verilog(StreamFifo(shape=8, depth=4), "StreamFifo")
    assert coverage_flags() == ()
    assert "src" not in plain
    monkeypatch.setenv("NEARSTEP_COVERAGE", "build/coverage")
    assert coverage_flags()[0] == "--coverage-line"
    assert next(
        iter(modules_of(to_verilog(StreamFifo(shape=8, depth=4), "StreamFifo")).values())
    ).source.startswith("nearstep_hw/stream/")


def test_verilog_names_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARSTEP_COVERAGE", "build/coverage")
    from .tiny import Tiny

    text = to_verilog(Tiny(), "Tiny")
    assert 'src = "coverage/tiny.py:' in text
    assert 'src = "/' not in text


@pytest.mark.deep
@pytest.mark.cocotb
def test_a_bench_in_cocotb_leaves_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEARSTEP_COVERAGE", str(tmp_path))
    from .tiny import verilog

    run_cocotb(top="Tiny", verilog=verilog(), test_module=HERE / "cocotb_tiny.py")
    found = design(tmp_path)
    assert holes(found) >= DEAD
    assert found.total("state").covered == 2
