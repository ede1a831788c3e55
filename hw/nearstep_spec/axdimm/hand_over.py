"""Longest change of mode, as plain data: the bound of a driver's wait."""

from nearstep_spec.dram.geometry import RANKS
from nearstep_spec.dram.latency import LOOKAHEAD, PHASES
from nearstep_spec.dram.timing import (
    MAX_POSTPONED_REFRESHES,
    PARTS,
    DramTiming,
    dram_timing,
)

__all__ = [
    "HAND_OVER_CYCLES",
    "HURRY_CYCLES",
    "PATIENCE",
    "longest_to_acceleration",
    "longest_to_normal",
]

PATIENCE = 255  # cycles in which the host's rows are opened, while the host opens others
HURRY_CYCLES = 64  # beside tRFC or tZQoper: a hand-over and the controller's first refresh
HOLD_INTERVALS = 2  # tREFI in which the mode does not become normal, see `RefreshDebt.o_hold`
REGISTERS = 16  # cycles from the register bank to the pins, and back to the status


def _cycles(clocks: int) -> int:
    """Fabric cycles of a distance, for any phases of its ends."""
    return -(-(clocks + PHASES - 1) // PHASES)


def _close(timing: DramTiming) -> int:
    return _cycles(timing.write_to_precharge) + _cycles(timing.t_rp) + 2


def longest_to_acceleration(timing: DramTiming, *, ranks: int = 1) -> int:
    """Most cycles from the request to acceleration mode.

    If the DRAM is due for refresh, the host refreshes first. With seven refreshes due and a host
    that postpones eight, this takes two tREFI, and the same again for the other rank if the host
    then issues at least four to the first rank; then follow tRFC and a precharge of all banks. A
    host that issues one refresh at a time, with seven or eight due, keeps the channel.
    """
    wait = 2 * ranks * timing.t_refi // PHASES
    return wait + HURRY_CYCLES + _cycles(timing.t_rfc) + _close(timing) + REGISTERS


def longest_to_normal(timing: DramTiming, *, restless: bool = True) -> int:
    """Most cycles from the request to normal mode.

    The terms, in order: every beat in the controller misses a row of one bank; refreshes, with
    eight due to the DRAM and eight pulled in by the host, and those that become due in the
    meantime; two tREFI in which the refresh rate is limited; a calibration, and another one by the
    host in the meantime; opening of the host's rows. A host that is never idle (`restless`) gets
    the channel at its next refresh, at most nine tREFI later.
    """
    interval = timing.t_refi // PHASES
    beats = LOOKAHEAD * sum(
        _cycles(each) for each in (timing.write_to_precharge, timing.t_rp, timing.t_rcd)
    )
    refresh = _cycles(timing.t_rfc) + _close(timing)
    hold = HOLD_INTERVALS * interval + 2 * (_cycles(timing.t_zqoper) + _close(timing))
    due = 2 * MAX_POSTPONED_REFRESHES + 1
    before = beats + due * refresh + hold + PATIENCE
    due += -(-before // (interval - refresh))
    longest = beats + due * refresh + hold + PATIENCE + _close(timing) + REGISTERS
    if restless:
        longest += (MAX_POSTPONED_REFRESHES + 1) * interval
    return longest


HAND_OVER_CYCLES = max(
    longest_to_acceleration(timing, ranks=max(RANKS)) + longest_to_normal(timing)
    for density, width in PARTS
    for timing in [dram_timing("DDR4-1600", density, width)]
)
"""Bound for any change of mode of any part: a change completes before the opposite one begins, so a
request may have to wait for both.
"""
