"""Fused multiply-add."""

from amaranth.hdl import Cat, Const, Mux

from nearstep_hw.fp.multiply import product
from nearstep_hw.fp.operand import unpack
from nearstep_hw.fp.pipeline import Parts, Pipeline, Staged
from nearstep_hw.fp.result import FpResult
from nearstep_hw.fp.round import count_leading_zeros, normalise, round_pack, special
from nearstep_hw.fp.shift import clip, shift_right_jam
from nearstep_spec.fp import FpFormat

__all__ = ["DEPTH", "fma"]

_COSTS = (
    Parts(1, (3, 6)),
    Parts(0.8, (4, 6)),
    Parts(1, (4, 4)),
    Parts(1, (5, 2)),
    Parts(1, (3, 4, 5, 5)),
    Parts(0.8, (2, 4)),
    Parts(0.8, (2, 4, 5)),
)
DEPTH = len(_COSTS)
"""Default latency in cycles."""

_SPARE_BITS = 4
"""Bits below the double-width product, see `fma`."""


def fma(
    pipe: Pipeline,
    fmt: FpFormat,
    a: Staged,
    b: Staged,
    c: Staged,
    *,
    depth: int = DEPTH,
    flags: bool = True,
) -> FpResult:
    """a * b + c, rounded once.

    Product and addend are aligned in a frame of `2 * precision + 4` bits; the one with the smaller
    exponent is shifted down, the lowest bit sticky. Nothing is normalised before the sum. The frame
    is wide enough:

    - An addend that loses bits is at least `precision + 5` places down. If the product has
    leading
      zeros (at most `precision`: one operand is subnormal), their difference still leads by
      `precision + 3` bits above the sticky one. (A product of zero gets the least exponent.)
    - A product that loses bits is at least 5 places below an addend that is either normal, and
      cancels by one bit at most, or has the least exponent, below which nothing is normalised.

    *Timing*: latency `depth`, one operation a cycle. Steps: partial products, their sum, align,
    add, count leading zeros, shift, round.

    *Numerics*: an exact zero sum of unlike signs is +0. 0 x inf raises invalid, also with a NaN
    addend.

    *Resources*: two DSP48E2 for binary32.
    """
    start = pipe.latest(a, b, c)
    steps = pipe.steps(start, _COSTS, depth)
    multiply, total, align, (combine, choose), count, shift, final = steps

    x, y, z = (unpack(fmt, multiply[0](operand)) for operand in (a, b, c))
    exact = product((*multiply, *total), fmt, x, y)
    unlike = x.sign ^ y.sign ^ z.sign
    infinite_product = (x.infinite & ~y.nan) | (y.infinite & ~x.nan)
    undefined = (x.infinite & y.zero) | (x.zero & y.infinite)
    cancel = infinite_product & z.infinite & unlike
    invalid = x.signalling | y.signalling | z.signalling | undefined | cancel
    known = multiply[0].wrap(
        "known",
        special(
            nan=x.nan | y.nan | z.nan | invalid,
            infinite=infinite_product | z.infinite,
            invalid=invalid,
        ),
    )
    # Both terms get the sign of an infinite operand, and so does the sum.
    product_sign = Mux(z.infinite & ~infinite_product, z.sign, exact.sign)
    addend_sign = Mux(infinite_product, exact.sign, z.sign)
    terms = multiply[0].wrap("terms", Cat(product_sign, addend_sign))
    exponent = multiply[0].wrap("product_exponent", Mux(x.zero | y.zero, 1, exact.exponent))

    width = 2 * fmt.precision + _SPARE_BITS
    compare, limit_distance = total
    z = unpack(fmt, compare(c))
    addend = compare.wrap("addend", z.significand)
    ahead = compare.wrap("ahead", z.exponent - compare(exponent))
    other = compare.wrap("addend_exponent", z.exponent)
    ahead_now, step = limit_distance(ahead), limit_distance
    addend_first = step.wrap("addend_first", ahead_now >= 0)
    distance = Mux(ahead_now >= 0, ahead_now, -ahead_now)[: len(ahead_now) - 1]
    distance = step.wrap("distance", clip(step, distance, width))
    limit = Mux(ahead_now >= 0, step(other), step(exponent))[: fmt.exponent + 1]
    limit = step.wrap("limit", limit)

    at = align[0]
    whole = Cat(Const(0, _SPARE_BITS), at(exact.significand))
    part = Cat(Const(0, width - fmt.precision), at(addend))
    first = at(addend_first)
    upper = at.wrap("upper", Mux(first, part, whole))
    moved = at.wrap("moved", Mux(first, whole, part))
    lower = shift_right_jam(align, moved, distance)
    product_sign, addend_sign = at(terms)
    sign = Mux(first, addend_sign, product_sign)
    signs = at.wrap("signs", Cat(sign, product_sign ^ addend_sign))
    top = at.wrap("top", (at(limit) + 1)[: fmt.exponent + 1])

    u, v = combine(upper), combine(lower)
    negative = combine.wrap("negative", u < v)
    down = combine.wrap("product_first", (u - v)[:width])
    up = combine.wrap("addend_first", (v - u)[:width])
    both = combine.wrap("both", u + v)
    equal = combine.wrap("equal", u == v)
    subtracts, reverse = choose(signs)[1], choose(negative)
    difference = Mux(reverse, choose(up), choose(down))
    frame = choose.wrap("frame", Mux(subtracts, difference, choose(both))[: width + 1])
    cancelled = subtracts & choose(equal)
    sign = choose.wrap("sign", (choose(signs)[0] ^ (subtracts & reverse)) & ~cancelled)

    zeros = count_leading_zeros(count, frame, limit)

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
