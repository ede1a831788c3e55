"""Moments in 8 bits against exact arithmetic, and against the bits of torchao."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest

from nearstep_sim.golden.blockwise import BLOCK, dequantize, dynamic_map, quantize

SIGNS = [True, False]

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
    count = BLOCK * 1000
    made = (rng.standard_normal(count) * 10.0 ** rng.integers(-9, 3, count)).astype(np.float32)
    made[: BLOCK * 500] = rng.standard_normal(BLOCK * 500).astype(np.float32)
    rows = made.reshape(-1, BLOCK)
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
    given = np.random.default_rng(3).standard_normal(BLOCK * 8).astype(np.float32)
    given = given if signed else np.abs(given)
    made = quantize(given, signed=signed)
    table = [Fraction(float(each)) for each in dynamic_map(signed)]
    parts = given.reshape(-1, BLOCK) / np.abs(given.reshape(-1, BLOCK)).max(1)[:, None]
    checked = 0
    for part, code in zip(parts.reshape(-1).tolist(), made.codes.tolist(), strict=True):
        exact = Fraction(part)
        nearest = min(abs(each - exact) for each in table)
        assert abs(table[code] - exact) <= nearest + Fraction(1, 1 << 25)
        checked += 1
    assert checked == BLOCK * 8


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


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 1001])
def test_any_length_and_the_largest_of_a_block_comes_back(size):
    print("seed 6")
    given = np.random.default_rng(6).random(size).astype(np.float32)
    made = quantize(given, signed=False)
    assert made.codes.size == size
    assert made.scales.size == -(-size // BLOCK)
    assert made.nbytes == size + 4 * -(-size // BLOCK)
    back = dequantize(made, signed=False)
    for start in range(0, size, BLOCK):
        block = given[start : start + BLOCK]
        assert back[start + block.argmax()] == block.max()
        assert np.abs(back[start : start + BLOCK] - block).max() <= 0.01 * block.max()


def test_infinities_and_nan_stay_in_their_block():
    given = np.full(3 * BLOCK, 0.5, np.float32)
    given[5], given[BLOCK + 5] = np.inf, np.nan
    back = dequantize(quantize(given, signed=True), signed=True)
    assert not np.isfinite(back[:BLOCK]).any()
    assert np.isnan(back[BLOCK : 2 * BLOCK]).all()
    assert (back[2 * BLOCK :] == 0.5).all()


def test_only_flat_binary32_is_taken():
    for wrong in (np.zeros(3), np.zeros((2, 2), np.float32)):
        with pytest.raises(TypeError, match="values must be float32 of one dimension"):
            quantize(wrong, signed=True)
