"""Runs of the kernels, each waited for and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from nearstep.run import Run
from nearstep.torch.traffic import Traffic
from nearstep.updater.accelerated import AcceleratedRuns
from nearstep.updater.device import KernelDevice

AnyRun = TypeVar("AnyRun", bound=Run)


class Launcher:
    """Starts runs and waits for them.

    Parameters
    ----------
    traffic : time and cycles are added to it.
    max_cycles : bound on each run.
    """

    def __init__(self, traffic: Traffic, max_cycles: int | None) -> None:
        self._traffic = traffic
        self._max_cycles = max_cycles

    def together(
        self, starts: Iterable[Callable[[], AnyRun]], started: list[Run] | None = None
    ) -> list[AnyRun]:
        """Start runs, one a channel, and wait for all; adds each to `started` at its start.

        Raises
        ------
        DeviceError : those that run have been aborted.
        """
        runs: list[AnyRun] = []
        begun = time.perf_counter()
        try:
            for start in starts:
                runs.append(start())
                if started is not None:
                    started.append(runs[-1])
            for run in runs:
                run.wait(self._max_cycles)
        except BaseException:
            for run in runs:
                run.abort()  # so that the device is idle: it may have other users
            raise
        self._traffic.run_seconds += time.perf_counter() - begun
        cycles = [run.cycles for run in runs if run.cycles is not None]
        if cycles:
            self._traffic.cycles = (self._traffic.cycles or 0) + max(cycles)
        return runs


class Accelerator:
    """Starts runs as operations of a graph, each channel by itself.

    Parameters
    ----------
    device
    traffic : time is added to it.
    max_cycles : bound on each run.
    """

    def __init__(self, device: KernelDevice, traffic: Traffic, max_cycles: int | None) -> None:
        self._device = device
        self._traffic = traffic
        self._max_cycles = max_cycles
        self._working = 0
        self._begun = 0.0

    def begin(self, channel: int, starts: Sequence[Callable[[], Run]]) -> AcceleratedRuns:
        """Give a channel to its kernel for some runs, one after the other.

        Raises
        ------
        ArgumentError, ModeError, BusyError, DeviceError : the channel is the host's.
        """
        first, *others = starts
        with ExitStack() as inside:
            inside.enter_context(self._timed())
            inside.enter_context(self._device.acceleration(channel))
            return AcceleratedRuns(first(), others, inside.pop_all(), self._max_cycles)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Time in which a channel works counts once, however many do."""
        if not self._working:
            self._begun = time.perf_counter()
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._traffic.run_seconds += time.perf_counter() - self._begun
