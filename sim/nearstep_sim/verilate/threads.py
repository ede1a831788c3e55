"""How many threads simulate at once."""

from __future__ import annotations

import os

from nearstep.errors import ArgumentError

VARIABLE = "NEARSTEP_THREADS"
"""Environment variable with the number of threads that simulate parts which do not touch each
other; without it as many as this process has cores. Bits and cycles do not depend on it."""


def simulation_threads() -> int:
    """Threads for the parts of a simulation, at most.

    Raises
    ------
    ArgumentError
        The variable is no whole number from 1 to 1024.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        return len(os.sched_getaffinity(0))
    if not given.isascii() or not given.isdecimal() or not 1 <= int(given) <= 1024:
        raise ArgumentError(f"{VARIABLE} must be a whole number from 1 to 1024, not {given!r}")
    return int(given)
