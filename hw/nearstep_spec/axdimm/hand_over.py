"""How long a change of mode may take, as plain data: the bound that a driver waits for."""

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

PATIENCE = 255  # cycles in which the host's rows are opened for it, while it goes on opening others
HURRY_CYCLES = 64  # beside tRFC or tZQoper: a hand-over and the controller's first refresh
HOLD_INTERVALS = 2  # tREFI in which the mode does not become normal, see `RefreshDebt.o_hold`
REGISTERS = 16  # cycles from the register bank to the pins, and back to the status


def _cycles(clocks: int) -> int:
    """Fabric cycles of a distance, whatever the phases of its ends."""
    return -(-(clocks + PHASES - 1) // PHASES)


def _close(timing: DramTiming) -> int:
    return _cycles(timing.write_to_precharge) + _cycles(timing.t_rp) + 2


def longest_to_acceleration(timing: DramTiming, *, ranks: int = 1) -> int:
    """Most cycles from the request to acceleration mode.

    If the DRAM must be refreshed soon the host's refresh comes first, and with seven due to a host
    that postpones eight that takes two tREFI, and as long for the other rank if the host gives the
    first at least four then; then tRFC, and all banks are precharged. A host that goes on giving
    one at a time, with seven or eight due, keeps the channel.
    """
    wait = 2 * ranks * timing.t_refi // PHASES
    return wait + HURRY_CYCLES + _cycles(timing.t_rfc) + _close(timing) + REGISTERS


def longest_to_normal(timing: DramTiming, *, restless: bool = True) -> int:
    """Most cycles from the request to normal mode.

    In this order: every beat in the controller misses a row of one bank; the DRAM, that eight are
    due to, follows a host that has pulled in eight, and whatever falls due meanwhile; two tREFI in
    which the rate of refreshes is kept; a calibration, and one that the host gives meanwhile; the
    host's rows are opened. A host that never rests
    (`restless`) is given the channel at its next refresh, nine tREFI later at most.
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
"""Bound for any change of mode of any part: a mode is reached before the change to the other
begins, so a request may have to wait for both."""
