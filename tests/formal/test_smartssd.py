"""Proofs of the decompressors' parts, for every stimulus."""

import pytest
from amaranth.hdl import Assert, Assume, Cover, Module, Mux, Signal
from amaranth.lib import stream
from amaranth.lib.wiring import Component, In, Out, connect, flipped

from nearstep_hw.updater.pairs.bank_grant import BankGrant
from nearstep_hw.updater.pairs.layout import PairLayout
from nearstep_hw.updater.pairs.merge import PairMerge
from nearstep_sim.bench.formal import prove

from .toolkit import refuted

pytestmark = pytest.mark.formal


class GrantProperties(Component):
    """Every request is granted or left, and nobody overtakes within a bank."""

    REQUESTERS, BANKS = 5, 4

    def __init__(self, *, wrong: bool = False) -> None:
        self.wrong = wrong
        self.dut = BankGrant(requesters=self.REQUESTERS, banks=self.BANKS)
        super().__init__({"i_want": In(self.REQUESTERS), "i_bank": In(2).array(self.REQUESTERS)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.dut = dut = self.dut
        count = range(self.REQUESTERS)
        want, bank = self.i_want, self.i_bank
        m.d.comb += [dut.i_want.eq(want), *(dut.i_bank[k].eq(bank[k]) for k in count)]
        got = [Signal(name=f"got{k}") for k in count]
        for k in count:
            mine = [dut.o_first[b][k] | dut.o_second[b][k] for b in range(self.BANKS)]
            m.d.comb += got[k].eq(mine[0] | mine[1] | mine[2] | mine[3])
            for b in range(self.BANKS):
                with m.If(mine[b]):
                    m.d.comb += Assert(want[k] & (bank[k] == b))
            m.d.comb += Assert(dut.o_left[k] == (want[k] & ~got[k]))
            earlier = sum(got[i] & (bank[i] == bank[k]) for i in range(k)) if k else 0
            with m.If(dut.o_left[k]):
                m.d.comb += Assert(earlier == (1 if self.wrong else 2))
            for i in range(k):
                with m.If(got[k] & want[i] & (bank[i] == bank[k])):
                    m.d.comb += Assert(got[i])
        for b in range(self.BANKS):
            for i in count:
                with m.If(dut.o_first[b][i]):
                    m.d.comb += Assert((dut.o_second[b] & ((2 << i) - 1)) == 0)
                    m.d.comb += Assert(dut.o_first[b] == (1 << i))
                with m.If(dut.o_second[b][i]):
                    m.d.comb += Assert(dut.o_second[b] == (1 << i))
                    m.d.comb += Assert(dut.o_first[b].any())
        m.d.comb += Cover(dut.o_left.any() & dut.o_second[0].any())
        return m


class MergeProperties(Component):
    """One element, any: its beat carries the last value that came for it, or zero."""

    LANES, PAIRS, COUNT = 2, 2, 4

    def __init__(self, *, wrong: bool = False) -> None:
        self.wrong = wrong
        self.dut = PairMerge(lanes=self.LANES, pairs=self.PAIRS)
        super().__init__(
            {
                "i": In(stream.Signature(PairLayout(self.PAIRS))),
                "o": Out(self.dut.o.signature),
                "i_element": In(3),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.dut = dut = self.dut
        connect(m, flipped(self.i), dut.i)
        connect(m, dut.o, flipped(self.o))
        cycle = Signal(2)
        element, wanted = Signal(3), Signal(32)
        m.d.sync += [cycle.eq(cycle | 1), element.eq(self.i_element)]
        with m.If(cycle != 0):
            m.d.comb += Assume(self.i_element == element)
        m.d.comb += [
            Assume(self.i_element < self.COUNT),
            dut.i_launch.eq(cycle == 0),
            dut.i_count.eq(self.COUNT),
        ]

        # What PairCheck promises: sorted, in range, full beats up to the end, nothing behind it.
        beat, previous, ended = self.i.payload, Signal(32), Signal()
        first, second = beat.index
        takes = self.i.valid & self.i.ready
        m.d.comb += [
            Assume(~beat.keep[1] | beat.keep[0]),
            Assume(beat.keep.all() | beat.end),
            Assume(~beat.keep[0] | ((first >= previous) & (first < self.COUNT))),
            Assume(~beat.keep[1] | ((second >= first) & (second < self.COUNT))),
            Assume(~ended | ~self.i.valid),
            Assume(beat.cause == 0),
            # What makes no difference, for the solver's sake.
            *(Assume(each[3:] == 0) for each in (*beat.index, *beat.value)),
            Assume(beat.position == 0),
        ]
        with m.If(takes):
            m.d.sync += [previous.eq(second), ended.eq(beat.end)]
            for k in range(self.PAIRS):
                with m.If(beat.keep[k] & (beat.index[k] == self.i_element)):
                    m.d.sync += wanted.eq(beat.value[k])

        beats = Signal(4)
        gives = self.o.valid & self.o.ready
        lane = Mux(self.i_element[0], self.o.payload[1], self.o.payload[0])
        with m.If(gives):
            m.d.sync += beats.eq(beats + 1)
            m.d.comb += Assert(beats < self.COUNT // self.LANES)
            with m.If(beats == self.i_element[1:]):
                m.d.comb += Assert(lane == (wanted + self.wrong)[:32])
        with m.If(dut.o_done):
            m.d.comb += Assert((beats == self.COUNT // self.LANES) & ended)
        m.d.comb += Cover(dut.o_done & (wanted == 3) & (self.i_element == 3))
        return m


@pytest.mark.deep
def test_banks_grant_two_requests_each_in_order() -> None:
    prove(GrantProperties(), "bank_grant", mode="bmc", depth=1)
    prove(GrantProperties(), "bank_grant", mode="cover", depth=1)


@pytest.mark.deep
def test_merged_beats_carry_the_last_value_of_every_element() -> None:
    prove(MergeProperties(), "pair_merge", mode="bmc", depth=9)
    prove(MergeProperties(), "pair_merge", mode="cover", depth=9)


@pytest.mark.deep
def test_the_properties_can_fail() -> None:
    refuted(GrantProperties(wrong=True), "bank_grant_wrong", depth=1)
    refuted(MergeProperties(wrong=True), "pair_merge_wrong", depth=8)
