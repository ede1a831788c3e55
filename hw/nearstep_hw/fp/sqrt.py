"""Square root, by non-restoring radix-2 recurrence."""

from amaranth.hdl import Cat, Const, Mux

from nearstep_hw.fp.operand import unpack
from nearstep_hw.fp.pipeline import Parts, Pipeline, Staged
from nearstep_hw.fp.result import FpResult
from nearstep_hw.fp.round import round_pack, special
from nearstep_hw.fp.shift import leading_zeros, shift_left
from nearstep_spec.fp import FormatError, FpFormat

__all__ = ["default_depth", "sqrt"]

_STEPS_A_STAGE = 2


def default_depth(fmt: FpFormat) -> int:
    """Return the default latency in cycles: two root bits a stage, and three stages."""
    return 3 + -(-fmt.precision // _STEPS_A_STAGE)


def sqrt(
    pipe: Pipeline,
    fmt: FpFormat,
    a: Staged,
    *,
    depth: int | None = None,
    flags: bool = True,
) -> FpResult:
    """Square root of a, rounded once.

    The significand, normalised to an even exponent, is x in [1, 4). With q the root so far, of k
    bits after the point, and r = 2**k * (x - q**2), a step tries the next bit::

        r >= 0:  r = 2 * r - (2 * q + 2**-(k + 1))
        r < 0:   r = 2 * r + (2 * q + 3 * 2**-(k + 1))

    and the bit is 1 if the new r is not negative. Either way the low digits added are 11: those of
    -(2 * q + 2**-(k + 1)) are the complement of q's, then 11. So a step is one adder.

    *Timing*: latency `depth` (default: `default_depth`, 15 for binary32), one operation a
    cycle. Steps: count leading zeros, normalise, one a root bit after the first, round.

    *Numerics*: sqrt(-0) is -0; a negative operand is invalid. The root is never halfway between two
    numbers, so the guard bit alone decides the rounding. No overflow, no underflow.

    *Resources*: no multiplier.

    Raises
    ------
    FormatError : in the format the root of a subnormal number can be subnormal
        (`mantissa >= bias`).
    """
    if fmt.mantissa >= fmt.bias:
        raise FormatError(f"sqrt needs a mantissa of less than {fmt.bias} bits, not {fmt.mantissa}")
    depth = default_depth(fmt) if depth is None else depth
    start = pipe.latest(a)
    bits = fmt.precision
    costs = (
        Parts(1, (7, 5)),
        Parts(1, (3, 5)),
        *[Parts(1 / _STEPS_A_STAGE, (5,))] * bits,
        Parts(1, (6, 2, 4, 5)),
    )
    count, up, *recurrence, (left_over, *final) = pipe.steps(
        start, costs, depth, whole=default_depth(fmt)
    )
    recurrence = [step for (step,) in recurrence]

    at = count[0]
    x = unpack(fmt, at(a))
    negative = x.sign & ~x.zero & ~x.nan
    known = at.wrap(
        "known",
        special(
            nan=x.nan | negative,
            infinite=x.infinite,
            zero=x.zero,
            invalid=x.signalling | negative,
        ),
    )
    sign = at.wrap("sign", x.sign)
    significand = at.wrap("significand", x.significand)
    biased = at.wrap("biased", x.exponent + fmt.bias)
    zeros = leading_zeros(count, significand)

    normal = shift_left(up, significand, zeros)
    last = up[-1]
    twice = last.signal("twice", last(biased) - last(zeros))
    top = last.wrap("top", twice[1 : fmt.exponent + 1])
    normal = last(normal)
    radicand = Mux(twice[0], Cat(Const(0, 2), normal), Cat(Const(0, 1), normal))
    width = bits + 4
    remainder = last.wrap("remainder", (radicand - (1 << bits))[:width])
    root = last.wrap("root", Const(1, 1))

    for k, step in enumerate(recurrence):
        r, q = step(remainder), step(root)
        plus = step.signal("plus", ~r[-1])
        digits = Cat(Const(0, bits - k - 1), Const(3, 2), q ^ plus.replicate(len(q)))
        change = Cat(digits, plus.replicate(width - len(digits)))
        remainder = step.wrap(f"remainder_{k}", (Cat(Const(0, 1), r[:-1]) + change)[:width])
        root = step.wrap(f"root_{k}", Cat(~remainder.value[-1], q))

    q = left_over(root)
    r = left_over(remainder)
    left = left_over.signal("left", Mux(r[-1], r + Cat(1, q), r)[:width])
    guard = q[0]
    return round_pack(
        final,
        fmt,
        known=known,
        sign=sign,
        exponent=top,
        significand=left_over.wrap("significand", Cat(left.any(), guard, q)),
        until=start + depth,
        flags=flags,
    )
