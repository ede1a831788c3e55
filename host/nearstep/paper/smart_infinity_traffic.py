"""Table I of the Smart-Infinity paper, counted from the operations of an iteration."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from nearstep.paper.smart_infinity_case import HALF_BYTES, CsdCase

PAGE_BYTES = 4096
"""Unit of a drive's reads and writes."""


class Traffic(NamedTuple):
    """Bytes a parameter over the host's link, in units of M, 2 bytes a parameter (Table I).

    Residuals of error feedback are not counted: the paper has none.

    Attributes
    ----------
    padding : additional bytes of whole pages of 4 KiB, in the same unit.
    """

    states_read: Fraction
    states_written: Fraction
    gradients_read: Fraction
    gradients_written: Fraction
    padding: Fraction


def traffic(case: CsdCase) -> Traffic:
    """Count the bytes that an iteration moves between host and drives."""
    counted: Counter[tuple[bool, int]] = Counter()
    padding = 0
    drives = case.machine.platform.drives
    for operation in case.graph:
        route = () if operation.transfer is None else operation.transfer.route
        if operation.transfer is None or not any(hop.link == "uplink" for hop in route):
            continue
        for hop in route:
            if hop.link in drives:
                counted["gradient" in operation.name, hop.direction] += operation.transfer.nbytes
                padding += -operation.transfer.nbytes % PAGE_BYTES
    unit = HALF_BYTES * case.elements
    return Traffic(
        states_read=Fraction(counted[False, 0], unit),
        states_written=Fraction(counted[False, 1], unit),
        gradients_read=Fraction(counted[True, 0], unit),
        gradients_written=Fraction(counted[True, 1], unit),
        padding=Fraction(padding, unit),
    )
