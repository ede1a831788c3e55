"""`nearstep trace`: a step's trace and picture, and what is refused."""

import json

import pytest
import typer
from typer.testing import CliRunner, Result

from nearstep.cli.trace import command, timeline_of

from ..driver.conftest import DIMMS


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.deep
def test_a_step_is_shown_and_written(tmp_path):
    files = tmp_path / "step.json", tmp_path / "step.png"
    done = run(
        DIMMS["sim-dimm"], "--sizes", "20000,30", "-o", str(files[0]), "-p", str(files[1])
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    print(done.output)
    assert files[1].read_bytes().startswith(b"\x89PNG")
    written = json.loads(files[0].read_text())
    lanes = {e["args"]["name"] for e in written["traceEvents"] if e["ph"] == "M"}
    assert lanes == {"bus", "channel 0", "channel 1"}
    timeline = timeline_of(DIMMS["sim-dimm"], [20_000, 30])
    assert f"{timeline.makespan} cycles" in done.output
    assert all(str(timeline.busy(lane)) in done.output for lane in lanes)
    bus = [e for e in written["traceEvents"] if e["ph"] == "X" and e["tid"] == 0]
    assert sum(e["args"]["bytes_written"] for e in bus) == 4 * 20_032
    assert sum(e["args"]["bytes_read"] for e in bus) == 4 * 20_032
