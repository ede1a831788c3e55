"""The code of a quotient."""

from amaranth import Cat, Const, Mux
from amaranth.hdl import Value

from nearstep_hw.fp.pipeline import Pipeline, Staged
from nearstep_spec.blockwise import CODES, thresholds
from nearstep_spec.fp import FP32

__all__ = ["DEPTH", "nearest"]

DEPTH = (CODES - 1).bit_length()
"""Latency in cycles, one a bit of the code."""


def nearest(pipe: Pipeline, quotient: Staged, *, signed: bool) -> Staged:
    """Return the code of a binary32 quotient: the number of thresholds not above it; 0 for a NaN.

    *Timing*: latency `DEPTH`, a quotient a cycle. A binary search: each stage compares with one
    threshold, selected by the bits found so far.
    """
    start = pipe.latest(quotient)
    edges = [_order(edge) for edge in thresholds(signed=signed)]
    x = pipe.at(quotient, start)
    nan = x[FP32.mantissa : FP32.width - 1].all() & x[: FP32.mantissa].any()
    order = pipe.wrap(Mux(nan, 0, Mux(x[-1], ~x, x | FP32.sign_bit)[: FP32.width]), start, "order")
    code: Staged | None = None
    for bit in reversed(range(DEPTH)):
        stage = start + DEPTH - 1 - bit
        known = pipe.at(code, stage) if code is not None else Const(0, 0)
        middles = [edges[(high << (bit + 1) | 1 << bit) - 1] for high in range(1 << len(known))]
        middle = _chosen(middles, known)
        passed = pipe.at(order, stage) >= middle
        code = pipe.wrap(Cat(passed, known), stage, f"code_{bit}")
    assert code is not None
    return pipe.delayed(code, start + DEPTH)


def _order(bits: int) -> int:
    """Map a binary32 pattern to an unsigned number of the same order."""
    mask = (1 << FP32.width) - 1
    return ~bits & mask if bits & FP32.sign_bit else bits | FP32.sign_bit


def _chosen(values: list[int], index: Value) -> Value:
    """Select one of some constants."""
    chosen: list[Value] = [Const(value, FP32.width) for value in values]
    for bit in index:
        chosen = [Mux(bit, high, low) for low, high in zip(chosen[::2], chosen[1::2], strict=True)]
    (value,) = chosen
    return value
