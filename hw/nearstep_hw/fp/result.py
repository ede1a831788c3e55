"""Result of a floating-point operation."""

from dataclasses import dataclass

from nearstep_hw.fp.pipeline import Staged

__all__ = ["FpResult"]


@dataclass(frozen=True, eq=False)
class FpResult:
    """Result of an operation in a pipeline.

    Attributes
    ----------
    z : pattern of the result, in the result's format.
    flags : 5 bits, from bit 0 inexact, underflow, overflow, divide by zero, invalid; at the stage
        of `z`; None when the operation was built without flags.
    """

    z: Staged
    flags: Staged | None
