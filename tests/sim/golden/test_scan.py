"""The model of the gradient scan against exact arithmetic and plain loops."""

import math
from fractions import Fraction

import numpy as np
import pytest

from nearstep_sim.golden.scan import PARTIALS, scan


def _loop(gradients: np.ndarray, lanes: int) -> float:
    partial = [np.float64(0.0)] * PARTIALS
    for number, start in enumerate(range(0, len(gradients), lanes)):
        beat = list(gradients[start : start + lanes])
        beat += [np.float32(0)] * (lanes - len(beat))
        terms = [each * each for each in beat]
        while len(terms) > 1:
            terms = [a + b for a, b in zip(terms[0::2], terms[1::2], strict=True)]
        partial[number % PARTIALS] += np.float64(terms[0])
    total = partial[0]
    for each in partial[1:]:
        total += each
    return float(total)


@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_model_equals_plain_loops(lanes: int) -> None:
    rng = np.random.default_rng(1)
    for count in (0, 1, 15, 16, 17, 127, 128, 129, 3000, 65_535, 65_536, 65_537, 140_001):
        gradients = rng.standard_normal(count).astype(np.float32)
        assert scan(gradients, lanes=lanes) == (False, _loop(gradients, lanes))


def test_error_against_exact_sum_is_within_the_bound() -> None:
    rng = np.random.default_rng(2)
    worst = 0.0
    for spread in (0.0, 1.0, 4.0):
        for _ in range(5):
            scale = 10.0 ** rng.uniform(-spread, spread, 20_000)
            gradients = (rng.standard_normal(20_000) * scale).astype(np.float32)
            exact = sum(Fraction(float(each)) ** 2 for each in gradients)
            error = abs(Fraction(scan(gradients)[1]) - exact) / exact
            worst = max(worst, float(error))
    print(f"relative error of 15 sums of 20000 squares: at most {worst:.2e}")
    assert 0 < worst <= 5 * 2.0**-24


def test_error_of_a_large_tensor() -> None:
    gradients = np.random.default_rng(3).standard_normal(1 << 22).astype(np.float32)
    exact = math.fsum(np.square(gradients.astype(np.float64)))
    error = abs(scan(gradients)[1] / exact - 1)
    print(f"relative error of a sum of 2^22 squares: {error:.2e}")
    assert error < 1e-9


def test_what_is_not_finite_is_found() -> None:
    for word in (0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0x7F80_0001):
        gradients = np.zeros(33, np.float32)
        gradients.view(np.uint32)[32] = word
        found, total = scan(gradients)
        assert found
        assert not math.isfinite(total)
    assert scan(np.full(3, 2e19, np.float32)) == (False, math.inf)
    with pytest.raises(TypeError, match="must be float32 of one dimension, not float64"):
        scan(np.zeros(4))
