"""State in 8 bits against exact arithmetic and the bits of torchao; C++ against numpy."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest

from nearstep_sim.golden import blockwise, blockwise_cpp
from nearstep_sim.golden.blockwise import (
    GROUP,
    Blockwise,
    codes_of,
    dequantize,
    dynamic_map,
    pack,
    quantize,
    unpack,
)

SIGNS = [True, False]
QUIET_NAN = 0x7FC00000
SPECIALS = np.array(
    [
        0, 1, 2, 0x007FFFFF, 0x00800000, 0x2B8CBCCB, 0x2B8CBCCC, 0x2B8CBCCD, 0x3F800000, 0x7F7FFFFF,
        0x7F800000, 0x7F800001, 0x7FBFFFFF, QUIET_NAN, 0x7FC12345, 0x7FFFFFFF,
    ],
    np.uint32,
)  # fmt: skip
"""Magnitudes: zero, subnormal numbers (1e-45 the first), the least scale and its neighbours, one,
the largest, infinity, and NaN of many payloads."""
SPECIALS = np.concatenate([SPECIALS, SPECIALS | np.uint32(1 << 31)]).view(np.float32)
SIZES = [0, 1, 255, 256, 257, 1001, 4095, 4096, 4097]

TORCHAO = {
    True: "1819e2480e1c8f77a0cd5a28a865c62efd0e7475bc4a79621d30e81ed6b58eae",
    False: "f165d1002e200c89d72b86f9e5fcaa46c73200f4738a126aee93a587977831a1",
}
"""SHA-256 of the codes that torchao 0.18.0 gave for `values` of seeds 0, 1 and 2 (torch 2.13.0 on a
CPU): `quantize_8bit_with_qmap(scale_tensor(values, 256)[0], create_dynamic_map(signed))` of
`torchao.optim.quant_utils`."""


def values(seed: int, signed: bool) -> np.ndarray:
    """Numbers of every size, blocks of zeros and subnormal numbers, infinities, NaN, and the
    middles between entries of the map."""
    rng = np.random.default_rng(seed)
    count = GROUP * 1000
    made = (rng.standard_normal(count) * 10.0 ** rng.integers(-9, 3, count)).astype(np.float32)
    made[: GROUP * 500] = rng.standard_normal(GROUP * 500).astype(np.float32)
    rows = made.reshape(-1, GROUP)
    rows[3] = 0
    rows[5, 0] = 1e-45
    rows[6] = 1e-42
    if seed == 1:
        rows[10, 3], rows[11, 5], rows[12, 0] = np.inf, -np.inf, np.nan
    table = dynamic_map(signed).astype(np.float64)
    rows[20, :255], rows[20, 255] = (table[:-1] + table[1:]) / 2, 1
    return made if signed else np.abs(made)


@pytest.mark.parametrize("signed", SIGNS)
def test_codes_are_torchaos(signed):
    digest = hashlib.sha256()
    for seed in range(3):
        digest.update(quantize(values(seed, signed), signed=signed).codes.tobytes())
    assert digest.hexdigest() == TORCHAO[signed]


@pytest.mark.parametrize("signed", SIGNS)
def test_each_code_is_of_a_nearest_entry(signed):
    """Of the quotient, in exact arithmetic, but for what rounding the half of a gap leaves."""
    print("seed 3")
    given = np.random.default_rng(3).standard_normal(GROUP * 8).astype(np.float32)
    given = given if signed else np.abs(given)
    made = quantize(given, signed=signed)
    table = [Fraction(float(each)) for each in dynamic_map(signed)]
    parts = given.reshape(-1, GROUP) / np.abs(given.reshape(-1, GROUP)).max(1)[:, None]
    checked = 0
    for part, code in zip(parts.reshape(-1).tolist(), made.codes.tolist(), strict=True):
        exact = Fraction(part)
        nearest = min(abs(each - exact) for each in table)
        assert abs(table[code] - exact) <= nearest + Fraction(1, 1 << 25)
        checked += 1
    assert checked == GROUP * 8


@pytest.mark.parametrize("signed", SIGNS)
def test_the_map_is_the_published_one(signed):
    table = dynamic_map(signed)
    assert table.size == 256
    assert (np.diff(table) > 0).all()
    assert table[-1] == 1
    assert np.count_nonzero(table == 0) == 1
    assert np.count_nonzero(table < 0) == (127 if signed else 0)
    exact = np.sort(
        [0.0, 1.0]
        + [
            sign * 10.0 ** (decade - 6) * (0.1 + 0.9 * (k + 0.5) / parts)
            for decade in range(7)
            for parts in [2 ** (decade if signed else decade + 1)]
            for k in range(parts)
            for sign in ((1, -1) if signed else (1,))
        ]
    )
    np.testing.assert_allclose(table, exact, rtol=3e-7)


@pytest.mark.parametrize("size", SIZES)
def test_any_length_and_the_largest_of_a_block_comes_back(size):
    print("seed 6")
    given = np.random.default_rng(6).random(size).astype(np.float32)
    made = quantize(given, signed=False)
    assert made.codes.size == size
    assert made.scales.size == -(-size // GROUP)
    assert made.nbytes == size + 4 * -(-size // GROUP)
    back = dequantize(made, signed=False)
    for start in range(0, size, GROUP):
        block = given[start : start + GROUP]
        assert back[start + block.argmax()] == block.max()
        assert np.abs(back[start : start + GROUP] - block).max() <= 0.01 * block.max()


def test_infinities_and_nan_stay_in_their_group():
    given = np.full(3 * GROUP, 0.5, np.float32)
    given[5], given[GROUP + 5] = np.inf, np.nan
    back = dequantize(quantize(given, signed=True), signed=True)
    assert not np.isfinite(back[:GROUP]).any()
    assert np.isnan(back[GROUP : 2 * GROUP]).all()
    assert (back[2 * GROUP :] == 0.5).all()


@pytest.mark.parametrize("signed", SIGNS)
def test_a_group_with_a_nan_is_the_default_nan(signed):
    for pattern in (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF812345, 0x7FFFFFFF):
        given = np.full(GROUP, 0.5, np.float32)
        given.view(np.uint32)[7] = pattern
        given[9] = np.inf
        made = quantize(given, signed=signed)
        assert made.scales.view(np.uint32).tolist() == [QUIET_NAN]
        assert not made.codes.any()
        assert set(dequantize(made, signed=signed).view(np.uint32).tolist()) == {QUIET_NAN}


@pytest.mark.parametrize("signed", SIGNS)
def test_a_group_with_an_infinity(signed):
    given = np.full(GROUP, -0.5, np.float32)
    given[3], given[4] = np.inf, -np.inf
    made = quantize(given, signed=signed)
    assert np.isposinf(made.scales).all()
    back = dequantize(made, signed=signed).view(np.uint32)
    infinite = 0xFF800000 if signed else QUIET_NAN
    assert back[3:5].tolist() == [infinite, infinite]
    assert set(back[:3].tolist()) | set(back[5:].tolist()) == {QUIET_NAN}


def equal_in_cpp(given: np.ndarray, signed: bool) -> int:
    """Compare what both make of values, and of that again; returns how many elements."""
    made = quantize(given, signed=signed)
    cpp = blockwise_cpp.quantize(given, signed=signed)
    assert cpp.codes.tobytes() == made.codes.tobytes()
    assert cpp.scales.tobytes() == made.scales.tobytes()
    back = dequantize(made, signed=signed)
    assert blockwise_cpp.dequantize(made, signed=signed).tobytes() == back.tobytes()
    return given.size


@pytest.mark.parametrize("signed", SIGNS)
def test_cpp_quantizes_any_size_to_the_bits_of_numpy(signed):
    """Numbers of every size, of both signs; any patterns; and all of one special value, among
    zeros, and beside each other one."""
    print("seed 12")
    rng, checked = np.random.default_rng(12), 0
    for size in SIZES:
        made = rng.standard_normal(size) * 10.0 ** rng.integers(-45, 38, size)
        checked += equal_in_cpp(made.astype(np.float32), signed)
        any_of_all = rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
        checked += equal_in_cpp(any_of_all, signed)
    assert checked == 2 * sum(SIZES)
    for one in SPECIALS:
        for other in SPECIALS:
            group = np.full(GROUP, one, np.float32)
            group[17] = other
            checked += equal_in_cpp(group, signed)
    assert checked == 2 * sum(SIZES) + GROUP * SPECIALS.size**2


@pytest.mark.parametrize("signed", SIGNS)
def test_cpp_finds_the_codes_of_numpy_at_every_middle(signed):
    """And at the floats around it, of both signs, at scales of many sizes."""
    table = dynamic_map(signed).astype(np.float64)
    middles = ((table[:-1] + table[1:]) / 2).astype(np.float32)
    around, below, above = [middles], middles, middles
    for _ in range(3):
        below = np.nextafter(below, np.float32(-2))
        above = np.nextafter(above, np.float32(2))
        around += [below, above]
    parts = np.concatenate([*around, dynamic_map(signed), SPECIALS])
    parts = np.concatenate([parts, -parts])
    parts = parts[np.abs(parts) <= 1]
    assert parts.size > 2 * (7 * 255 + 255)
    rows = np.zeros((-(-parts.size // (GROUP - 1)), GROUP), np.float32)
    rest = np.resize(parts, rows[:, 1:].shape)
    checked = 0
    for scale in np.array([1, 2.0**-30, 2.0**100, 0.3, 1e-12, 2.9e-39, 3e38], np.float32):
        rows[:, 0], rows[:, 1:] = scale, rest * scale
        checked += equal_in_cpp(rows.reshape(-1), signed)
    assert checked == 7 * rows.size


@pytest.mark.parametrize("signed", SIGNS)
def test_every_code_at_any_scale_is_the_product_rounded_once(signed):
    """In exact arithmetic for those of numbers; numpy and C++."""
    print("seed 13")
    rng = np.random.default_rng(13)
    random = rng.integers(0, 1 << 32, 200, dtype=np.uint32).view(np.float32)
    scales = np.concatenate([SPECIALS, random])
    given = Blockwise(np.tile(np.arange(256, dtype=np.uint8), scales.size), scales)
    table, checked = dynamic_map(signed).astype(np.float64), 0
    with np.errstate(all="ignore"):  # exact in binary64
        expected = (table * scales.astype(np.float64)[:, None]).astype(np.float32).reshape(-1)
    expected.view(np.uint32)[np.isnan(expected)] = QUIET_NAN
    for model in (blockwise, blockwise_cpp):
        back = model.dequantize(given, signed=signed)
        assert back.tobytes() == expected.tobytes()
        checked += back.size
    assert checked == 2 * 256 * (SPECIALS.size + 200)


@pytest.mark.parametrize("signed", SIGNS)
def test_the_steps_have_each_code_once(signed):
    """Among quotients with equal upper 16 bits there is one step at most: 255 over all."""
    words = blockwise_cpp.steps(signed)
    before, after, least = words >> 24, words >> 16 & 255, words & 0xFFFF
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    number = (upper & 0x7FFFFFFF) < 0x7F800000
    jumps = np.abs(after.astype(int) - before.astype(int))
    assert (jumps[number] <= 1).all()
    inside = np.flatnonzero(number & (jumps == 1))
    # In the order of the numbers a code is that of the one before, or the next.
    order = np.concatenate([upper[number & (upper >> 31 == 1)][::-1], upper[upper < 0x7F800000]])
    ends = np.stack([before[order >> 16], after[order >> 16]], 1)
    ends[order >> 31 == 1] = ends[order >> 31 == 1][:, ::-1]
    path = ends.reshape(-1).astype(int)
    assert path[0] == 0
    assert path[-1] == 255
    assert set(np.diff(path).tolist()) == {0, 1}
    assert inside.size + np.count_nonzero(np.diff(path)[1::2]) == 255
    for low, code in ((least[inside] - 1, before[inside]), (least[inside], after[inside])):
        parts = (upper[inside] | low).view(np.float32)
        assert (codes_of(parts, signed=signed) == code).all()


@pytest.mark.deep
@pytest.mark.parametrize("signed", SIGNS)
def test_cpp_finds_the_codes_of_numpy_for_every_quotient(signed):
    """All from 2^-25 to 1, and some of those below, which are nearest to 0."""
    least, one, size, checked = 0x33000000, 0x3F800000, 1 << 20, 0
    ranges = [np.arange(at, min(at + size, one + 1)) for at in range(least, one + 1, size)]
    for each in (np.arange(0, least, 4099), *ranges):
        parts = np.concatenate([each, each | (1 << 31)]).astype(np.uint32).view(np.float32)
        rows = np.ones((-(-parts.size // (GROUP - 1)), GROUP), np.float32)
        rows[:, 1:] = np.resize(parts, rows[:, 1:].shape)
        made = blockwise_cpp.quantize(rows.reshape(-1), signed=signed)
        assert (made.codes == codes_of(rows.reshape(-1), signed=signed)).all()
        checked += parts.size
    assert checked == 2 * (one + 1 - least + -(-least // 4099))


def test_cpp_keeps_subnormal_numbers_of_a_caller_that_flushes_them():
    torch = pytest.importorskip("torch")
    scaled = Blockwise(np.full(GROUP, 200, np.uint8), np.full(1, 1e-40, np.float32))
    back = dequantize(scaled, signed=True)
    assert back.all()
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush subnormal numbers")
        here = blockwise_cpp.dequantize(scaled, signed=True)
    finally:
        torch.set_flush_denormal(False)
    assert here.tobytes() == back.tobytes()


@pytest.mark.parametrize(("elements", "scale_bytes"), [(256, 4), (512, 32), (4096, 64)])
def test_bytes_in_memory_are_scales_then_codes_of_each_block(elements, scale_bytes):
    """Byte by byte, as the layout says."""
    print("seed 14")
    rng, checked = np.random.default_rng(14), 0
    for size in (*SIZES, 3 * elements, 3 * elements + 1):
        given = quantize(rng.standard_normal(size).astype(np.float32), signed=True)
        data = pack(given, elements=elements, scale_bytes=scale_bytes)
        blocks = -(-size // elements)
        assert data.shape == (size + blocks * scale_bytes,)
        known = np.zeros(data.size, bool)
        for element in range(size):
            block, within = divmod(element, elements)
            base = block * (elements + scale_bytes)
            assert data[base + scale_bytes + within] == given.codes[element]
            known[base + scale_bytes + within] = True
            if element % GROUP == 0:
                at = base + 4 * (within // GROUP)
                assert data[at : at + 4].tobytes() == given.scales[element // GROUP].tobytes()
                known[at : at + 4] = True
            checked += 1
        assert not data[~known].any()
        back = unpack(data, elements=elements, scale_bytes=scale_bytes)
        assert back.codes.tobytes() == given.codes.tobytes()
        assert back.scales.tobytes() == given.scales.tobytes()
    assert checked == sum(SIZES) + 6 * elements + 1
    for short in (1, scale_bytes):
        with pytest.raises(ValueError, match="has a last block without a code"):
            unpack(np.zeros(short, np.uint8), elements=elements, scale_bytes=scale_bytes)


def test_only_flat_binary32_is_taken():
    for wrong in (np.zeros(3), np.zeros((2, 2), np.float32)):
        with pytest.raises(TypeError, match="values must be float32 of one dimension"):
            quantize(wrong, signed=True)
        with pytest.raises(TypeError, match="values must be float32 of one dimension"):
            blockwise_cpp.quantize(wrong, signed=True)
    codes, scales = np.zeros(257, np.uint8), np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="257 codes have 2 scales, not 1"):
        blockwise_cpp.dequantize(Blockwise(codes, scales), signed=True)
    with pytest.raises(TypeError, match="must be uint8 and float32, not float32 and float32"):
        blockwise_cpp.dequantize(Blockwise(scales, scales), signed=True)
