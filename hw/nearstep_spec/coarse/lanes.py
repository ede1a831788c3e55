"""Pins of a COARSE link between two boards, as plain data."""

from nearstep_spec.coarse.config import FRAME_PHITS, PHIT_BYTES

__all__ = ["LANES", "PHIT_CYCLES", "PINS", "TRANSFERS", "TRANSFER_CYCLES", "round_trip_cycles"]

LANES = 8
"""Data pins in each direction."""

PINS = 2 + LANES
"""In each direction: strobe, first, data."""

TRANSFERS = 1 + PHIT_BYTES * 8 // LANES
"""Transfers of a phit: its data, and the marks of the beginning and the end of a frame."""

TRANSFER_CYCLES = 4
"""Cycles of a transfer: the receiver samples each level several times with its own clock."""

PHIT_CYCLES = TRANSFERS * TRANSFER_CYCLES


def round_trip_cycles(entry_phits: int) -> int:
    """Most cycles until the acknowledgement of an entry if nothing is lost: three of the longest
    frames, and the round trip of a phit.
    """
    return (3 * (entry_phits + FRAME_PHITS) + 2) * PHIT_CYCLES
