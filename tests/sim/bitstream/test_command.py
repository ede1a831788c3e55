"""`nearstep bitstream` as it is typed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from nearstep_sim.bitstream.command import Config, command, folder_of
from nearstep_spec.boards.board import BOARDS
from nearstep_spec.boards.coarse_board import CoarseBoardConfig
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.codec import to_json

from .fake_tools import install, place_and_route
from .stand_in import stand_in_plan


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, int]]:
    """Configurations and seeds that were asked for; the plan is that of the stand-in."""
    asked: list[tuple[Config, int]] = []

    def plan(config: Config, *, seed: int) -> Any:
        asked.append((config, seed))
        return stand_in_plan()

    monkeypatch.setattr("nearstep_hw.boards.plan.plan", plan)
    return asked


def invoke(arguments: Sequence[str]) -> Result:
    app = typer.Typer()
    app.command("bitstream", context_settings=command.context_settings)(command)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_options_of_the_design_and_seeds_reach_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: list[tuple[Config, int]]
) -> None:
    install(tmp_path / "tools", monkeypatch, place_and_route(120.0))
    out = tmp_path / "out"
    done = invoke(
        ["ulx3s_85f", "--memory", "blockram", "--rules=sgd", "-o", str(out), "--seed", "3"]
    )
    assert done.exit_code == 0, done.output
    [(config, seed)] = planned
    assert isinstance(config, BoardConfig)
    assert (config.board, config.memory, seed) == ("ulx3s_85f", "blockram", 3)
    assert to_json(config)["rules"] == ["sgd"]
    assert "timing met" in done.output
    report = json.loads((out / "report.json").read_text())
    assert report["configuration"]["rules"] == ["sgd"]
    assert report["design"] == "Radiona ULX3S-85F, blockram"
    assert (out / "top.bit").read_text() == "bits"
    monkeypatch.setenv("YOSYS", "nosuch")
    done = invoke(["ulx3s_85f", "--memory", "blockram", "--rules=sgd", "-o", str(out)])
    assert (done.exit_code, "nosuch" in done.output, "timing met" in done.output) == (
        1,
        True,
        False,
    )


def test_failed_timing_is_an_exit_status_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "tools", monkeypatch, place_and_route(81.5))
    done = invoke(["ulx3s_85f", "-o", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "error: timing failed: clk reaches 81.50 MHz of 100.00 MHz" in done.output
    assert "TIMING FAILED" in done.output
    assert "written" not in done.output


def test_an_unknown_board_is_refused_with_those_that_there_are(
    planned: list[tuple[Config, int]],
) -> None:
    done = invoke(["icebreaker"])
    assert done.exit_code == 2
    for name in (*BOARDS, "icebreaker"):
        assert name in done.output
    assert planned == []


def test_a_coarse_design_has_options_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: list[tuple[Config, int]]
) -> None:
    install(tmp_path / "tools", monkeypatch, place_and_route(120.0))
    out = tmp_path / "out"
    done = invoke(["ulx3s_85f", "--design", "coarse", "--buffer-entries=8", "-o", str(out)])
    assert done.exit_code == 0, done.output
    [(config, _)] = planned
    assert isinstance(config, CoarseBoardConfig)
    assert config.device.buffer_entries == 8
    report = json.loads((out / "report.json").read_text())
    assert report["configuration"]["design"] == "coarse"
    assert report["design"] == "Radiona ULX3S-85F, coarse"


COARSE = ["--design", "coarse"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lanes", "3"], "lanes"),
        (["--speed", "9"], "speed"),
        (["--seeds", "0"], "seeds"),
        (["--design", "dimm"], "design must be one of updater, coarse, not 'dimm'"),
        ([*COARSE, "--rules", "sgd"], "rules"),
        ([*COARSE, "--memory", "dram"], "memory"),
        ([*COARSE, "--memory-bytes", "1MiB"], "memory_bytes must be at most 262144"),
        ([*COARSE, "--entry-phits", "32"], "entry_phits must be fewer"),
        (["--entry-phits", "16"], "entry_phits"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], said: str, planned: list[tuple[Config, int]]
) -> None:
    done = invoke(["ulx3s_85f", *arguments])
    assert done.exit_code == 2
    assert said in done.output
    assert planned == []


def test_a_board_without_pins_for_links_is_refused(planned: list[tuple[Config, int]]) -> None:
    done = invoke(["orangecrab_85f", *COARSE])
    assert done.exit_code == 2
    assert "40 pins for links, as ulx3s_85f, not 'orangecrab_85f'" in done.output
    assert planned == []


def test_each_variant_of_a_board_has_a_folder() -> None:
    folders = {
        folder_of(BoardConfig(board=board, memory=memory))
        for board in BOARDS
        for memory in ("dram", "blockram")
    }
    folders.add(folder_of(CoarseBoardConfig()))
    assert len(folders) == 2 * len(BOARDS) + 1
    assert Path("build/boards/ulx3s_85f") in folders
    assert Path("build/boards/ulx3s_85f-blockram") in folders
