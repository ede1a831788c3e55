"""Addition and subtraction."""

from amaranth.hdl import Cat, Const, Mux

from nearstep_hw.fp.operand import unpack
from nearstep_hw.fp.pipeline import Parts, Pipeline, Staged
from nearstep_hw.fp.result import FpResult
from nearstep_hw.fp.round import GUARD_BITS, count_leading_zeros, normalise, round_pack, special
from nearstep_hw.fp.shift import clip, shift_right_jam
from nearstep_spec.fp import FpFormat

__all__ = ["DEPTH", "add"]

_COSTS = (
    Parts(0.7, (4, 1)),
    Parts(1, (5, 3, 3, 4)),
    Parts(0.6, (4, 1)),
    Parts(1, (3, 6, 6)),
    Parts(0.6, (2, 4)),
    Parts(0.7, (2, 4, 5)),
)
DEPTH = 5
"""Default latency in cycles."""


def add(
    pipe: Pipeline,
    fmt: FpFormat,
    a: Staged,
    b: Staged,
    *,
    subtract: bool = False,
    depth: int = DEPTH,
    flags: bool = True,
) -> FpResult:
    """a + b, or a - b, rounded once.

    The operand of smaller magnitude is shifted down to the other's exponent. Three bits below the
    greater one, the last of them sticky, are enough: two operands more than one exponent apart
    cancel by one bit at most.

    *Timing*: latency `depth`, one operation a cycle. Steps: order, align, add, count leading
    zeros, shift, round; the last two share a stage at the default depth.

    *Numerics*: an exact zero sum of unlike signs is +0. A sum that is subnormal is exact.
    """
    start = pipe.latest(a, b)
    (order, swap), align, (total, choose), count, shift, final = pipe.steps(start, _COSTS, depth)
    subtract_exponents, limit_distance, *down = align

    x, y = order(a), order(b)
    if subtract:
        y = y ^ fmt.sign_bit
    swaps = order.wrap("swaps", y[: fmt.width - 1] > x[: fmt.width - 1])
    first, second = (order.wrap(name, value) for name, value in (("first", x), ("second", y)))
    large = swap.wrap("large", Mux(swap(swaps), swap(second), swap(first)))
    small = swap.wrap("small", Mux(swap(swaps), swap(first), swap(second)))

    step = subtract_exponents
    x, y = unpack(fmt, step(large)), unpack(fmt, step(small))
    unlike = x.sign ^ y.sign
    cancel = unlike & x.infinite & y.infinite
    known = step.wrap(
        "known",
        special(
            nan=x.nan | y.nan | cancel,
            infinite=x.infinite,
            invalid=x.signalling | y.signalling | cancel,
        ),
    )
    low = Const(0, GUARD_BITS)
    distance = step.wrap("distance", (x.exponent - y.exponent)[: fmt.exponent])
    upper = step.wrap("upper", x.significand)
    lower = step.wrap("lower", Cat(low, y.significand))
    limit = step.wrap("limit", x.exponent)
    top = step.wrap("top", x.exponent + 1)
    signs = step.wrap("signs", Cat(x.sign, unlike))
    clipped = clip(limit_distance, limit_distance(distance), fmt.precision + GUARD_BITS)
    distance = limit_distance.wrap("distance", clipped)
    lower = shift_right_jam(down, lower, distance)

    x, y = Cat(low, total(upper)), total(lower)
    difference = total.wrap("difference", (x - y)[: len(x) + 1])
    whole = total.wrap("whole", x + y)
    frame = Mux(choose(signs)[1], choose(difference), choose(whole))
    frame = choose.wrap("frame", frame)

    zeros = count_leading_zeros(count, frame, limit)
    at = count[0]
    cancelled = at(signs)[1] & (at(frame) == 0)
    sign = at.wrap("sign", at(signs)[0] & ~cancelled)

    exponent, significand = normalise(shift, fmt, frame, top, zeros)

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
