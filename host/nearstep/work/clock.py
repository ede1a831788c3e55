"""One clock for several devices, and for modelled operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from nearstep.backends.base import Backend, Completion, Poll
from nearstep.errors import ArgumentError
from nearstep.threads import at_once

MODEL_HERTZ = 1e12
"""Without a device a cycle is a picosecond."""

QUANTUM_CYCLES = 256
"""Most cycles, beside one access, by which a working device is ahead of another."""


class Clock:
    """Device cycles of all devices of a graph, from 0 at construction.

    Commands of the host are sequential: a command to one device takes time on all. So before each
    command all working devices are advanced to the same cycle; idle ones are not simulated. On a
    device without a clock the time to the next end counts as a cycle. All devices have cycles of
    the same length.

    Parameters
    ----------
    hertz : cycles in a second, for modelled durations. None: these are allowed only without
        devices.

    Raises
    ------
    ArgumentError : a backend is named twice, or `hertz` is not above 0.
    """

    def __init__(self, backends: Iterable[Backend] = (), hertz: float | None = None) -> None:
        self._hands = [_Hand(backend) for backend in backends]
        if len({id(hand.backend) for hand in self._hands}) != len(self._hands):
            raise ArgumentError("backends must be named once")
        if hertz is not None and not 0 < hertz < float("inf"):
            raise ArgumentError(f"hertz must be above 0 and finite, not {hertz}")
        self.hertz = hertz if self._hands or hertz is not None else MODEL_HERTZ
        self._now = 0

    @property
    def now(self) -> int:
        """Cycle of the most advanced device, or of the model."""
        return max(self._now, *(hand.now for hand in self._hands), 0)

    @property
    def is_timed(self) -> bool:
        """Whether every device has a clock, so that cycles do not depend on the host's time."""
        return not any(hand.steps for hand in self._hands)

    @property
    def unit(self) -> str:
        """`cycles`, or `steps` if a device has no clock."""
        return "cycles" if self.is_timed else "steps"

    def cycles(self, seconds: float) -> int:
        """Convert seconds to the nearest number of cycles.

        Raises
        ------
        ArgumentError : the clock has devices and no `hertz`.
        """
        if self.hertz is None:
            raise ArgumentError("hertz must be given: modelled operations run beside a device")
        return round(seconds * self.hertz)

    def check(self, completion: Completion) -> None:
        """Raise `ArgumentError` unless work is on a device of this clock, or has ended."""
        if completion.backend is not None:
            self._hand(completion.backend)

    def level(self, in_flight: Sequence[Completion]) -> int:
        """Advance all devices to the same cycle, and return it."""
        return self._reach(self.now, in_flight)

    def after(self, begun: int, in_flight: Sequence[Completion]) -> None:
        """Advance all devices to the same cycle after commands of the host that began at `begun`,
        and whose times on several devices add up.

        Parameters
        ----------
        begun : from `level`.
        in_flight : work in flight before them.
        """
        self._reach(begun + sum(max(0, hand.now - begun) for hand in self._hands), in_flight)

    def _reach(self, cycle: int, in_flight: Sequence[Completion]) -> int:
        self._now = cycle
        busy = {id(each.backend) for each in in_flight}
        for hand in self._hands:
            hand.reach(cycle, busy=id(hand.backend) in busy)
        return cycle

    def advance(self, limit: int | None, in_flight: Sequence[Completion]) -> None:
        """Advance time until work may have ended, or to cycle `limit`, on several devices
        concurrently, by `nearstep.threads.at_once`.

        Parameters
        ----------
        in_flight : unfinished work. Without any, and without a limit, no time passes.
        """
        self.level(in_flight)
        busy = [hand for hand in self._hands if any(c.backend is hand.backend for c in in_flight)]
        if not busy:
            self._now = max(self._now, limit or 0)
            return
        left = None if limit is None else max(0, limit - self._now)
        if len(busy) > 1:
            left = QUANTUM_CYCLES if left is None else min(left, QUANTUM_CYCLES)
        if any(not each.polls and each.ended for each in in_flight):
            return  # such as a transfer that ended in the time of a command
        at_once(
            [
                partial(hand.advance, left, [c for c in in_flight if c.backend is hand.backend])
                for hand in busy
            ]
        )

    def _hand(self, backend: Backend) -> _Hand:
        for hand in self._hands:
            if hand.backend is backend:
                return hand
        raise ArgumentError(f"{backend!r} is no device of the clock")


_SLICE, _LONGEST = 1 << 20, 1 << 32
"""Cycles of one advance without another bound, and the most of any."""


class _Hand:
    """Time of one device."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.steps = backend.cycles is None
        self._counted = 0
        self._offset = -self._own

    @property
    def _own(self) -> int:
        cycles = self.backend.cycles
        return self._counted if cycles is None else cycles

    @property
    def now(self) -> int:
        return self._own + self._offset

    def reach(self, cycle: int, *, busy: bool) -> None:
        """Advance a working device to `cycle`, unless it is ahead."""
        behind = cycle - self.now
        if busy and not self.steps:
            while behind > 0:
                self.backend.advance(behind)
                behind = cycle - self.now
        elif behind > 0:
            self._offset += behind

    def advance(self, cycles: int | None, in_flight: Sequence[Completion]) -> None:
        """Advance until work may have ended, or for so many cycles."""
        bounds = [each.bound for each in in_flight]
        known = [each for each in bounds if each is not None]
        longest = max(known) + 1 if len(known) == len(bounds) else _SLICE
        most = min(longest if cycles is None else cycles, _LONGEST)
        polls = _polls(in_flight)
        self.backend.advance(most, polls)
        if self.steps:  # it does not report the number of cycles
            self._counted += min(most, 1) if self._met(polls, in_flight) else most

    def _met(self, polls: Sequence[Poll], in_flight: Sequence[Completion]) -> bool:
        """Whether work may have ended; ended work is not polled: a poll might start a run."""
        return any(poll.holds(self.backend.read_register(poll.address)) for poll in polls) or any(
            not each.polls and each.ended for each in in_flight
        )


def _polls(in_flight: Sequence[Completion]) -> list[Poll]:
    return [poll for each in in_flight for poll in each.polls]
