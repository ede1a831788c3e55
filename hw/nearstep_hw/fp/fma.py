"""Fused multiply-add."""

from amaranth.hdl import Cat, Const, Mux

from nearstep_hw.fp.multiply import product
from nearstep_hw.fp.operand import unpack
from nearstep_hw.fp.pipeline import Pipeline, Staged
from nearstep_hw.fp.result import FpResult
from nearstep_hw.fp.round import count_leading_zeros, normalise, round_pack, special
from nearstep_hw.fp.shift import clip, shift_right_jam
from nearstep_spec.fp import FpFormat

__all__ = ["DEPTH", "fma"]

_COSTS = (1, 0.8, 1, 1, 1, 0.8, 0.8)
DEPTH = len(_COSTS)
"""Latency in cycles, unless asked otherwise."""

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

    Product and addend are put into a frame of `2 * precision + 4` bits; the one with the smaller
    exponent is shifted down, the lowest bit sticky. Nothing is normalised before the sum. That is
    exact enough:

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
    multiply, total, align, combine, count, shift, final = pipe.steps(start, _COSTS, depth)

    x, y, z = (unpack(fmt, multiply(operand)) for operand in (a, b, c))
    exact = product(multiply, total, fmt, x, y)
    unlike = x.sign ^ y.sign ^ z.sign
    infinite_product = (x.infinite & ~y.nan) | (y.infinite & ~x.nan)
    undefined = (x.infinite & y.zero) | (x.zero & y.infinite)
    cancel = infinite_product & z.infinite & unlike
    invalid = x.signalling | y.signalling | z.signalling | undefined | cancel
    known = multiply.wrap(
        "known",
        special(
            nan=x.nan | y.nan | z.nan | invalid,
            infinite=infinite_product | z.infinite,
            invalid=invalid,
        ),
    )
    # an infinite operand gives its sign to both terms, so that the sign of the sum is its sign
    product_sign = Mux(z.infinite & ~infinite_product, z.sign, exact.sign)
    addend_sign = Mux(infinite_product, exact.sign, z.sign)
    terms = multiply.wrap("terms", Cat(product_sign, addend_sign))
    exponent = multiply.wrap("product_exponent", Mux(x.zero | y.zero, 1, exact.exponent))

    width = 2 * fmt.precision + _SPARE_BITS
    z = unpack(fmt, total(c))
    addend = total.wrap("addend", z.significand)
    ahead = total.signal("ahead", z.exponent - total(exponent))
    addend_first = total.wrap("addend_first", ahead >= 0)
    distance = Mux(ahead >= 0, ahead, -ahead)[: len(ahead) - 1]
    distance = total.wrap("distance", clip(total, distance, width))
    top = Mux(ahead >= 0, z.exponent, total(exponent)) + 1
    top = total.wrap("top", top[: fmt.exponent + 1])

    whole = Cat(Const(0, _SPARE_BITS), align(exact.significand))
    part = Cat(Const(0, width - fmt.precision), align(addend))
    first = align(addend_first)
    upper = align.wrap("upper", Mux(first, part, whole))
    moved = align.signal("moved", Mux(first, whole, part))
    lower = align.wrap("lower", shift_right_jam(align, moved, align(distance)))
    product_sign, addend_sign = align(terms)
    sign = Mux(first, addend_sign, product_sign)
    signs = align.wrap("signs", Cat(sign, product_sign ^ addend_sign))

    u, v = combine(upper), combine(lower)
    negative = combine.signal("negative", u < v)
    difference = Mux(negative, v - u, u - v)[:width]
    subtracts = combine(signs)[1]
    frame = combine.wrap("frame", Mux(subtracts, difference, u + v)[: width + 1])
    cancelled = subtracts & (u == v)
    sign = combine.wrap("sign", (combine(signs)[0] ^ (subtracts & negative)) & ~cancelled)

    zeros = count.wrap("zeros", count_leading_zeros(count, count(frame), count(top)))

    exponent, significand = normalise(shift, fmt, shift(frame), shift(top), shift(zeros))
    exponent = shift.wrap("exponent", exponent)
    significand = shift.wrap("significand", significand)

    return round_pack(
        final,
        fmt,
        known=final(known),
        sign=final(sign),
        exponent=final(exponent),
        significand=final(significand),
        until=start + depth,
        flags=flags,
    )
