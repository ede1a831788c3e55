"""The buses that several ranks share: one command a clock, one burst of data at a time."""

from collections import deque
from typing import NamedTuple

from nearstep_sim.models.dram.device import DramViolationError, Issued
from nearstep_sim.models.dram.trace import TraceCommand
from nearstep_spec.dram.command import Command, encode
from nearstep_spec.dram.timing import BURST_CLOCKS, DramTiming

__all__ = ["RANK_SWITCH", "SharedBus"]

RANK_SWITCH = 2
"""tRTRS, clocks between the data of two ranks: a read preamble of one clock and the half clock of
the postamble before it do not overlap. JEDEC leaves it to the controller."""

_READS = (Command.RD, Command.RDA)
_COLUMNS = (*_READS, Command.WR, Command.WRA)


class _Burst(NamedTuple):
    command: TraceCommand
    start: int
    end: int


class SharedBus:
    """Judges what the ranks of a channel do to each other; what one does alone is its device's.

    Parameters
    ----------
    timing : of every rank.
    rank_switch : clocks between the data of two ranks.
    """

    def __init__(self, timing: DramTiming, rank_switch: int = RANK_SWITCH) -> None:
        self._timing = timing
        self._switch = rank_switch
        self._last: TraceCommand | None = None
        self._bursts: deque[_Burst] = deque()

    def check(self, command: TraceCommand) -> DramViolationError | None:
        """What the next command, in the order of time, breaks.

        The same command at one clock reaches several ranks.
        """
        last, self._last = self._last, command
        if last is not None and last.clock == command.clock and last.rank != command.rank:
            if last._replace(rank=command.rank) != command:
                return _violation("command bus: two ranks", last, command, 0)
        if command.command not in _COLUMNS:
            return None
        reads = command.command in _READS
        start = command.clock + (self._timing.cl if reads else self._timing.cwl)
        burst = _Burst(command, start, start + BURST_CLOCKS)
        # None to come begins its data earlier than this.
        earliest = command.clock + min(self._timing.cl, self._timing.cwl)
        while self._bursts and self._bursts[0].end + self._switch <= earliest:
            self._bursts.popleft()
        worst: tuple[int, TraceCommand] | None = None
        for other in self._bursts:
            apart = start >= other.end + self._switch or other.start >= burst.end + self._switch
            if other.command.rank != command.rank and not apart:
                minimum = other.end + self._switch - start + command.clock - other.command.clock
                worst = max(worst or (0, command), (minimum, other.command))
        self._bursts.append(burst)
        return worst and _violation("tRTRS", worst[1], command, worst[0])


def _violation(
    rule: str, previous: TraceCommand, next_: TraceCommand, minimum: int
) -> DramViolationError:
    text = f"{rule}: {_text(next_)} after {_text(previous)}"
    if minimum:
        text += f", {next_.clock - previous.clock} clocks, limit {minimum}"
    return DramViolationError(rule, _issued(previous), _issued(next_), minimum, text)


def _text(command: TraceCommand) -> str:
    return f"{command.command.name} of rank {command.rank} at {command.clock}"


def _issued(command: TraceCommand) -> Issued:
    pins = encode(
        command.command,
        bank_group=command.bank_group,
        bank=command.bank,
        row=max(command.row, 0),
        column=command.column,
    )
    return Issued(command.clock, command.command, pins.bg, pins.ba, pins.address)
