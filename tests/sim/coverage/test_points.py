"""Cover points: what is counted, merged, refused and written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearstep_hw.axdimm.arbiter import STATES
from nearstep_hw.coarse.wire import FrameKind
from nearstep_sim.coverage.__main__ import main
from nearstep_sim.coverage.observed import saw_register
from nearstep_sim.coverage.points import (
    MODES,
    ImpossibleHitError,
    UnknownBinError,
    hit,
    merged_hits,
    points,
)
from nearstep_sim.models.link.faults import FRAMES
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import device_maps

MODE, LINK = "axdimm.command_mode", "coarse.fault_frame"
FORMS = ("FP32", "BF16", "BF16")
HITS = "from nearstep_sim.coverage.points import hit\n"
CONFIG = UpdateKernelConfig(rules=("adam", "sgd"), state_format="bf16", scan=True)
REGISTERS = """
from nearstep_sim.coverage.observed import saw_register
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import device_maps
class Device: pass
device = Device()
config = UpdateKernelConfig(rules=("adam", "sgd"), state_format="bf16", scan=True)
((base, block),) = device_maps(config).values()
def saw(path, value, **more):
    register, field = block.lookup(path)
    saw_register(device, "axdimm", config, base + register.offset, value << field.lsb, **more)
"""


def process(folder: Path, text: str) -> str:
    """Run a program that counts; returns what it wrote to stderr."""
    environment = os.environ | {"NEARSTEP_POINTS": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True
    )
    return done.stderr


def hits(folder: Path, point: str) -> dict[str, int]:
    return {name: count for name, count in merged_hits(folder)[point].items() if count}


def test_bins_are_those_of_the_sources() -> None:
    assert MODES == STATES
    assert ("any", *(kind.name.lower() for kind in FrameKind)) == FRAMES
    for name, point in points().items():
        assert len(set(point.bins)) == len(point.bins) > len(point.impossible), name
        assert set(point.impossible) < set(point.bins), name
        assert all(point.impossible.values()), name
    assert sum(len(point.bins) for point in points().values()) > 300


def test_two_processes_are_added(tmp_path: Path) -> None:
    assert merged_hits(tmp_path) == {}
    assert not process(tmp_path, f"{HITS}for _ in range(3): hit({MODE!r}, 'ACT in NORMAL')")
    again = f"hit({MODE!r}, 'ACT in NORMAL'); hit({LINK!r}, 'drop of entry')"
    assert not process(tmp_path, HITS + again)
    assert len(list(tmp_path.iterdir())) == 2
    assert hits(tmp_path, MODE) == {"ACT in NORMAL": 2}
    assert hits(tmp_path, LINK) == {"drop of entry": 1}


def test_an_unknown_bin_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARSTEP_POINTS", str(tmp_path))
    with pytest.raises(UnknownBinError, match=r"axdimm.command_mode has no bin 'ACT in SLEEP'"):
        hit(MODE, "ACT in SLEEP")
    assert not process(tmp_path, f"{HITS}hit({MODE!r}, 'ACT in NORMAL')")
    (file,) = tmp_path.iterdir()
    text = file.read_text(encoding="utf-8").replace("ACT in NORMAL", "ACT in SLEEP")
    file.with_name("points-0.yml").write_text(text, encoding="utf-8")
    with pytest.raises(UnknownBinError, match="ACT in"):
        merged_hits(tmp_path)
    file.unlink()
    with pytest.raises(UnknownBinError, match="ACT in"):
        merged_hits(tmp_path)


def test_a_reason_of_a_bin_that_is_hit_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not process(tmp_path, f"{HITS}hit({LINK!r}, 'drop of any')")
    with pytest.raises(ImpossibleHitError) as caught:
        merged_hits(tmp_path)
    assert caught.value.found == [(LINK, "drop of any")]
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--functional", str(tmp_path / "page.md")])
    assert "drop of any" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_registers_of_a_kernel_are_sampled(tmp_path: Path) -> None:
    assert not process(tmp_path, f"{REGISTERS}saw('error.cause', 8)")
    assert hits(tmp_path, "axdimm.kernel") == {"ABORTED": 1}
    assert "200 is not a valid" in process(tmp_path, f"{REGISTERS}saw('error.cause', 200)")
    done = "saw('status.done', 1, units=True)"
    some = "saw('committed.value', 5)"
    no_updates = (
        *(done, f"saw('committed.value', 0); {done}", f"{some}; saw('operation.kind', 1); {done}"),
        f"{some}; saw('status.done', 3, units=True)",  # with an error
        f"{some}; saw('status.done', 1)",  # of units in C++
    )
    for steps in no_updates:
        assert not process(tmp_path, REGISTERS + steps)
    assert hits(tmp_path, "rules.format") == {}
    assert not process(tmp_path, f"{REGISTERS}{some}; saw('rule.value', 1); {done}")
    assert hits(tmp_path, "rules.format") == {"p of sgd in FP32": 1}
    assert not process(tmp_path, f"{REGISTERS}{some}; {done}")
    found = {f"{state} of adam in {form}" for state, form in zip("pmv", FORMS, strict=True)}
    assert {*hits(tmp_path, "rules.format")} == found | {"p of sgd in FP32"}


def test_nothing_is_counted_without_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NEARSTEP_COVERAGE", "NEARSTEP_POINTS"):
        monkeypatch.delenv(name, raising=False)
    hit(MODE, "ACT in SLEEP")  # no bin is looked for
    ((base, block),) = device_maps(CONFIG).values()
    saw_register(object(), "axdimm", CONFIG, base + block["error"].offset, 200)


def test_the_page_names_holes_reasons_and_tests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, made = tmp_path / "page.md", tmp_path / "coverage.json"
    (tmp_path / "tests-1.txt").write_text("tests/a.py::test_a[1]\ntests/a.py::test_b\n")
    options = [str(tmp_path), "--json", str(made)]
    with pytest.raises(SystemExit):
        main([*options, "--functional", str(page)])
    assert "no points-*.yml" in capsys.readouterr().err
    kinds = ("control", "entry", "abort")
    program = "; ".join(f"hit({LINK!r}, 'drop of {kind}')" for kind in kinds)
    assert not process(tmp_path, HITS + program)
    assert main([*options, "--functional", str(page)]) == 0
    assert "coarse.fault_frame: 3/20 (15.0 %), 4 cannot be hit" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert f"nearstep_sim.coverage {tmp_path} --functional {page}" in text
    assert "pytest tests/a.py::test_a tests/a.py::test_b\n" in text
    assert "- `tests/a.py::test_a[1]`" in text
    assert "| `coarse.fault_frame` | 3/20 (15.0 %) |" in text
    assert "- `coarse.fault_frame`: duplicate of control; " in text
    assert "drop of any; duplicate of any; reorder of any; corrupt of any |" in text
    found = json.loads(made.read_text(encoding="utf-8"))["functional"][LINK]
    assert found["count"] == {"covered": 3, "total": 20}
    assert found["hits"]["drop of entry"] == 1
    assert "drop of entry" not in found["holes"]
    assert main(options) == 0  # no counts of Verilator
