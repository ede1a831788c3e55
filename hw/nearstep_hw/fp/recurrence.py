"""The step that division and square root have in common."""

from amaranth.hdl import Cat, Const, Mux, Value

__all__ = ["add_or_subtract", "upper_aligned"]

WORD_BITS = 32
"""Remainders of fewer bits are put at the top of a word of so many, in which arithmetic wraps by
itself; zeros below them cost nothing in hardware, masks above them much in simulation."""


def upper_aligned(x: Value, width: int) -> Value:
    """The low ``width`` bits of ``x``, with zeros below them to fill a word."""
    below = max(0, WORD_BITS - width)
    return Cat(Const(0, below), x, Const(0, width))[: width + below]


def add_or_subtract(remainder: Value, change: Value) -> Value:
    """``2 * remainder - change``, or ``+ change`` if ``remainder`` is negative; in its width."""
    width = len(remainder)
    doubled = Cat(Const(0, 1), remainder)[:width]
    plus, minus = (doubled + change)[:width], (doubled - change)[:width]
    return Mux(remainder[-1], plus, minus)
