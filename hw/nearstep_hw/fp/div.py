"""Division, by non-restoring radix-2 recurrence."""

from amaranth.hdl import Cat, Const, Mux

from nearstep_hw.fp.operand import unpack
from nearstep_hw.fp.pipeline import Parts, Pipeline, Staged
from nearstep_hw.fp.result import FpResult
from nearstep_hw.fp.round import GUARD_BITS, round_pack, special
from nearstep_hw.fp.shift import clip_below_one, leading_zeros, shift_left, shift_right_jam
from nearstep_spec.fp import FpFormat

__all__ = ["default_depth", "div", "quotient_bits"]

_STEPS_A_STAGE = 2


def quotient_bits(fmt: FpFormat) -> int:
    """Return the bits of the quotient of significands in [1, 2): one integer bit, then as many as
    leave a guard bit below a quotient in (1/2, 1)."""
    return fmt.precision + 2


def default_depth(fmt: FpFormat) -> int:
    """Return the default latency in cycles: two quotient bits a stage, and four stages."""
    return 4 + -(-quotient_bits(fmt) // _STEPS_A_STAGE)


def div(
    pipe: Pipeline,
    fmt: FpFormat,
    a: Staged,
    b: Staged,
    *,
    depth: int | None = None,
    flags: bool = True,
) -> FpResult:
    """a / b, rounded once.

    Both significands are normalised. Each step of the recurrence adds or subtracts the divisor, by
    the sign of the remainder, and yields a quotient bit; the remainder left over is only compared
    with zero. The negated divisor is pipelined too, so that a step is one adder.

    *Timing*: latency `depth` (default: `default_depth`, 17 for binary32), one operation a cycle.
    Steps: count leading zeros, normalise, one a quotient bit, denormalise, round.

    *Numerics*: x / 0 is infinite and raises divide by zero for finite x other than 0.

    *Resources*: no multiplier.
    """
    depth = default_depth(fmt) if depth is None else depth
    start = pipe.latest(a, b)
    bits = quotient_bits(fmt)
    costs = (
        Parts(1, (7, 5)),
        Parts(1, (3, 4)),
        *[Parts(1 / _STEPS_A_STAGE, (5,))] * bits,
        Parts(1, (6, 5, 3, 3)),
        Parts(1, (2, 4, 5)),
    )
    count, up, *recurrence, place, final = pipe.steps(start, costs, depth, whole=default_depth(fmt))
    recurrence = [step for (step,) in recurrence]
    at = count[0]

    x, y = unpack(fmt, at(a)), unpack(fmt, at(b))
    undefined = (x.zero & y.zero) | (x.infinite & y.infinite)
    invalid = x.signalling | y.signalling | undefined
    known = at.wrap(
        "known",
        special(
            nan=x.nan | y.nan | invalid,
            infinite=x.infinite | y.zero,
            zero=x.zero | y.infinite,
            invalid=invalid,
            divide_by_zero=y.zero & ~(x.zero | x.infinite | x.nan),
        ),
    )
    sign = at.wrap("sign", x.sign ^ y.sign)
    x_significand = at.wrap("x_significand", x.significand)
    y_significand = at.wrap("y_significand", y.significand)
    exponents = at.wrap("exponents", x.exponent - y.exponent + fmt.bias)
    x_zeros = leading_zeros(count, x_significand)
    y_zeros = leading_zeros(count, y_significand)

    width = fmt.precision + 1
    dividend = shift_left(up, x_significand, x_zeros)
    divisor = shift_left(up, y_significand, y_zeros)
    last = up[-1]
    top = last.wrap("top", last(exponents) - last(x_zeros) + last(y_zeros))

    first = recurrence[0]
    negated = first.wrap("negated", (-first(divisor))[:width])
    remainder = first.wrap("remainder_0", (first(dividend) + first(negated))[:width])
    quotient = first.wrap("quotient_0", ~remainder.value[-1])
    for k, step in enumerate(recurrence[1:], start=1):
        r = step(remainder)
        change = Mux(r[-1], step(divisor), step(negated))
        remainder = step.wrap(f"remainder_{k}", (Cat(Const(0, 1), r[:-1]) + change)[:width])
        quotient = step.wrap(f"quotient_{k}", Cat(~remainder.value[-1], step(quotient)))

    left_over, limit_distance, *down = place
    r = left_over(remainder)
    left = left_over.signal("left", Mux(r[-1], r + left_over(divisor), r)[:width])
    q = left_over(quotient)
    whole = q[-1]
    raised = Cat(left.any(), Mux(whole, q, Cat(Const(0, 1), q[:-1])))
    assert len(raised) == fmt.precision + GUARD_BITS
    raised = left_over.wrap("quotient", raised)
    unlimited = left_over.wrap("unlimited", left_over(top) - ~whole)
    exponent = limit_distance(unlimited)
    below, distance = clip_below_one(limit_distance, exponent, len(raised.value))
    distance = limit_distance.wrap("down", distance)
    exponent = limit_distance.wrap("exponent", Mux(below, 1, exponent)[: len(exponent) - 1])
    significand = shift_right_jam(down, raised, distance)

    return round_pack(
        final,
        fmt,
        known=known,
        sign=sign,
        exponent=exponent,
        significand=significand,
        until=start + depth,
        flags=flags,
    )
