"""Leading-zero counts and shifts that lose nothing a later rounding needs.

Functions that take several steps divide their work among them.
"""

from collections.abc import Sequence

from amaranth.hdl import Cat, Const, Mux, Value
from amaranth.utils import ceil_log2

from nearstep_hw.fp.pipeline import WORD_BITS, Staged, Step, spread

__all__ = ["clip", "clip_below_one", "jam", "leading_zeros", "shift_left", "shift_right_jam"]


def leading_zeros(steps: Sequence[Step], x: Staged) -> Staged:
    """Count the zeros above the highest set bit by halving; at least `len(x) - 1` for zero.

    Returns
    -------
    Staged : unsigned, of `ceil_log2(len(x))` bits, at the last step that is used.
    """
    width = len(x.value)
    levels = ceil_log2(width)
    halves = [1 << level for level in reversed(range(levels))]
    # Levels of gates: a tree that tests a half, and a multiplexer.
    places = spread(steps, [1 + (half - 1).bit_length() / 2 for half in halves])
    first = places[0]
    part = first.wrap(f"zeros_of_{1 << levels}", Cat(Const(0, (1 << levels) - width), first(x)))
    bits = []
    for half, step in zip(halves, places, strict=True):
        whole = step(part)
        empty = step.wrap(f"empty_{half}", whole[half:] == 0)
        part = step.wrap(f"zeros_of_{half}", Mux(empty.value, whole[:half], whole[half:]))
        bits.append(empty)
    last = places[-1]
    return last.wrap("zeros", Cat(last(bit) for bit in reversed(bits)))


def shift_left(steps: Sequence[Step], x: Staged, amount: Staged) -> Staged:
    """Return `x << amount` in the width of `x`.

    In one step: the operator `<<` widens its result by the largest shift. Shifts that would exceed
    a machine word are made one power of two at a time, which simulates faster.
    """
    width, bits = len(x.value), len(amount.value)
    step, whole = steps[-1], steps[0].stage == steps[-1].stage
    places = dict(zip(reversed(range(bits)), spread(steps, [1.0] * bits), strict=True))
    while bits and (not whole or width + (1 << bits) - 1 > max(WORD_BITS, width)):
        bits -= 1
        place = places[bits]
        moved = Cat(Const(0, 1 << bits), place(x))[:width]
        x = place.wrap(f"raised_{1 << bits}", Mux(place(amount)[bits], moved, place(x)))
    return step.wrap("raised", (step(x) << step(amount)[:bits])[:width]) if bits else x


def clip(step: Step, amount: Value, limit: int) -> Value:
    """Return the smaller of an unsigned `amount` and `limit`, at most as wide as `limit`."""
    amount = step.signal("amount", amount)
    if limit >= (1 << len(amount)):
        return amount
    bits = limit.bit_length()
    return step.signal("clipped", Mux(amount > limit, limit, amount[:bits]))[:bits]


def clip_below_one(step: Step, exponent: Value, limit: int) -> tuple[Value, Value]:
    """Return whether a signed `exponent` is below 1, and by how much, clipped to `limit`; else 0.

    The comparisons and the difference are parallel.
    """
    bits = limit.bit_length()
    below = step.signal("below", exponent < 1)
    far = step.signal("far", exponent < 1 - limit)
    near = step.signal("near", (1 - exponent)[:bits])
    return below, Mux(below, Mux(far, limit, near), 0)[:bits]


def shift_right_jam(steps: Sequence[Step], x: Staged, amount: Staged) -> Staged:
    """Return `x >> amount` in the width of `x`, with the lost bits ORed into the lowest bit.

    `amount` is at most `len(x)`, see `clip`.
    """
    width, bits = len(x.value), len(amount.value)
    step = steps[-1]
    if steps[0].stage == step.stage:
        mask = Const((1 << width) - 1, width) >> (width - step(amount))[:bits]
        lost = step.signal("lost", step(x) & mask).any()
        return step.wrap("lowered", (step(x) >> step(amount)) | lost)
    for bit, place in zip(reversed(range(bits)), spread(steps, [1.0] * bits), strict=True):
        value, shifts, reach = place(x), place(amount)[bit], min(1 << bit, width)
        moved = Cat(value[reach:], Const(0, reach))
        # Lost bits are ORed into the lowest bit, which the next shift loses and ORs again.
        x = place.wrap(
            f"lowered_{1 << bit}",
            Mux(shifts, Cat(moved[0] | value[:reach].any(), moved[1:]), value),
        )
    return step.wrap("lowered", step(x))


def jam(step: Step, x: Value, width: int) -> Value:
    """Return the top `width` bits of `x`, or `x` with zeros appended if it is shorter.

    Lower bits are ORed into the lowest bit, so that a rounding at least two bits above it is exact.
    """
    if len(x) <= width:
        return Cat(Const(0, width - len(x)), x)
    x = step.signal("wide", x)
    below = len(x) - width
    return Cat(x[: below + 1].any(), x[below + 1 :])
