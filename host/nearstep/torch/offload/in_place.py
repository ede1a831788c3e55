"""What the compute device gets at where it is, in the memory of the host (direct access)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class InPlace:
    """Of a parameter.

    What is in place is not fetched, takes nothing of the budget, and in a recording goes over the
    link while it is computed with.

    Attributes
    ----------
    forward, backward : the parameter is read in place in this part of an iteration; not in
        backward alone.
    gradient : backward writes the gradient to the host.
    """

    forward: bool = False
    backward: bool = False
    gradient: bool = False


NOTHING = InPlace()
