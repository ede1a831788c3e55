"""Exact sums in C++ against integers of Python."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from nearstep_sim.golden import coarse_cpp
from nearstep_spec.coarse.config import MAX_ADDENDS

from .draws import SPECIALS, crossed, patterns
from .exact_sums import FORMATS, exact_sum

DIVISORS = (1, 2, 3, 7, 8, 1000)
KINDS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def summed(addends: np.ndarray, wire: str, divisor: int = 1) -> np.ndarray:
    """Patterns of the sums over the first axis of patterns; the same if all addends, or all but the
    first, are kept in 16 bits."""
    rows = [np.ascontiguousarray(row).view(np.float32) for row in addends]
    out, same = np.empty((2, rows[0].size), np.float32)
    coarse_cpp.exact_sum(rows, [out], wire=wire, divisor=divisor)
    if wire in KINDS:
        halves = [torch.from_numpy(row).to(KINDS[wire]).view(torch.uint16).numpy() for row in rows]
        for given in (halves, [rows[0], *halves[1:]]):
            coarse_cpp.exact_sum(given, [same], wire=wire, divisor=divisor, halves=wire)
            assert same.tobytes() == out.tobytes()
    return out.view(np.uint32)


def draws(rng: np.random.Generator, addends: int, count: int, wire: str) -> list[np.ndarray]:
    """Any patterns; numbers that nearly cancel, or meet ties; and specials among them."""
    near = rng.standard_normal((addends, count)) * np.exp2(rng.integers(-30, 30, (addends, count)))
    least = {"fp32": -149, "fp16": -24, "bf16": -133}[wire]
    small = rng.integers(-5, 6, (addends, count)) * np.exp2(least + rng.integers(0, 9, count))
    ties = rng.choice([1.0, -1.0, 2.0**-8, 2.0**-11, 2.0**-24, -(2.0**-24)], (addends, count))
    ties *= np.exp2(rng.integers(-3, 4, count))
    large = rng.choice([3.4e38, -3.4e38, 1e38, 65504.0, -65504.0, 16.0, -1.0], (addends, count))
    found = [np.stack([patterns(rng, count) for _ in range(addends)])]
    found += [each.astype(np.float32).view(np.uint32) for each in (near, small, ties, large)]
    mixed = found[1].copy()
    where = rng.random(mixed.shape) < 0.2
    mixed[where] = rng.choice(SPECIALS, int(where.sum()))
    zeros = rng.choice(np.array([0, 1 << 31], np.uint32), (addends, count))
    cancelling = found[1].copy()
    half = addends // 2
    cancelling[half : 2 * half] = cancelling[:half] ^ np.uint32(1 << 31)
    return [*found, mixed, zeros, cancelling]


@pytest.mark.parametrize("wire", FORMATS)
def test_sums_are_those_of_integers(wire: str) -> None:
    print("seed 41")
    rng = np.random.default_rng(41)
    checked = 0
    cases = [np.stack(crossed(2, SPECIALS))]
    cases += [each for n in (1, 2, 3, 8, 33) for each in draws(rng, n, 40, wire)]
    for addends in cases:
        for divisor in DIVISORS if len(addends) > 2 else (1,):
            found = summed(addends, wire, divisor).tolist()
            for column, word in zip(addends.T.tolist(), found, strict=True):
                expected = exact_sum(column, wire, divisor)
                assert word == expected, (divisor, [f"{each:#010x}" for each in column])
                checked += 1
    print(f"{checked} sums checked")
    assert checked == cases[0].shape[1] + 8 * 40 * (2 + 3 * len(DIVISORS))


def borders(rng: np.random.Generator, addends: int, wire: str) -> np.ndarray:
    """Patterns of numbers whose exponents span what a binary32 number, a double or two of these
    hold, and up to five binades more, at both ends of the range: with carries, cancellation, and
    halves of a last bit."""
    digits, most = FORMATS[wire]
    carries = (addends - 1).bit_length()
    few, columns = 1.0 + np.array([0, 2.0 ** (1 - digits), 1 - 2.0 ** (1 - digits)]), []
    spans = [bits - digits - carries + more for bits in (24, 53, 106) for more in (0, 1, 2, 3, 5)]
    for span in (0, digits, *(max(0, each) for each in spans)):
        for low in (-149, 2 - digits - most, -40, most - span - 1):
            for kind in range(4):
                column = rng.choice(few, addends) * rng.choice([1.0, -1.0], addends)
                exponents = rng.integers(low, low + span + 1, addends)
                exponents[:2] = low + span, low
                if kind == 1:
                    column = np.abs(column[0]) * np.ones(addends)
                    exponents[1:-1] = low + span
                column *= np.exp2(np.minimum(exponents, most).astype(float))
                if kind == 2:
                    column[-2:] = column[1], -column[0]
                if kind == 3:
                    half = 2.0 ** float(max(low + span, 1 - most) - digits)
                    column[2:4] = [half, rng.choice([-1, 1, 2]) * half][: addends - 2]
                columns.append(column)
    with np.errstate(over="ignore"):
        return np.array(columns).T.astype(np.float32).view(np.uint32)


@pytest.mark.parametrize("wire", FORMATS)
def test_sums_at_the_borders_of_a_double_are_those_of_integers(wire: str) -> None:
    """One lane is a special, now and then, beside others that are not."""
    print("seed 45")
    rng = np.random.default_rng(45)
    checked = 0
    for addends in (2, 3, 5):
        words = borders(rng, addends, wire)
        special = words.copy()
        special[rng.integers(0, addends), ::37] = rng.choice(SPECIALS[-3:], words[0, ::37].size)
        for given, divisor in ((words, 1), (words, addends), (special, 3)):
            whole = summed(given, wire, divisor)
            for number, column in enumerate(given.T.tolist()):
                alone = summed(np.repeat(given[:, number, None], 11, axis=1), wire, divisor)
                word = int(whole[number])
                assert (alone == word).all()  # others of its block are added otherwise
                expected = exact_sum(column, wire, divisor)
                assert word == expected, (divisor, [f"{each:#010x}" for each in column])
                checked += 1
    print(f"{checked} sums checked")
    assert checked == 3 * 3 * (17 * 4 * 4)


@pytest.mark.parametrize(("wire", "half"), [("bf16", 2.0**-8), ("fp32", 2.0**-24)])
def test_an_addend_below_two_doubles_decides_a_tie(wire: str, half: float) -> None:
    column = np.array([1, half, 2.0**-60, 2.0**-120, -(2.0**-60)], np.float32).view(np.uint32)
    for order in ([0, 1, 2, 3, 4], [2, 0, 3, 1, 4], [4, 3, 2, 1, 0]):
        for sign, up in ((0, 1), (1 << 31, 0)):
            words = column[order, None].copy()
            words[words == column[3]] |= np.uint32(sign)
            total = np.array([1 + 2 * half * up], np.float32).view(np.uint32)
            assert summed(words, wire) == total == exact_sum(words[:, 0].tolist(), wire)


def test_a_bit_below_binary32_decides_a_tie() -> None:
    """Of eight addends whose exponents are one further apart than binary32 allows."""
    small = [1 + 2.0**-6, -1 - 2.0**-7, 0]
    column = np.array([32640] * 4 + [1024, *small], np.float32).view(np.uint32)
    above = np.array([131072 + 1024], np.float32).view(np.uint32)
    for order in (np.arange(8), np.arange(8)[::-1], [4, 5, 0, 1, 2, 3, 6, 7]):
        assert summed(column[order, None], "bf16") == above == exact_sum(column.tolist(), "bf16")


def test_the_oracle_rounds_as_torch_does() -> None:
    words = patterns(np.random.default_rng(42), 3000)
    given = torch.from_numpy(words.view(np.float32).copy())
    checked = 0
    for wire, dtype in KINDS.items():
        for word, short in zip(words.tolist(), given.to(dtype).float().tolist(), strict=True):
            found = np.array([exact_sum([word], wire)], np.uint32).view(np.float32)[0]
            assert np.array_equal(found, np.float32(short), equal_nan=True)
            checked += 1
    assert checked == 6000


@pytest.mark.parametrize("wire", FORMATS)
def test_a_million_permutations_have_one_hash(wire: str) -> None:
    """Each column has the same eight addends, among them such as cancel, in another order."""
    print("seed 43")
    rng = np.random.default_rng(43)
    few = np.array([1.0, -1.0, 3e4, 2.0**-24, 0.1, -3e4, 1e-3, 7.7], np.float32)
    columns = 1_000_000
    order = rng.random((8, columns), np.float32).argsort(axis=0)
    assert len(np.unique(order[:, :1000], axis=1).T) > 900
    for divisor in (1, 3):
        found = summed(few.view(np.uint32)[order], wire, divisor)
        assert found.size == columns
        assert (found == exact_sum(few.view(np.uint32).tolist(), wire, divisor)).all()
        print(hashlib.sha256(found[:1].tobytes()).hexdigest()[:16])
    unordered = few[order].astype(np.float32).sum(axis=0)
    assert np.unique(unordered).size > 10  # of a sum of binary32, one for each of many orders


def test_threads_ranges_and_places_change_no_bit() -> None:
    print("seed 44")
    rng = np.random.default_rng(44)
    data = patterns(rng, 3 * 300_000).view(np.float32).reshape(3, -1)
    whole = [np.empty(300_000, np.float32) for _ in range(2)]
    coarse_cpp.exact_sum([*data], whole, wire="bf16", threads=1)
    for threads, first, last in ((4, 0, 300_000), (3, 7, 299_999), (1, 5, 5), (2, 1000, 1001)):
        out = np.full(last - first + 1, -1, np.float32)
        coarse_cpp.exact_sum([*data], [out[:-1]], first=first, wire="bf16", threads=threads)
        assert np.array_equal(out[:-1].view(np.uint32), whole[1].view(np.uint32)[first:last])
        assert out[-1] == -1
    place = data.copy()
    coarse_cpp.exact_sum([*place], [place[1]], wire="bf16")
    assert np.array_equal(place[1].view(np.uint32), whole[0].view(np.uint32))


def test_as_many_addends_as_the_width_allows() -> None:
    largest = np.full((MAX_ADDENDS, 1), 0x7F7F_FFFF, np.uint32)
    half = largest.copy()
    half[MAX_ADDENDS // 2 :] |= np.uint32(1 << 31)
    assert summed(largest, "fp32").tolist() == [0x7F80_0000]
    assert summed(largest, "fp32", MAX_ADDENDS).tolist() == [0x7F7F_FFFF]
    assert summed(half, "fp32").tolist() == [0]
    with pytest.raises(ValueError, match="not 1025, 1 and 1"):
        summed(np.zeros((MAX_ADDENDS + 1, 1), np.uint32), "fp32")
    with pytest.raises(ValueError, match="not 1, 1 and 0"):
        summed(largest[:1], "fp32", 0)
    with pytest.raises(ValueError, match="fp8"):
        summed(largest[:1], "fp8")
