# amaranth: UnusedElaboratable=no
"""Floating-point units in RTL against the golden model: value and flags, millions of vectors."""

import zlib

import numpy as np
import pytest
from amaranth.hdl import Module, Signal

from nearstep_hw.fp import sqrt
from nearstep_hw.fp.pipeline import Pipeline
from nearstep_hw.fp.unit import MAX_DEPTH, OPERATIONS, DepthError, FpUnit, arithmetic, conversion
from nearstep_hw.rule.technology import TECHNOLOGIES
from nearstep_sim.bench import patterns
from nearstep_sim.bench.fp_bank import Variant
from nearstep_sim.bench.vectors import (
    LatencyError,
    MismatchError,
    Outcome,
    VectorBench,
    check,
    compare,
)
from nearstep_spec.fp import BF16, FP16, FP32, FormatError, FpFormat

ECP5 = TECHNOLOGIES["ecp5"]

KINDS = ("add", "sub", "mul", "fma", "div", "sqrt")
TINY, SMALL = FpFormat(3, 2), FpFormat(4, 3)
DEFAULT = [Variant(operation) for operation in OPERATIONS.values()]


def _vectors(variants, count, label):
    """Vectors for each variant; equal operations get the same ones."""
    made = {}
    for variant in variants:
        operation = variant.operation
        if operation.name not in made:
            seed = zlib.crc32(f"{label} {operation.name}".encode())
            print(f"{operation.name}: seed {seed}")
            made[operation.name] = patterns.vectors(operation, count, seed)
    return [made[variant.operation.name] for variant in variants]


@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.deep)])
@pytest.mark.parametrize("stall_seed", [0, 2024], ids=["back_to_back", "with_idle_cycles"])
def test_vectors_of_every_unit(stall_seed, count):
    counts = check(DEFAULT, _vectors(DEFAULT, count, stall_seed), stall_seed=stall_seed)
    print(dict(zip(OPERATIONS, counts, strict=True)))
    assert min(counts) >= count


@pytest.mark.deep
def test_ten_million_vectors_of_every_unit():
    total = 0
    for batch in range(5):
        total += min(check(DEFAULT, _vectors(DEFAULT, 2_000_000, f"deep {batch}")))
    assert total >= 10_000_000


@pytest.mark.parametrize("limit", [200_000, pytest.param(3_000_000, marks=pytest.mark.deep)])
def test_specials_crossed_with_specials(limit):
    rng = np.random.default_rng(1)
    vectors = [
        patterns.crossed(v.operation.source, v.operation.operands, rng, limit) for v in DEFAULT
    ]
    counts = check(DEFAULT, vectors)
    assert counts[0] == len(patterns.specials(FP32)) ** 2 > 10_000


def test_every_pattern_of_the_16_bit_converters():
    names = {"fp16_to_fp32": FP16, "bf16_to_fp32": BF16}
    vectors = [
        patterns.exhaustive(FP16, 1)
        if v.operation.name in names
        else [np.zeros(1, np.uint32)] * v.operation.operands
        for v in DEFAULT
    ]
    counts = dict(zip(OPERATIONS, check(DEFAULT, vectors), strict=True))
    assert [counts[name] for name in names] == [1 << 16, 1 << 16]


def test_binary32_around_every_16_bit_number_and_every_tie():
    targets = {"fp32_to_fp16": FP16, "fp32_to_bf16": BF16}
    vectors = []
    for variant in DEFAULT:
        target = targets.get(variant.operation.name)
        if target is None:
            vectors.append([np.zeros(1, np.uint32)] * variant.operation.operands)
        else:
            vectors.append([patterns.neighbourhoods(FP32, target)])
    counts = dict(zip(OPERATIONS, check(DEFAULT, vectors), strict=True))
    assert [counts[name] for name in targets] == [10 << 16, 10 << 16]


SMALL_BANK = [
    *(Variant(arithmetic(kind, SMALL)) for kind in KINDS),
    Variant(arithmetic("fma", TINY)),
    Variant(conversion(SMALL, TINY)),
    Variant(conversion(TINY, SMALL)),
    # steps divided, and products of several partial ones
    *(Variant(arithmetic(k, SMALL), ECP5.depths[k], multiplier=(3, 2)) for k in ("add", "mul")),
]


def _exhaustive(variant, limit):
    operation = variant.operation
    if operation.source.width * operation.operands > limit:
        return [np.zeros(1, np.uint32)] * operation.operands
    return patterns.exhaustive(operation.source, operation.operands)


@pytest.mark.deep
def test_every_operand_of_small_formats():
    counts = check(SMALL_BANK, [_exhaustive(variant, 18) for variant in SMALL_BANK])
    assert counts == [65536, 65536, 65536, 1, 65536, 256, 262144, 256, 64, 65536, 65536]


@pytest.mark.deep
def test_every_triple_of_an_8_bit_format():
    assert check(SMALL_BANK, [_exhaustive(variant, 24) for variant in SMALL_BANK])[3] == 1 << 24


@pytest.mark.deep
@pytest.mark.parametrize("flags", [True, False])
def test_units_as_they_are_divided_for_an_ecp5(flags):
    bank = [
        Variant(arithmetic(kind, FP32), ECP5.depths[kind], flags, ECP5.multiplier) for kind in KINDS
    ]
    counts = check(bank, _vectors(bank, 1_000_000, "ecp5"), stall_seed=5)
    assert len(counts) == len(KINDS)
    assert min(counts) >= 1_000_000


DEPTHS = (1, 2, 4, 9, 33)


def _depth_bank(kinds, fmt, depths):
    return [
        Variant(arithmetic(kind, fmt), depth, flags=k % 2 == 0)
        for kind in kinds
        for k, depth in enumerate(depths)
    ]


@pytest.mark.deep
def test_depths_with_and_without_flags():
    bank = _depth_bank(KINDS, SMALL, DEPTHS)
    vectors = _vectors(bank, 20_000, "depths")
    counts = check(bank, vectors, stall_seed=9)
    assert len(counts) == len(KINDS) * len(DEPTHS)
    assert min(counts) >= 20_000


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_binary32_at_every_depth_to_40(kind):
    bank = _depth_bank([kind], FP32, [*range(1, 41), 100, MAX_DEPTH])
    counts = check(bank, _vectors(bank, 100_000, "deep depths"), stall_seed=3)
    assert len(counts) == 42
    assert min(counts) >= 100_000


@pytest.mark.deep
def test_converters_at_odd_depths():
    names = ("fp16_to_fp32", "fp32_to_fp16", "bf16_to_fp32", "fp32_to_bf16")
    bank = [Variant(OPERATIONS[name], depth, depth % 2 == 0) for name in names
            for depth in (1, 3, 4, 7, 20)]  # fmt: skip
    assert min(check(bank, _vectors(bank, 300_000, "converters"), stall_seed=4)) >= 300_000


def test_a_wrong_result_is_found_and_named():
    variant = Variant(OPERATIONS["fp32_add"])
    operands = [np.array([0x3F800000, 0x40000000], np.uint32)] * 2
    right = Outcome(np.array([0x40000000, 0x40800000], np.uint32), np.zeros(2, np.uint8))
    assert compare(variant, operands, right) == 2
    wrong_value = Outcome(right.z ^ np.array([0, 1], np.uint32), right.flags)
    with pytest.raises(MismatchError, match=r"1 of 2 .* expected 0x40800000 .* got 0x40800001"):
        compare(variant, operands, wrong_value)
    wrong_flags = Outcome(right.z, right.flags + np.array([1, 0], np.uint8))
    with pytest.raises(MismatchError, match=r"\[no flags\], got 0x40000000 \[inexact\]"):
        compare(variant, operands, wrong_flags)


def test_a_wrong_latency_is_found():
    class Late(VectorBench):
        """Expects one cycle more than the unit takes."""

        def run(self, vectors, **options):
            library = self.build()
            self.variants = tuple(Variant(v.operation, v.latency + 1) for v in self.variants)
            self.build = lambda: library
            return super().run(vectors, **options)

    with pytest.raises(LatencyError, match=r"fp16_to_fp32@3: o_valid at cycle 1 "):
        Late(DEFAULT).run(_vectors(DEFAULT, 1000, "late"))


@pytest.mark.parametrize("depth", [0, -3, MAX_DEPTH + 1, 2.5, "5"])
def test_impossible_depths_are_refused(depth):
    with pytest.raises(DepthError, match="must be an integer from 1 to 256, not"):
        FpUnit("fp32_add", depth=depth)


def test_sqrt_of_a_format_with_subnormal_roots_is_refused():
    pipe = Pipeline(Module())
    with pytest.raises(FormatError, match="less than 3 bits, not 3"):
        sqrt.sqrt(pipe, FpFormat(3, 3), pipe.source(Signal(7)))


@pytest.mark.parametrize(("exponent", "mantissa"), [(1, 3), (3, 0), (2.0, 3)])
def test_impossible_formats_are_refused(exponent, mantissa):
    with pytest.raises(FormatError, match="must be an integer of at least"):
        FpFormat(exponent, mantissa)
