"""The buses that several ranks share: one command a clock, one burst of data at a time."""

import ctypes
from collections.abc import Sequence

from nearstep_sim.models.dram.device import DramViolationError, columns_of, violation_of
from nearstep_sim.models.dram.library import CTiming, CViolation, load
from nearstep_sim.models.dram.trace import TraceCommand
from nearstep_spec.dram.timing import RANK_SWITCH, DramTiming

__all__ = ["SharedBus"]


class SharedBus:
    """Checks the rules between the ranks of a channel; `Ddr4Device` checks those of each rank.

    Parameters
    ----------
    timing : of every rank.
    rank_switch : clocks between the data of two ranks.
    """

    def __init__(self, timing: DramTiming, rank_switch: int = RANK_SWITCH) -> None:
        self._library = load()
        self._handle: int = self._library.ddr4_bus_new(
            ctypes.byref(CTiming.of(timing)), rank_switch
        )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.ddr4_bus_free(self._handle)

    def play(self, commands: Sequence[TraceCommand]) -> tuple[DramViolationError, int] | None:
        """Check the next commands, in the order of time; return the first violation and its rank.

        Equal commands at one clock are one command to several ranks.
        """
        columns = columns_of(commands, "rank", "bank_group", "bank", "row", "column")
        found = CViolation()
        pointers = [array.ctypes.data for array in columns]
        good = self._library.ddr4_bus_play(
            self._handle, len(commands), *pointers, ctypes.byref(found)
        )
        return None if good == len(commands) else (violation_of(found), commands[good].rank)
