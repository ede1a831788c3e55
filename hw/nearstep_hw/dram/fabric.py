"""Distances between commands in fabric cycles."""

from dataclasses import dataclass

from nearstep_hw.dram.dfi import ACTIVATE_PHASE, COLUMN_PHASE, PHASES, PRECHARGE_PHASE
from nearstep_spec.dram.timing import DramTiming

__all__ = ["ACTIVATES_IN_WINDOW", "REFRESH_PHASE", "FabricTiming"]

REFRESH_PHASE = ACTIVATE_PHASE  # so that tRFC is not rounded up a second time
ACTIVATES_IN_WINDOW = 4  # the four of tFAW


def cycles(clocks: int, first: int, second: int) -> int:
    """Return the least fabric cycles from a command in phase `first` to one in phase `second`, at
    least `clocks` later."""
    return -(-(clocks + first - second) // PHASES)


@dataclass(frozen=True)
class FabricTiming:
    """Least distances of the commands of a controller, in fabric cycles.

    Every kind of command has one phase (see `dfi`), so a distance in nCK becomes one in cycles.
    A distance of 1 costs nothing: there is one command of a kind a cycle.

    Parameters
    ----------
    timing : distances in nCK.
    """

    timing: DramTiming

    @property
    def activate_to_column(self) -> int:
        """tRCD."""
        return cycles(self.timing.t_rcd, ACTIVATE_PHASE, COLUMN_PHASE)

    @property
    def activate_to_precharge(self) -> int:
        """tRAS, and the excess of tRC over tRAS + tRP."""
        t_ras = cycles(self.timing.t_ras, ACTIVATE_PHASE, PRECHARGE_PHASE)
        t_rc = cycles(self.timing.t_rc, ACTIVATE_PHASE, ACTIVATE_PHASE)
        return max(t_ras, t_rc - self.precharge_to_activate)

    @property
    def activate_to_activate_same_group(self) -> int:
        """tRRD_L."""
        return cycles(self.timing.t_rrd_l, ACTIVATE_PHASE, ACTIVATE_PHASE)

    @property
    def activate_to_activate(self) -> int:
        """tRRD_S."""
        return cycles(self.timing.t_rrd_s, ACTIVATE_PHASE, ACTIVATE_PHASE)

    @property
    def four_activates(self) -> int:
        """tFAW."""
        return cycles(self.timing.t_faw, ACTIVATE_PHASE, ACTIVATE_PHASE)

    @property
    def precharge_to_activate(self) -> int:
        """tRP."""
        return cycles(self.timing.t_rp, PRECHARGE_PHASE, ACTIVATE_PHASE)

    @property
    def precharge_to_refresh(self) -> int:
        """tRP."""
        return cycles(self.timing.t_rp, PRECHARGE_PHASE, REFRESH_PHASE)

    @property
    def read_to_precharge(self) -> int:
        """tRTP."""
        return cycles(self.timing.t_rtp, COLUMN_PHASE, PRECHARGE_PHASE)

    @property
    def write_to_precharge(self) -> int:
        """CWL + BL/2 + tWR."""
        return cycles(self.timing.write_to_precharge, COLUMN_PHASE, PRECHARGE_PHASE)

    @property
    def column_to_column_same_group(self) -> int:
        """tCCD_L. (tCCD_S is one cycle.)"""
        return cycles(self.timing.t_ccd_l, COLUMN_PHASE, COLUMN_PHASE)

    @property
    def read_to_write(self) -> int:
        """CL + BL/2 + 2 - CWL."""
        return cycles(self.timing.read_to_write, COLUMN_PHASE, COLUMN_PHASE)

    @property
    def write_to_read(self) -> int:
        """CWL + BL/2 + tWTR_S."""
        return cycles(self.timing.write_to_read_s, COLUMN_PHASE, COLUMN_PHASE)

    @property
    def write_to_read_same_group(self) -> int:
        """CWL + BL/2 + tWTR_L."""
        return cycles(self.timing.write_to_read_l, COLUMN_PHASE, COLUMN_PHASE)

    @property
    def column_to_column_other_rank(self) -> int:
        """BL/2 + tRTRS."""
        return cycles(self.timing.column_to_column_other_rank, COLUMN_PHASE, COLUMN_PHASE)

    @property
    def read_to_write_other_rank(self) -> int:
        """CL + BL/2 + tRTRS - CWL."""
        return cycles(self.timing.read_to_write_other_rank, COLUMN_PHASE, COLUMN_PHASE)

    @property
    def write_to_read_other_rank(self) -> int:
        """CWL + BL/2 + tRTRS - CL."""
        return cycles(self.timing.write_to_read_other_rank, COLUMN_PHASE, COLUMN_PHASE)

    @property
    def refresh_cycle(self) -> int:
        """tRFC, to the next refresh or activate."""
        return cycles(self.timing.t_rfc, REFRESH_PHASE, ACTIVATE_PHASE)

    @property
    def calibration(self) -> int:
        """tZQCS, to the next refresh or activate."""
        return cycles(self.timing.t_zqcs, REFRESH_PHASE, ACTIVATE_PHASE)

    @property
    def long_calibration(self) -> int:
        """tZQoper, to the next refresh or activate."""
        return cycles(self.timing.t_zqoper, REFRESH_PHASE, ACTIVATE_PHASE)

    @property
    def calibration_interval(self) -> int:
        """Longest time between two ZQCS, rounded down."""
        return self.timing.calibration_interval // PHASES

    @property
    def refresh_interval(self) -> int:
        """tREFI, rounded down."""
        return self.timing.t_refi // PHASES
