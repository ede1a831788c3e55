"""`nearstep dram-replay`: a command trace on the DDR4 model."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Annotated

import typer

from nearstep.cli.outcome import FAILED, reported, working
from nearstep_sim.models.dram.device import Ddr4Device, DramViolationError
from nearstep_sim.models.dram.shared_bus import SharedBus
from nearstep_sim.models.dram.trace import TraceCommand, TraceError, read_trace, timing_of_header
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.timing import RANK_SWITCH, DramTiming, TimingError, dram_timing

__all__ = ["Replay", "main", "replay"]

_CHUNK = 65536


@dataclass(frozen=True)
class Replay:
    """Contents of a whole trace, and its first violation.

    `commands` counts lines, `clocks` is the clock of the last command, plus one; `violation` is the
    earliest, and `rank` its rank. Later commands may be unchecked.
    """

    commands: Counter[Command]
    clocks: int
    ranks: tuple[int, ...]
    violation: DramViolationError | None
    rank: int | None

    @property
    def data_share(self) -> float:
        """Part of the time in which the data bus carried data."""
        columns = (Command.RD, Command.RDA, Command.WR, Command.WRA)
        return 4 * sum(self.commands[c] for c in columns) / max(self.clocks, 1)


def replay(
    path: str | PathLike[str],
    timing: DramTiming | None = None,
    *,
    rank_switch: int = RANK_SWITCH,
) -> Replay:
    """Check a trace against every rule of its part, and its ranks against each other.

    Parameters
    ----------
    path : the file.
    timing : the part; by default the one that the file's comments name.
    rank_switch : clocks between the data of two ranks.

    Raises
    ------
    TraceError : a line is no command or out of order, or neither the file nor the caller names a
        part.
    """
    if timing is None:
        with open(path, encoding="ascii") as file:
            timing = timing_of_header(islice(file, 16))
        if timing is None:
            raise TraceError(f"{path} names no part in its first lines; give one")
    devices: dict[int, Ddr4Device] = {}
    bus = SharedBus(timing, rank_switch)
    counts: Counter[Command] = Counter()
    clocks = 0
    found: list[tuple[DramViolationError, int]] = []
    for chunk in _chunks(read_trace(path)):
        by_rank: dict[int, list[TraceCommand]] = {}
        for command in chunk:
            by_rank.setdefault(command.rank, []).append(command)
            clocks = max(clocks, command.clock + 1)
        counts.update(command.command for command in chunk)
        for rank in by_rank:
            devices.setdefault(rank, Ddr4Device(timing, rank=rank))
        if found:
            continue
        for rank, commands in by_rank.items():
            _judge(found, rank, partial(devices[rank].play, commands))
        if broken := bus.play(chunk):
            found.append(broken)
    if not found:  # a rank may have been left without refreshes
        for rank, device in devices.items():
            _judge(found, rank, partial(device.advance, max(clocks - 1, 0)))
    violation, rank = min(found, key=_clock, default=(None, None))
    return Replay(counts, clocks, tuple(sorted(devices)), violation, rank)


def _judge(
    found: list[tuple[DramViolationError, int]], rank: int, action: Callable[[], None]
) -> None:
    try:
        action()
    except DramViolationError as broken:
        found.append((broken, rank))


def _clock(found: tuple[DramViolationError, int]) -> int:
    return found[0].next.clock


def _chunks(commands: Iterator[TraceCommand]) -> Iterator[list[TraceCommand]]:
    while chunk := list(islice(commands, _CHUNK)):
        yield chunk


def main(
    file: Annotated[Path, typer.Argument(help="command trace", exists=True, dir_okay=False)],
    speed: Annotated[str | None, typer.Option(help="DDR4-1600 or DDR4-800")] = None,
    density: Annotated[str | None, typer.Option(help="4Gb, 8Gb, 16Gb or 32Gb")] = None,
    width: Annotated[str | None, typer.Option(help="x8 or x16")] = None,
    cl: Annotated[int | None, typer.Option(help="read latency, clocks")] = None,
    cwl: Annotated[int | None, typer.Option(help="write latency, clocks")] = None,
    rank_switch: Annotated[
        int, typer.Option(help="clocks between the data of two ranks", min=0)
    ] = RANK_SWITCH,
) -> None:
    """Check a DRAM command trace; options not given are read from the file's comments.

    Counts are of the whole file; the first violation ends the checks. Exit status: 1 with a
    violation, 2 if the file cannot be read.
    """
    wrong = (TraceError, TimingError, UnicodeDecodeError, OSError)
    with reported(wrong=wrong), working(f"replaying {file}"):
        with open(file, encoding="ascii") as text:
            named = timing_of_header(islice(text, 16))
        if named is None and not (speed or density or width or cl or cwl):
            raise TraceError(f"{file} names no part in its first lines; give --density and others")
        named = named or dram_timing()
        timing = dram_timing(
            speed or named.speed.name,
            density or named.density,
            width or named.width,
            # latencies follow a speed that is given here
            cl=cl if speed else cl or named.cl,
            cwl=cwl if speed else cwl or named.cwl,
        )
        result = replay(file, timing, rank_switch=rank_switch)
    kinds = ", ".join(f"{count} {command.name}" for command, count in result.commands.items())
    typer.echo(f"{sum(result.commands.values())} commands ({kinds}) in {result.clocks} clocks")
    typer.echo(f"data on the bus {100 * result.data_share:.2f} % of the time")
    if result.violation:
        where = f"rank {result.rank}: " if len(result.ranks) > 1 else ""
        typer.echo(f"violation: {where}{result.violation}", err=True)
        raise typer.Exit(FAILED)
    typer.echo("no violation")
