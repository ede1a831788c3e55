"""Proofs of the mover of reads, for every stimulus."""

from collections.abc import Sequence

import pytest
from amaranth.hdl import Array, Assert, Assume, Cat, Cover, Module, Mux, Signal, Value
from amaranth.lib import stream
from amaranth.lib.wiring import Component, In, connect, flipped
from amaranth.utils import bits_for

from nearstep_hw.axi.burst import BurstLayout, id_width
from nearstep_hw.axi.reader import ReadMover
from nearstep_sim.bench.formal import prove

from .toolkit import MOVER_SHAPES, History, each_shape, opened, refuted

pytestmark = pytest.mark.formal


class ReadProperties(Component):
    """Every beat that was asked for has a place; AR holds; the mover is idle only when it is.

    The last ones are invariants, of which the others follow by induction: what the mover counts is
    what its memory owes.

    Parameters
    ----------
    streams, burst, landing : of the mover; bursts may be of any length up to `burst`.
    own, cut : of the mover.
    """

    def __init__(
        self,
        *,
        streams: int = 2,
        burst: int = 2,
        landing: int = 4,
        own: Sequence[int] = (),
        cut: bool = False,
    ) -> None:
        self.streams, self.burst, self.landing, self.own = streams, burst, landing, tuple(own)
        self.layout = BurstLayout(streams=streams, address_width=12, burst_beats=burst)
        self.dut = ReadMover(
            streams=streams,
            address_width=12,
            beat_bytes=1,
            burst_beats=burst,
            landing_beats=landing,
            bursts_ahead=8,
            own=own,
            cut=cut,
        )
        super().__init__(
            {
                "i": In(stream.Signature(self.layout)),
                "i_arready": In(1),
                "i_rvalid": In(1),
                "i_rid": In(id_width(streams)),
                "i_rlast": In(1),
                "i_credit": In(1),
                **({"i_credit_own": In(len(own))} if own else {}),
                "i_stop": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        dut = self.dut
        m.submodules.dut, inside = opened(dut)
        bus, burst = dut.bus, dut.i.payload
        connect(m, flipped(self.i), dut.i)
        history = History(m)
        history.keeps_valid(dut.i, Assume)

        # The memory: beats and bursts that it owes each stream. Where a burst ends is left open,
        # but for the last beat owed: more than a memory of AXI may do.
        each = range(self.streams)
        width = bits_for(self.landing) + 1
        owed = Array(Signal(width, name=f"owed{i}") for i in each)
        few = bits_for(dut.bursts_ahead)
        bursts = Array(Signal(few, name=f"bursts{i}") for i in each)
        landed = Array(Signal(width, name=f"landed{i}") for i in each)
        beats_then, bursts_then = Signal(width), Signal(few)
        m.d.comb += [
            beats_then.eq(owed[self.i_rid] - 1),
            bursts_then.eq(bursts[self.i_rid] - self.i_rlast),
            Assume(~self.i_rvalid | (bursts_then <= beats_then)),
            Assume(~self.i_rvalid | ((bursts_then == 0) == (beats_then == 0))),
            dut.i_credit.eq(self.i_credit),
            dut.i_stop.eq(self.i_stop),
            bus.ar.ready.eq(self.i_arready),
            bus.r.valid.eq(self.i_rvalid),
            bus.r.payload.id.eq(self.i_rid),
            bus.r.payload.last.eq(self.i_rlast),
            Assume((burst.beats > 0) & (burst.beats <= self.burst)),
            Assume(burst.stream < self.streams),
            Assume(self.i_rid < self.streams),
            Assume(~self.i_rvalid | (owed[self.i_rid] != 0)),
            Assert(bus.r.ready),
        ]
        if self.own:
            m.d.comb += dut.i_credit_own.eq(self.i_credit_own)
        outstanding: Value = bus.ar.valid
        for index in each:
            gain = self.i_credit_own[self.own.index(index)] if index in self.own else self.i_credit
            asked = bus.ar.valid & self.i_arready & (bus.ar.payload.id == index)
            comes = self.i_rvalid & (self.i_rid == index)
            beats = bus.ar.payload.len + 1
            m.d.comb += [
                Assume(~gain | (landed[index] != 0)),
                Assert(dut.o_beat[index] == comes),
            ]
            m.d.sync += [
                owed[index].eq(owed[index] + Mux(asked, beats, 0) - comes),
                bursts[index].eq(bursts[index] + asked - (comes & self.i_rlast)),
                landed[index].eq(landed[index] + comes - gain),
            ]
            # Beats that are in FIFOs, on their way, or offered on AR.
            offered = Mux(bus.ar.valid & (bus.ar.payload.id == index), beats, 0)
            used = landed[index] + owed[index] + offered
            m.d.comb += Assert(used <= self.landing)

            gained = inside[f"space.gained{index if index in self.own else ''}"]
            space = Signal.like(gained, name=f"space{index}")
            m.d.comb += [
                space.eq(gained - inside[f"space.taken{index}"]),
                Assert(used + space == self.landing),
                Assert(bursts[index] <= owed[index]),
                Assert((bursts[index] == 0) == (owed[index] == 0)),
            ]
            outstanding += bursts[index]
            if dut.cut:  # the decision is of a cycle ago, and holds for the burst that waits
                its = burst.stream == index
                m.d.comb += Assert(~inside["may"] | ~its | (space >= burst.beats))
        if dut.cut:
            may = inside["may"]
            m.d.comb += Assert(~may | (dut.i.valid & (inside["outstanding"] != dut.bursts_ahead)))
        m.d.comb += [
            Assert(inside["outstanding"] == outstanding),
            Assert(inside["outstanding"] <= dut.bursts_ahead),
        ]
        nothing = Cat(*owed) == 0
        m.d.comb += Assert(dut.o_idle == (nothing & ~bus.ar.valid))

        ar = (bus.ar.payload.id, bus.ar.payload.addr, bus.ar.payload.len)
        waits = history.before(bus.ar.valid & ~bus.ar.ready)
        stopped = history.before(self.i_stop & (~bus.ar.valid | bus.ar.ready))
        with m.If(bus.ar.valid):
            m.d.comb += [
                Assert(bus.ar.payload.len < self.burst),
                Assert(bus.ar.payload.id < self.streams),
            ]
        for value in ar:
            past = history.before(value)
            with m.If(history.exists & waits):
                m.d.comb += [Assert(bus.ar.valid), Assert(value == past)]
        with m.If(history.exists & stopped):
            m.d.comb += Assert(~bus.ar.valid)
        m.d.comb += Cover((landed[0] == self.landing) & (landed[1] == self.landing))
        return m


@each_shape
def test_read_mover_reserves_a_place_for_every_beat(shape):
    """By induction: for runs of any length."""
    proof = prove(ReadProperties(**MOVER_SHAPES[shape]), "reader", "prove", depth=3, solver="z3")
    assert proof.statements >= 20


@pytest.mark.deep
@pytest.mark.parametrize(
    "shape",
    [
        {"streams": 4, "burst": 4, "landing": 8, "own": (1,), "cut": True},
        {"streams": 4, "burst": 64, "landing": 512},
    ],
    ids=["four streams", "as shipped"],
)
def test_read_mover_of_four_streams_reserves_a_place_for_every_beat(shape):
    """The second has the streams, bursts and FIFOs of the kernel that `nearstep rtl` writes; its
    data are of one byte, which are only handed on. z3 takes minutes."""
    assert prove(ReadProperties(**shape), "reader", "prove", depth=3, solver="z3").statements >= 30


@pytest.mark.deep
def test_read_mover_fills_all_of_its_places():
    assert prove(ReadProperties(), "reader", "cover", depth=16).statements == 1


class MoreSpace(ReadProperties):
    """Of a mover that believes in a place more than there is."""

    def __init__(self) -> None:
        super().__init__(landing=5)
        self.landing = 4


@pytest.mark.deep
def test_the_proofs_can_fail():
    refuted(MoreSpace(), "morespace", depth=8)
