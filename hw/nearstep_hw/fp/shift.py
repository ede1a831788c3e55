"""Leading-zero counts and shifts that lose nothing a later rounding needs.

All are combinational, within one `Step` of a pipeline.
"""

from amaranth.hdl import Cat, Const, Mux, Value, ValueLike
from amaranth.utils import ceil_log2

from nearstep_hw.fp.pipeline import WORD_BITS, Step

__all__ = ["clip", "jam", "leading_zeros", "shift_left", "shift_right_jam"]


def leading_zeros(step: Step, x: ValueLike) -> Value:
    """Zeros above the highest set bit, by halving; any count of at least `len(x) - 1` for zero.

    Returns
    -------
    Value : unsigned, of `ceil_log2(len(x))` bits.
    """
    x = Value.cast(x)
    levels = ceil_log2(len(x))
    part = step.signal(f"zeros_of_{1 << levels}", Cat(Const(0, (1 << levels) - len(x)), x))
    bits = []
    for level in reversed(range(levels)):
        half = 1 << level
        empty = step.signal(f"empty_{half}", part[half:] == 0)
        part = step.signal(f"zeros_of_{half}", Mux(empty, part[:half], part[half:]))
        bits.append(empty)
    return Cat(*reversed(bits))


def shift_left(step: Step, x: Value, amount: Value) -> Value:
    """`x << amount` in the width of `x`.

    The operator `<<` widens by every bit that `amount` may shift. Places that would take it
    past a machine word are shifted one power of two at a time, which simulates faster.
    """
    width, bits = len(x), len(amount)
    while bits and width + (1 << bits) - 1 > max(WORD_BITS, width):
        bits -= 1
        moved = Cat(Const(0, 1 << bits), x)[:width]
        x = step.signal(f"raised_{1 << bits}", Mux(amount[bits], moved, x))
    return step.signal("raised", (x << amount[:bits])[:width])


def clip(step: Step, amount: Value, limit: int) -> Value:
    """The smaller of an unsigned `amount` and `limit`, in the bits that `limit` needs."""
    amount = step.signal("amount", amount)
    if limit >= (1 << len(amount)):
        return amount
    bits = limit.bit_length()
    return step.signal("clipped", Mux(amount > limit, limit, amount[:bits]))[:bits]


def shift_right_jam(step: Step, x: Value, amount: Value) -> Value:
    """`x >> amount` in the width of `x`; the lowest bit is set if any lost bit was.

    `amount` is at most `len(x)`, see `clip`.
    """
    width = len(x)
    mask = Const((1 << width) - 1, width) >> (width - amount)[: len(amount)]
    lost = step.signal("lost", x & mask)
    return step.signal("lowered", (x >> amount) | lost.any())


def jam(step: Step, x: Value, width: int) -> Value:
    """The top `width` bits of `x` (zeros appended if it is shorter).

    The lowest bit also gathers every bit below, so that a rounding at least two bits above it is
    exact.
    """
    if len(x) <= width:
        return Cat(Const(0, width - len(x)), x)
    x = step.signal("wide", x)
    below = len(x) - width
    return Cat(x[: below + 1].any(), x[below + 1 :])
