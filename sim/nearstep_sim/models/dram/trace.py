"""DRAM command traces: the format of a line, and reading a file. See docs/dram-traces.md."""

import re
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import NamedTuple

from nearstep_spec.dram.command import Command
from nearstep_spec.dram.timing import DramTiming, dram_timing
from nearstep_spec.errors import NearstepError

__all__ = ["TraceCommand", "TraceError", "header", "parse", "read_trace", "timing_of_header"]

_FIELDS = ("clock", "command", "rank", "bank group", "bank", "row", "column")
_LAST_CLOCK, _LAST_NUMBER = (1 << 62) - 1, (1 << 31) - 1
_WITH_BANK = {
    *(Command.ACT, Command.PRE, Command.RD, Command.RDA, Command.WR, Command.WRA, Command.MRS),
}
_WITH_COLUMN = {Command.RD, Command.RDA, Command.WR, Command.WRA}


class TraceError(NearstepError, ValueError):
    """A line that is no command, with its number in the message; or a trace that names no part."""


class TraceCommand(NamedTuple):
    """One line. Coordinates that the command does not have are 0; an unknown row is -1.

    The bits of MRS are its row, the bank pins its register: bank group * 4 + bank.
    """

    clock: int
    command: Command
    rank: int = 0
    bank_group: int = 0
    bank: int = 0
    row: int = -1
    column: int = 0


def header(timing: DramTiming) -> str:
    """Comment lines at the top of a trace, which name its part."""
    return (
        "# nearstep DDR4 command trace 1\n"
        f"# {timing.speed.name} {timing.density} {timing.width} CL={timing.cl} CWL={timing.cwl}\n"
        f"# {' '.join(name.replace(' ', '_') for name in _FIELDS)}\n"
    )


def timing_of_header(lines: Iterable[str]) -> DramTiming | None:
    """The part named in the comments of a trace, or None."""
    for line in lines:
        if found := re.fullmatch(r"# (DDR4-\S+) (\S+) (\S+) CL=(\d+) CWL=(\d+)\s*", line):
            grade, density, width, cl, cwl = found.groups()
            return dram_timing(grade, density, width, cl=int(cl), cwl=int(cwl))
    return None


def parse(line: str, number: int = 0) -> TraceCommand:
    """Parse one line. Raises `TraceError`."""
    words = line.split()
    if len(words) != len(_FIELDS):
        raise TraceError(
            f"line {number}: expected {len(_FIELDS)} fields ({', '.join(_FIELDS)}), "
            f"found {len(words)}: {line.strip()!r}"
        )
    try:
        command = Command[words[1]]
    except KeyError:
        raise TraceError(f"line {number}: unknown command {words[1]!r}") from None
    needed = {
        "bank group": command in _WITH_BANK,
        "bank": command in _WITH_BANK,
        "row": command in (Command.ACT, Command.MRS),
        "column": command in _WITH_COLUMN,
    }
    values = []
    for name, word in zip(_FIELDS, words, strict=True):
        if name == "command":
            continue
        if word == "-" and name in needed and not needed[name]:
            values.append(-1 if name == "row" else 0)
            continue
        most = _LAST_CLOCK if name == "clock" else _LAST_NUMBER
        if not word.isdecimal() or int(word) > most:
            raise TraceError(
                f"line {number}: {name} must be a number of at most {most}, not {word!r}"
            )
        values.append(int(word))
    return TraceCommand(values[0], command, *values[1:])


def read_trace(path: str | PathLike[str]) -> Iterator[TraceCommand]:
    """Yield the commands of a file, in its order.

    Ranks of one file share its buses, so their lines are in the order of time.

    Raises
    ------
    TraceError : a line is no command, or earlier than one of another rank before it.
    OSError : the file cannot be read.
    """
    last: TraceCommand | None = None
    with open(path, encoding="ascii") as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or line.startswith("#"):
                continue
            command = parse(line, number)
            if last is not None and command.clock < last.clock and command.rank != last.rank:
                raise TraceError(
                    f"line {number}: clock {command.clock} of rank {command.rank} is behind "
                    f"clock {last.clock} of rank {last.rank}; ranks of one file share its buses: "
                    "expected their lines in the order of time"
                )
            last = command
            yield command
