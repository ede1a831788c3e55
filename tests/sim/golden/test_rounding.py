"""Stochastic rounding against exact arithmetic and published vectors, in numpy and in C++."""

from fractions import Fraction

import numpy as np
import pytest

from nearstep.stripes import Stripes
from nearstep_sim.golden import rounding, rounding_cpp
from nearstep_sim.golden.rounding import Draw, narrow_with, random_bits, threefry2x32
from nearstep_spec.fp import BF16

KNOWN = {
    ((0, 0), (0, 0)): (0x9D1C5EC6, 0x8BD50731),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF)): (0xFD36D048, 0x2D17272C),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344)): (0xBA3E4725, 0xF27D669E),
}
"""Counter and key to result: `threefry2x32 13` of Random123's `kat_vectors`."""

EVERY = np.arange(1 << 16, dtype=np.uint16)
"""Every outcome of the random bits of an element, each as likely as the others."""


def as_fraction(pattern: int) -> Fraction:
    """Exactly what a finite pattern of binary32 stands for."""
    sign, exponent, fraction = pattern >> 31, pattern >> 23 & 0xFF, pattern & 0x7FFFFF
    assert exponent < 255
    significand = fraction if exponent == 0 else fraction | 1 << 23
    return (-1) ** sign * Fraction(significand) * Fraction(2) ** (max(exponent, 1) - 150)


def numbers(count: int) -> np.ndarray:
    """Patterns of finite numbers: some of each kind, then random ones."""
    given = [
        0x0000_0001, 0x0000_8000, 0x0000_FFFF, 0x007F_FFFF, 0x0080_0001,  # subnormal, and beside
        0x3F80_0000, 0x3F80_0001, 0x3F80_7FFF, 0x3F80_8000, 0x3F80_8001, 0x3F80_FFFF,
        0x3FFF_8000, 0x7F7E_FFFF, 0x7F7E_0001, 0x0000_0000, 0x0001_0000, 0x4049_0FDB,
    ]  # fmt: skip
    print("seed 12")
    rng = np.random.default_rng(12)
    more = rng.integers(0, 0x7F7F_0000, count, dtype=np.uint32)
    words = np.concatenate([np.array(given, np.uint32), more])
    return np.concatenate([words, words | np.uint32(0x8000_0000)])


def test_words_are_those_of_random123():
    for (low, high), key in KNOWN:
        words = threefry2x32(np.array([low], np.uint32), np.array([high], np.uint32), key)
        assert tuple(int(each[0]) for each in words) == KNOWN[(low, high), key]
    assert len(KNOWN) == 3


def test_away_from_zero_with_the_probability_of_the_dropped_fraction_exactly():
    """Of all random bits; so the mean is the number, exactly."""
    words = numbers(60)
    for word in words.tolist():
        value = as_fraction(word)
        found, times = np.unique(
            narrow_with(np.full(EVERY.size, word, np.uint32).view(np.float32), EVERY),
            return_counts=True,
        )
        low, high = word >> 16 << 16, (word >> 16) + 1 << 16
        near, far = as_fraction(low), as_fraction(high)
        outcomes = dict(zip((found.astype(int) << 16).tolist(), times.tolist(), strict=True))
        dropped = (value - near) / (far - near)
        assert outcomes.get(high, 0) == dropped * EVERY.size
        assert outcomes.get(low, 0) == (1 - dropped) * EVERY.size
        assert sum(outcomes.values()) == EVERY.size
        mean = sum(as_fraction(each) * many for each, many in outcomes.items()) / EVERY.size
        assert mean == value
    assert words.size == 2 * (17 + 60)


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_what_is_no_number_and_what_bfloat16_holds_stays(sign):
    """Whatever the random bits are: zeros, subnormal numbers, numbers, infinities; NaN is the
    default one."""
    held = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7F, 0x7F80]
    for pattern in held:
        words = np.full(EVERY.size, (pattern | sign) << 16, np.uint32)
        assert (narrow_with(words.view(np.float32), EVERY) == (pattern | sign)).all()
    for word in (0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF):
        words = np.full(EVERY.size, word | sign << 16, np.uint32)
        assert (narrow_with(words.view(np.float32), EVERY) == BF16.quiet_nan).all()
    assert len(held) == 8


def test_above_the_largest_number_comes_infinity():
    for word in (0x7F7F_0001, 0x7F7F_8000, 0x7F7F_FFFF):
        words = np.full(EVERY.size, word, np.uint32)
        found = narrow_with(words.view(np.float32), EVERY)
        assert np.count_nonzero(found == BF16.infinity) == word & 0xFFFF
        assert np.count_nonzero(found == BF16.max_finite) == EVERY.size - (word & 0xFFFF)


def some_draws(count: int):
    print("seed 4")
    rng = np.random.default_rng(4)
    for _ in range(count):
        block = 1 << int(rng.integers(2, 14))
        yield Draw(
            seed=int(rng.integers(1 << 32)),
            step=int(rng.integers(1 << 32)),
            stream=int(rng.integers(1, 16)),
            index=int(rng.integers(1 << 40)) if rng.random() < 0.5 else (1 << 34) - 77,
            within=int(rng.integers(block)),
            block=block,
            skip=block * int(rng.integers(4)),
        )


def test_numpy_and_cpp_have_the_same_bits_at_any_length_and_offset():
    checked = 0
    rng = np.random.default_rng(5)
    for draw in some_draws(40):
        size = int(rng.choice([0, 1, 3, 5, 127, 1023, 1025, 4099]))
        values = rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
        whole = rounding.round_stochastically(values, draw)
        assert (rounding_cpp.round_stochastically(values, draw) == whole).all()
        cut = int(rng.integers(size + 1))
        for model in (rounding, rounding_cpp):
            parts = [
                model.round_stochastically(values[:cut], draw),
                model.round_stochastically(values[cut:], draw.after(cut)),
            ]
            assert (np.concatenate(parts) == whole).all()
        checked += size
    assert checked > 10_000


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_channels_draw_what_one_would(channels):
    """Of an array that is dealt out by blocks, from any block on."""
    block, count = 64, 5000
    stripes = Stripes(block, channels)
    whole = random_bits(Draw(seed=3, step=4, stream=1, index=1 << 20), count)
    checked = 0
    for start in (0, 16, 64, 1600):
        for channel in range(channels):
            first, last = stripes.span(start, count, channel)
            draw = Draw(
                seed=3,
                step=4,
                stream=1,
                index=(1 << 20) + stripes.element(first, channel),
                within=first % block,
                block=block,
                skip=(channels - 1) * block,
            )
            mine = stripes.gather(whole[start:], start, channel)
            assert (random_bits(draw, last - first) == mine).all()
            checked += last - first
    assert checked == 4 * count - 1680


def test_a_seed_and_a_step_that_repeat_give_the_same_bits_and_others_others():
    base = Draw(seed=1, step=2, stream=3, index=0)
    bits = random_bits(base, 1 << 16)
    assert (random_bits(Draw(seed=1, step=2, stream=3, index=0), 1 << 16) == bits).all()
    others = [
        Draw(seed=2, step=2, stream=3), Draw(seed=1, step=3, stream=3),
        Draw(seed=1, step=2, stream=4), Draw(seed=1, step=2, stream=3, index=1 << 16),
        Draw(seed=2, step=1, stream=3),
    ]  # fmt: skip
    for other in others:
        equal = np.count_nonzero(random_bits(other, 1 << 16) == bits)
        assert equal < 8  # 1 is expected
    # All 16 bits are set as often as not, within six standard deviations of 2**15 of 2**16.
    for bit in range(16):
        assert abs(np.count_nonzero(bits >> bit & 1) - (1 << 15)) < 6 * 128


def test_only_binary32_is_rounded():
    for model in (rounding, rounding_cpp):
        with pytest.raises(TypeError, match="operands must be float32, not float64"):
            model.round_stochastically(np.zeros(3), Draw(seed=0, step=0, stream=1))
