"""Command traces: what is written, replayed, refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from nearstep_hw.dram.command import Command
from nearstep_hw.dram.timing import dram_timing
from nearstep_sim.dram.device import Ddr4Device
from nearstep_sim.dram.host import BareDram, HostConfig
from nearstep_sim.dram.replay import replay
from nearstep_sim.dram.trace import TraceCommand, TraceError, parse, read_trace

LINES = """\
# nearstep DDR4 command trace 1
# DDR4-1600 8Gb x8 CL=11 CWL=9
# clock command rank bank_group bank row column
10 ACT 0 1 2 77 -
21 RD 0 1 2 77 8
29 WR 0 1 2 77 1016
54 PRE 0 1 2 - -
70 PREA 0 - - - -
81 REF 0 - - - -
361 ACT 0 3 0 65535 -
372 WRA 0 3 0 65535 0
"""


def run_cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "nearstep", "dram-replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    device = Ddr4Device(dram_timing())
    path = tmp_path / "commands.txt"
    device.trace_to(path)
    device.issue(10, Command.ACT, bank_group=1, bank=2, row=77)
    device.issue(21, Command.RD, bank_group=1, bank=2, column=8)
    device.issue(29, Command.WR, bank_group=1, bank=2, column=1016)
    device.issue(54, Command.PRE, bank_group=1, bank=2)
    device.issue(70, Command.PREA)
    device.issue(81, Command.REF)
    device.issue(361, Command.ACT, bank_group=3, bank=0, row=65535)
    device.issue(372, Command.WRA, bank_group=3, bank=0)
    device.trace_close()
    return path


def test_the_file_is_the_documented_format(written: Path) -> None:
    assert written.read_text() == LINES


def test_reading_gives_the_commands_back(written: Path) -> None:
    commands = list(read_trace(written))
    assert len(commands) == 8
    assert commands[0] == TraceCommand(10, Command.ACT, 0, 1, 2, 77, 0)
    assert commands[5] == TraceCommand(81, Command.REF)


def test_replay_takes_the_part_from_the_file(written: Path) -> None:
    result = replay(written)
    assert result.violation is None
    assert sum(result.commands.values()) == 8
    assert result.clocks == 373
    assert result.data_share == pytest.approx(12 / 373)


def test_replay_names_the_rule_of_a_shortened_gap(written: Path) -> None:
    written.write_text(written.read_text().replace("361 ACT", "360 ACT"))
    found = replay(written).violation
    assert found is not None
    assert (found.rule, found.minimum) == ("tRFC", 280)


def test_replay_checks_rows_of_column_commands(written: Path) -> None:
    written.write_text(written.read_text().replace("2 77 1016", "2 78 1016"))
    found = replay(written).violation
    assert found is not None
    assert found.rule == "another row is open"
    assert found.next.clock == 29


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("21 RD 0 1 2", "21 RD 0 257 2", "bank out of range"),
        ("21 RD 0 1 2", "21 RD 0 1 6", "bank out of range"),
        ("10 ACT 0 1 2 77", "10 ACT 0 1 2 65536", "row out of range"),
        ("77 1016", "77 1024", "column out of range"),
        ("77 1016", "77 1017", "column inside a burst"),
    ],
)
def test_coordinates_that_the_part_does_not_have(
    written: Path, old: str, new: str, rule: str
) -> None:
    written.write_text(written.read_text().replace(old, new))
    found = replay(written).violation
    assert found is not None
    assert found.rule == rule


def test_ranks_have_their_own_banks(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("10 ACT 0 0 0 1 -\n11 ACT 1 0 0 1 -\n21 RD 0 0 0 1 0\n22 RD 1 0 0 1 0\n")
    assert replay(path, dram_timing()).violation is None
    path.write_text("10 ACT 0 0 0 1 -\n21 RD 1 0 0 1 0\n")
    found = replay(path, dram_timing()).violation
    assert found is not None
    assert found.rule == "bank closed"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("10 ACT 0 1 2 77", "expected 7 fields"),
        ("10 ACT 0 1 2 77 - -", "expected 7 fields"),
        ("10 MRS 0 - - - -", "unknown command 'MRS'"),
        ("x PREA 0 - - - -", "clock must be a number"),
        ("10 ACT 0 1 2 - -", "row must be a number"),
        ("10 ACT 0 - 2 1 -", "bank group must be a number"),
        ("10 RD 0 1 2 - -", "column must be a number"),
        ("-1 PREA 0 - - - -", "clock must be a number"),
        ("10 PREA - - - - -", "rank must be a number"),
    ],
)
def test_bad_lines_are_refused_with_their_number(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=f"line 7: .*{message}"):
        parse(line, 7)
    path = tmp_path / "bad.txt"
    path.write_text(f"# comment\n\n{line}\n")
    with pytest.raises(TraceError, match="line 3"):
        list(read_trace(path))


def test_the_command_line_reports_and_fails(written: Path, tmp_path: Path) -> None:
    good = run_cli(written)
    assert good.returncode == 0, good.stderr
    assert "8 commands" in good.stdout
    assert "no violation" in good.stdout
    slower = run_cli(written, "--density", "16Gb")
    assert slower.returncode == 1
    assert "tRFC: ACT bg3 ba0 row 65535 at 361 after REF at 81, 280 clocks, limit 440" in (
        slower.stderr
    )
    nameless = tmp_path / "nameless.txt"
    nameless.write_text("10 PREA 0 - - - -\n")
    assert run_cli(nameless).returncode == 2
    assert run_cli(nameless, "--density", "8Gb").returncode == 0
    assert run_cli(written, "--width", "x4").returncode == 2


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot write"):
        Ddr4Device(dram_timing()).trace_to(tmp_path / "no" / "such" / "folder")


def test_a_host_run_replays_without_violation(tmp_path: Path) -> None:
    bare = BareDram(HostConfig(density="4Gb", width="x16", seed=5, stall=0.1))
    path = tmp_path / "host.txt"
    bare.devices[0].trace_to(path)
    addresses = [64 * ((i * 7919) % 50_000) for i in range(2000)]
    bare.host.submit([False] * len(addresses), addresses)
    bare.run(10**6)
    bare.devices[0].trace_close()
    result = replay(path)
    assert result.violation is None
    assert result.commands[Command.RD] == 2000
    assert dict(result.commands) == {k: v for k, v in bare.devices[0].counts.items() if v}
