"""Proof that the accumulator of exact sums cannot overflow with as many addends as it is built
for."""

import pytest
from amaranth.hdl import Assert, Assume, Cover, Module, Signal
from amaranth.lib.wiring import Component, In

from nearstep_hw.coarse.exact import AddendLayout, ExactAccumulator
from nearstep_sim.bench.formal import prove
from nearstep_spec.coarse.config import MAX_ADDENDS
from nearstep_spec.fp import BF16, FP16, FP32, FpFormat

from .toolkit import opened, refuted

pytestmark = pytest.mark.formal

TINY = FpFormat(4, 2)


class NoOverflow(Component):
    """Any addends, at most `allowed` to a sum: no addition leaves its word, nor its carry.

    A word is within the addends since the last sum times the greatest change of a word: an
    invariant. A carry is within the number of addends.

    Parameters
    ----------
    whole : also prove that all words together are within the addends times the largest number, so
        that the last carry is the sign. Of five words, solvers do not find the proof.
    """

    def __init__(self, fmt: FpFormat, allowed: int, *, whole: bool, **shape: int) -> None:
        self.unit = ExactAccumulator(fmt, **shape)
        self.allowed = allowed
        self.whole = whole
        super().__init__({"i_valid": In(1), "i_payload": In(AddendLayout(fmt)), "i_ready": In(1)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        unit, allowed, width = self.unit, self.allowed, self.unit.word_bits
        m.submodules.unit, inside = opened(unit)
        valid, last, placed, index = (inside[n] for n in ("valid", "last", "placed", "index"))
        fires, moves = Signal(), Signal()
        taken = Signal(range(allowed + 2))  # addends of the sum that goes on
        added = Signal(range(allowed + 2))  # addends in the words
        m.d.comb += [
            unit.i.valid.eq(self.i_valid),
            unit.i.payload.eq(self.i_payload),
            unit.o.ready.eq(self.i_ready),
            unit.i_clear.eq(0),
            fires.eq(unit.i.valid & unit.i.ready),
            moves.eq(valid & unit.i.ready),
            Assume(~fires | unit.i.payload.last | (taken + 1 < allowed)),
        ]
        with m.If(fires):
            m.d.sync += taken.eq(taken + 1)
            with m.If(unit.i.payload.last):
                m.d.sync += taken.eq(0)
        with m.If(moves):
            m.d.sync += added.eq(added + 1)
            with m.If(last):
                m.d.sync += added.eq(0)
        with m.If(valid & last):
            m.d.comb += Assert((taken == 0) & (added < allowed))
        with m.Else():
            m.d.comb += Assert((taken == added + valid) & (taken < allowed))

        limit = 1 << (width + unit.carry_bits)  # words have one bit more, the sign
        bound = (added << width) - added
        most = allowed * ((1 << width) - 1)
        words = [inside[f"word{number}"] for number in range(unit.words)]
        for number, word in enumerate(words):
            left = inside[f"left{number}"]
            m.d.comb += [
                Assert((word <= bound) & (word >= -bound)),
                Assert((left <= most) & (left >= -most)),
            ]
            for part in (placed[:width], placed[width:]):
                m.d.comb += Assert((word + part < limit) & (word - part >= -limit))
        for name in ("sum", "less"):
            carry = inside[f"carry_{name}"]
            for number in range(unit.pace):
                total = inside[f"left{number}"] + carry
                m.d.comb += [
                    Assert((carry <= allowed) & (carry >= -allowed)),
                    Assert((total <= allowed << width) & (total >= -(allowed << width))),
                ]
                carry = total >> width
        if self.whole:
            largest = (1 << unit.number_bits) - 1
            sums = sum((word << (number * width) for number, word in enumerate(words)), 0)
            m.d.comb += [
                Assert((placed << index * width) <= largest),
                Assert((sums <= added * largest) & (sums >= -(added * largest))),
            ]
            assert allowed * largest < 1 << unit.words * width
        m.d.comb += Cover(added == allowed - 1)
        return m


@pytest.mark.parametrize(
    ("fmt", "whole", "shape"),
    [
        (TINY, True, {"addends": 4, "word_bits": 8}),
        pytest.param(TINY, True, {"addends": 4, "word_bits": 8, "pace": 3}, marks=pytest.mark.deep),
        pytest.param(FP16, True, {}, marks=pytest.mark.deep),
        pytest.param(BF16, False, {}, marks=pytest.mark.deep),
        pytest.param(FP32, False, {}, marks=pytest.mark.deep),
    ],
    ids=["tiny", "three_words", "fp16", "bf16", "fp32"],
)
def test_no_word_overflows(fmt: FpFormat, whole: bool, shape: dict[str, int]) -> None:
    allowed = shape.get("addends", MAX_ADDENDS)
    proof = prove(
        NoOverflow(fmt, allowed, whole=whole, **shape),
        f"exact_{fmt.name}_{shape.get('pace', 1)}",
        "prove",
        2,
    )
    assert proof.statements > 8


def test_one_addend_more_than_it_is_built_for_may_overflow() -> None:
    refuted(NoOverflow(TINY, 5, whole=False, addends=4, word_bits=8), "exact_overflows", 12)
