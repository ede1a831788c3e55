"""Runs of the kernels: on all channels at once, each waited for and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from nearstep.run import Run
from nearstep.torch.traffic import Traffic

AnyRun = TypeVar("AnyRun", bound=Run)


class Launcher:
    """Starts runs and waits for them.

    Parameters
    ----------
    traffic: Traffic
        Time and cycles are added to it.
    max_cycles: int | None
        Bound on each run.
    """

    def __init__(self, traffic: Traffic, max_cycles: int | None) -> None:
        self._traffic = traffic
        self._max_cycles = max_cycles

    def together(
        self, starts: Iterable[Callable[[], AnyRun]], started: list[Run] | None = None
    ) -> list[AnyRun]:
        """Start runs, one a channel, and wait for all; adds each to ``started`` at its start.

        Raises
        ------
        DeviceError
            Those that run have been aborted.
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
