"""Command traces: what is written, replayed, refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from nearstep_sim.models.dram.device import Ddr4Device
from nearstep_sim.models.dram.host import BareDram, HostConfig
from nearstep_sim.models.dram.replay import main, replay
from nearstep_sim.models.dram.trace import (
    TraceCommand,
    TraceError,
    parse,
    read_trace,
    timing_of_header,
)
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.timing import dram_timing

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


def test_comments_that_name_a_part_otherwise_are_comments() -> None:
    comments = ["# DDR4-1600 host trace, two ranks", "# DDR4-1600 8Gb x8 CL=11 CWL=x"]
    assert timing_of_header(comments) is None


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


def lines(path: Path, *commands: str) -> Path:
    """A file of commands; what a line lacks is `-`."""
    padded = (" ".join([*each.split(), *"-------"][:7]) for each in commands)
    path.write_text("".join(f"{line}\n" for line in padded))
    return path


def test_ranks_have_their_own_banks(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("10 ACT 0 0 0 1 -\n11 ACT 1 0 0 1 -\n21 RD 0 0 0 1 0\n27 RD 1 0 0 1 0\n")
    assert replay(path, dram_timing()).violation is None
    path.write_text("10 ACT 0 0 0 1 -\n21 RD 1 0 0 1 0\n")
    found = replay(path, dram_timing()).violation
    assert found is not None
    assert found.rule == "bank closed"


TWO = ("10 ACT 0 0 0 1", "14 ACT 1 0 0 1")  # two ranks with an open row each


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [
        ("RD", "RD", 4 + 2),  # BL/2 and the bubble
        ("WR", "WR", 4 + 2),
        ("RD", "WR", 11 - 9 + 4 + 2),  # CL - CWL more
        ("WR", "RD", 9 - 11 + 4 + 2),
    ],
)
def test_data_of_two_ranks_need_the_bubble(
    first: str, second: str, distance: int, tmp_path: Path
) -> None:
    path = tmp_path / "two.txt"
    for gap in range(1, 12):
        lines(path, *TWO, f"40 {first} 0 0 0 1 0", f"{40 + gap} {second} 1 0 0 1 0")
        result = replay(path, dram_timing())
        assert (result.violation is None) == (gap >= distance), gap
        if result.violation is None:
            continue
        assert (result.violation.rule, result.violation.minimum) == ("tRTRS", distance)
        assert str(result.violation) == (
            f"tRTRS: {second} of rank 1 at {40 + gap} after {first} of rank 0 at 40, "
            f"{gap} clocks, limit {distance}"
        )
        assert result.rank == 1
    assert replay(path, dram_timing(), rank_switch=30).violation is not None


def test_the_termination_of_a_write_does_not_reach_into_data_of_another_rank(
    tmp_path: Path,
) -> None:
    """RTT_WR begins two clocks before the data, whatever the bubble between the ranks' data."""
    path = tmp_path / "two.txt"
    for first, distance in (("RD", 11 - 9 + 4 + 2), ("WR", 4 + 2)):
        for gap in (distance - 1, distance):
            lines(path, *TWO, f"40 {first} 0 0 0 1 0", f"{40 + gap} WR 1 0 0 1 0")
            found = replay(path, dram_timing(), rank_switch=1).violation
            assert (found is None) == (gap == distance), gap
            if found is not None:
                assert (found.rule, found.minimum) == ("ODT", distance)
    # A read has no such lead: one idle clock is then enough.
    lines(path, *TWO, "40 WR 0 0 0 1 0", "43 RD 1 0 0 1 0")
    assert replay(path, dram_timing(), rank_switch=1).violation is None
    lines(path, *TWO, "40 WR 0 0 0 1 0", "42 RD 1 0 0 1 0")
    found = replay(path, dram_timing(), rank_switch=1).violation
    assert found is not None
    assert found.rule == "tRTRS"


RANK_RULES = [
    # what one rank may not do, and the other may at the same clock
    ("tRRD_S", "10 ACT 0 0 0 1", "13 ACT {} 1 0 1"),
    ("tFAW", *(f"{10 + 4 * i} ACT 0 {i} 0 1" for i in range(4)), "29 ACT {} 0 1 1"),
    ("tRFC", "10 REF 0", "289 ACT {} 0 0 1"),
    ("tRP", "10 PREA 0", "20 REF {}"),
    ("tZQCS", "10 ZQCS 0", "137 ACT {} 0 0 1"),
]


@pytest.mark.parametrize("rule", RANK_RULES, ids=lambda rule: rule[0])
def test_rows_refresh_and_calibration_are_each_rank_s_own(
    rule: tuple[str, ...], tmp_path: Path
) -> None:
    name, *before, last = rule
    for rank in (0, 1):
        path = lines(tmp_path / "two.txt", *before, last.format(rank))
        found = replay(path, dram_timing()).violation
        assert (found is None) == (rank == 1)
        if found is not None:
            assert found.rule == name


def test_data_of_a_later_write_may_come_before_those_of_a_read(tmp_path: Path) -> None:
    """With CL far above CWL: the bus is free between the commands' data, or it is not."""
    slow = dram_timing(cl=30, cwl=9)
    for gap, legal in ((1, True), (15, True), (16, False), (26, False), (27, True)):
        path = lines(tmp_path / "t.txt", *TWO, "40 RD 0 0 0 1 0", f"{40 + gap} WR 1 0 0 1 0")
        assert (replay(path, slow).violation is None) == legal, gap


def test_the_command_bus_carries_one_command_to_any_ranks(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    lines(path, "10 REF 0", "10 REF 1", "290 ACT 0 0 0 1", "290 ACT 1 0 0 1")
    assert replay(path, dram_timing()).violation is None
    found = replay(lines(path, "10 REF 0", "10 PREA 1"), dram_timing()).violation
    assert found is not None
    assert found.rule == "command bus: two ranks"
    assert str(found) == "command bus: two ranks: PREA of rank 1 at 10 after REF of rank 0 at 10"


def test_ranks_out_of_order_are_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "two.txt", *TWO, "40 RD 0 0 0 1 0", "39 RD 1 0 0 1 0")
    with pytest.raises(TraceError, match="line 4: clock 39 of rank 1 is behind clock 40"):
        replay(path, dram_timing())


def test_counts_are_of_the_whole_file_after_a_violation(tmp_path: Path) -> None:
    """More lines than are read at once; the earliest violation counts, whichever rank it is of."""
    n = 70_000
    text = "".join(f"{100 + i} PREA {i % 2} - - - -\n" for i in range(n))
    path = tmp_path / "long.txt"
    path.write_text(f"40 REF 1 - - - -\n50 REF 0 - - - -\n{text}")
    result = replay(path, dram_timing())
    assert sum(result.commands.values()) == n + 2
    assert (result.clocks, result.ranks, result.rank) == (100 + n, (0, 1), 0)
    assert result.violation is not None
    assert (result.violation.rule, result.violation.next.clock) == ("tRFC", 100)


def test_a_rank_that_is_left_alone_needs_its_refreshes(tmp_path: Path) -> None:
    refreshes = [f"{6240 * i} REF 0" for i in range(1, 11)]
    result = replay(lines(tmp_path / "two.txt", "10 PREA 1", *refreshes), dram_timing())
    assert result.violation is not None
    assert (result.violation.rule, result.rank) == ("tREFI", 1)


def test_too_many_owed_refreshes_say_how_many(tmp_path: Path) -> None:
    """The last REF was a moment ago: it is their number that is wrong."""
    late = [f"{9 * 6240 + 300 * i} REF 0" for i in range(3)]
    path = lines(tmp_path / "late.txt", *late, f"{12 * 6240 + 1} PREA 0")
    done = run_cli(path, "--density", "8Gb")
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "violation: postponed REF: PREA at 74881 after REF at 56760, 9 owed, limit 8"
    )
    assert "4 commands (3 REF, 1 PREA) in 74882 clocks" in done.stdout


def test_mode_registers_and_calibration_are_traced(tmp_path: Path) -> None:
    device = Ddr4Device(dram_timing())
    path = tmp_path / "modes.txt"
    device.trace_to(path)
    device.issue(10, Command.MRS, bank_group=1, bank=1, row=0x400)
    device.issue(34, Command.ZQCS)
    device.issue(162, Command.ZQCL)
    device.trace_close()
    assert path.read_text().splitlines()[3:] == [
        "10 MRS 0 1 1 1024 -",
        "34 ZQCS 0 - - - -",
        "162 ZQCL 0 - - - -",
    ]
    result = replay(path)
    assert result.violation is None
    assert dict(result.commands) == {Command.MRS: 1, Command.ZQCS: 1, Command.ZQCL: 1}
    path.write_text(path.read_text().replace("34 ZQCS", "33 ZQCS"))
    assert (
        str(replay(path).violation)
        == "tMOD: ZQCS at 33 after MRS MR5 1024 at 10, 23 clocks, limit 24"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("10 ACT 0 1 2 77", "expected 7 fields"),
        ("10 ACT 0 1 2 77 - -", "expected 7 fields"),
        ("10 SRE 0 - - - -", "unknown command 'SRE'"),
        ("10 MRS 0 - - - -", "bank group must be a number"),
        ("10 MRS 0 0 1 - -", "row must be a number"),
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
    app = typer.Typer()
    app.command()(main)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [*map(str, arguments)])

    slower = run(written, "--density", "16Gb")
    assert slower.exit_code == 1
    assert "tRFC: ACT bg3 ba0 row 65535 at 361 after REF at 81, 280 clocks, limit 440" in (
        slower.stderr
    )
    nameless = tmp_path / "nameless.txt"
    nameless.write_text("10 PREA 0 - - - -\n")
    assert run(nameless).exit_code == 2
    assert run(nameless, "--density", "8Gb").exit_code == 0
    assert run(written, "--width", "x4").exit_code == 2


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
