"""Holes of a small design that is Verilated, and files of counts that are whole or not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.coverage.__main__ import main
from nearstep_sim.coverage.design import modules_of
from nearstep_sim.coverage.records import CoverageFileError, merged, read_points
from nearstep_sim.coverage.table import (
    CONSTANT,
    EMPTY,
    SECOND_NAME,
    UNNAMED,
    Design,
    Exclusion,
    designs_of,
    exclusions,
)
from nearstep_sim.verilate.build import OPTIMISE, coverage_flags

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
    reason = Exclusion(kinds=["toggle"], block=r".*tiny\.py:\d+", what="y: .*", reason="upper bits")
    run(counted, "1")
    before, after = design(counted), design(counted, reason)
    gone = before.total("toggle").total - after.total("toggle").total
    assert gone == after.excluded["upper bits"]["toggle"] > 0
    assert before.total("toggle").covered == after.total("toggle").covered
    assert not any(what.startswith("y: ") for _, what in holes(after))
    assert all(each.reason and each.kinds for each in exclusions())


def test_the_command_writes_json_and_a_page(
    counted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, shown = tmp_path / "coverage.json", tmp_path / "coverage.md"
    (counted / "tests-1.txt").write_text("tests/a.py::test_b", encoding="utf-8")
    assert main([str(counted), "--json", str(kept), "--page", str(shown)]) == 0
    (top,) = json.loads(kept.read_text())["tops"]
    assert top["top"] == "Tiny"
    assert sum(block["branch"]["total"] for block in top["blocks"].values()) > 5
    text = shown.read_text()
    for part in (top["sha256"], "pytest tests/a.py\n", "| `nvme_card` | not yet", CONSTANT):
        assert part in text
    assert "Tiny" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])


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
