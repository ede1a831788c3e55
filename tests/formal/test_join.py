"""Proofs of the joins: answers reach who asked, data follow their addresses, nothing starves."""

import pytest
from amaranth.hdl import Array, Assert, Assume, Cat, Const, Cover, Module, Mux, Signal
from amaranth.lib import stream
from amaranth.lib.wiring import Component, In, connect, flipped

from nearstep_hw.axi.arbiter import StreamArbiter
from nearstep_hw.axi.join import AxiReadJoin, AxiWriteJoin
from nearstep_hw.axi.signature import Axi4ReadSignature, Axi4WriteSignature, connect_channels
from nearstep_sim.bench.formal import prove

from .toolkit import History, refuted

pytestmark = pytest.mark.formal

PORTS, ID_WIDTH = 2, 1
WIDTHS = {"address_width": 12, "data_width": 8}
OUT_WIDTH = ID_WIDTH + 1


class ArbiterProperties(Component):
    """Every payload taken is the next one given, and who waits has its turn."""

    PORTS = 3

    def __init__(self, *, fixed: bool) -> None:
        self.dut = StreamArbiter(4, ports=self.PORTS, fixed=fixed)
        super().__init__(
            {
                "i": In(stream.Signature(4)).array(self.PORTS),
                "i_stop": In(1),
                "i_ready": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.dut = dut = self.dut
        history = History(m)
        for mine, its in zip(self.i, dut.i, strict=True):
            connect(m, flipped(mine), its)
            history.keeps_valid(its, Assume)
        m.d.comb += [dut.i_stop.eq(self.i_stop), dut.o.ready.eq(self.i_ready)]
        history.keeps_valid(dut.o)

        fires = [port.valid & port.ready for port in dut.i]
        asked = Cat(port.valid for port in dut.i).any()
        held, item, owner = Signal(), Signal(4), Signal(2)
        for number, port in enumerate(dut.i):
            with m.If(fires[number]):
                m.d.sync += [item.eq(port.payload), owner.eq(number)]
        taken = Cat(fires).any()
        m.d.sync += held.eq(taken | (held & ~self.i_ready))
        m.d.comb += [
            Assert(dut.o_take == taken),
            Assert(sum(fires, start=Const(0, 2)) <= 1),
            Assert(dut.o.valid == held),
            Assert(~held | (dut.o.payload.payload == item)),
            Assert(dut.o.payload.owner == owner),
            Assert(owner < self.PORTS),
            Assert(~taken | ~self.i_stop),
            # A payload a cycle.
            Assert(taken | self.i_stop | (held & ~self.i_ready) | ~asked),
            Cover(held & taken & (owner == 1) & fires[0]),
        ]
        if self.dut.fixed:
            for number in range(1, self.PORTS):
                before = Cat(port.valid for port in list(dut.i)[:number]).any()
                m.d.comb += Assert(~fires[number] | ~before)
            return m
        for number, port in enumerate(dut.i):
            others = Signal(3, name=f"others{number}")  # served while this one waits
            with m.If(fires[number] | ~port.valid):
                m.d.sync += others.eq(0)
            with m.Elif(taken):
                m.d.sync += others.eq(others + 1)
            behind = Signal(3, name=f"behind{number}")  # turns until it is its turn
            far = number + self.PORTS - owner
            m.d.comb += [
                behind.eq(Mux(far > self.PORTS, far - self.PORTS, far)),
                Assert(others + behind <= self.PORTS),
                Assert(others < self.PORTS),
            ]
        return m


class ReadJoinProperties(Component):
    """A beat goes to one initiator, and that one is owed it."""

    MOST = 8  # beats that an ID of an initiator asks for at once

    def __init__(self) -> None:
        self.dut = AxiReadJoin(ports=PORTS, **WIDTHS, id_width=ID_WIDTH)
        super().__init__(
            {
                "s_axi": In(Axi4ReadSignature(**WIDTHS, id_width=ID_WIDTH)).array(PORTS),
                "i_arready": In(1),
                "i_rvalid": In(1),
                "i_rid": In(OUT_WIDTH),
                "i_rdata": In(8),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.dut = dut = self.dut
        history = History(m)
        port = dut.m_axi
        for mine, its in zip(self.s_axi, dut.s_axi, strict=True):
            connect_channels(m, its, mine)
            history.keeps_valid(its.ar, Assume)
            m.d.comb += Assume(~its.ar.valid | (its.ar.payload.len < 2))
        m.d.comb += [
            port.ar.ready.eq(self.i_arready),
            port.r.valid.eq(self.i_rvalid),
            port.r.payload.id.eq(self.i_rid),
            port.r.payload.data.eq(self.i_rdata),
            Assert(port.r.ready),
        ]
        history.keeps_valid(port.ar)

        # What memory owes, by the IDs that it saw; and what each initiator is owed, by its own.
        owed = Array(Signal(5, name=f"owed{i}") for i in range(1 << OUT_WIDTH))
        m.d.comb += Assume(~self.i_rvalid | (owed[self.i_rid] != 0))
        for number, count in enumerate(owed):
            asked = port.ar.valid & port.ar.ready & (port.ar.payload.id == number)
            comes = self.i_rvalid & (self.i_rid == number)
            m.d.sync += count.eq(count + Mux(asked, port.ar.payload.len + 1, 0) - comes)
        for number, its in enumerate(dut.s_axi):
            for identifier in range(1 << ID_WIDTH):
                mine = Signal(5, name=f"owed_{number}_{identifier}")
                asks = its.ar.valid & its.ar.ready & (its.ar.payload.id == identifier)
                comes = its.r.valid & (its.r.payload.id == identifier)
                m.d.comb += Assert(~comes | (mine != 0))
                m.d.sync += mine.eq(mine + Mux(asks, its.ar.payload.len + 1, 0) - comes)
                on_the_way = port.ar.valid & (
                    port.ar.payload.id == (number << ID_WIDTH | identifier)
                )
                out = owed[number << ID_WIDTH | identifier]
                m.d.comb += [
                    Assume(~asks | (mine < self.MOST)),
                    Assert(mine == (out + Mux(on_the_way, port.ar.payload.len + 1, 0))[:5]),
                    Assert((mine <= self.MOST + 1) & (out <= self.MOST + 1)),
                ]
            m.d.comb += Assert(~its.r.valid | (its.r.payload.data == self.i_rdata))
        answered = Cat(its.r.valid for its in dut.s_axi)
        m.d.comb += [
            Assert((answered == 0) | (answered == 1) | (answered == 2)),
            Assert(answered.any() == self.i_rvalid),
            Assert(~port.ar.valid | (port.ar.payload.len < 2)),
            Cover((owed[0] != 0) & (owed[3] != 0) & self.i_rvalid & (self.i_rid == 3)),
        ]
        return m


class WriteJoinProperties(Component):
    """Data in the order of addresses, each beat of its own initiator; B where it belongs."""

    DEPTH = 2

    def __init__(self, *, in_order: bool = True) -> None:
        self.in_order = in_order
        self.dut = AxiWriteJoin(
            ports=PORTS, **WIDTHS, id_width=ID_WIDTH, bursts_ahead=self.DEPTH, fixed=True
        )
        super().__init__(
            {
                "s_axi": In(Axi4WriteSignature(**WIDTHS, id_width=ID_WIDTH)).array(PORTS),
                "i_awready": In(1),
                "i_wready": In(1),
                "i_bvalid": In(1),
                "i_bid": In(OUT_WIDTH),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.dut = dut = self.dut
        history = History(m)
        port = dut.m_axi
        for number, (mine, its) in enumerate(zip(self.s_axi, dut.s_axi, strict=True)):
            connect_channels(m, its, mine)
            history.keeps_valid(its.aw, Assume)
            history.keeps_valid(its.w, Assume)
            # Beats are marked with their sender.
            m.d.comb += Assume(~its.w.valid | (its.w.payload.data[0] == number))
        m.d.comb += [
            port.aw.ready.eq(self.i_awready),
            port.w.ready.eq(self.i_wready),
            port.b.valid.eq(self.i_bvalid),
            port.b.payload.id.eq(self.i_bid),
            Assert(port.b.ready),
        ]
        history.keeps_valid(port.aw)
        history.keeps_valid(port.w)

        # Owners of the addresses shown whose last beat was not sent, oldest first.
        slots = self.DEPTH + 2
        order = [Signal(name=f"order{i}") for i in range(slots)]
        waiting = Signal(range(slots + 1))
        shown = port.aw.valid & ~history.before(port.aw.valid & ~port.aw.ready)
        finished = port.w.valid & port.w.ready & port.w.payload.last
        place = waiting - finished
        for index, slot in enumerate(order):
            following = order[index + 1] if index + 1 < slots else slot
            m.d.sync += slot.eq(Mux(finished, following, slot))
            with m.If(shown & (place == index)):
                m.d.sync += slot.eq(port.aw.payload.id[-1])
        m.d.sync += waiting.eq(waiting + shown - finished)
        m.d.comb += [
            Assert(waiting <= slots),
            Assert(~port.w.valid | (waiting != 0)),
            Cover((waiting == 3) & port.w.valid & (order[0] != order[1])),
        ]
        sender = order[0] if self.in_order else ~order[0]
        with m.If(port.w.valid):
            m.d.comb += Assert(port.w.payload.data[0] == sender)
        for number, its in enumerate(dut.s_axi):
            taken = its.w.valid & its.w.ready
            m.d.comb += [
                Assert(taken == (port.w.valid & port.w.ready & (order[0] == number))),
                Assert(its.b.valid == (self.i_bvalid & (self.i_bid[-1] == number))),
                Assert(~its.b.valid | (its.b.payload.id == self.i_bid[:ID_WIDTH])),
            ]
        return m


@pytest.mark.parametrize(
    "fixed",
    [pytest.param(False, id="in-turn"), pytest.param(True, id="fixed", marks=pytest.mark.deep)],
)
def test_arbiter_gives_what_it_took_and_nobody_starves(fixed):
    """By induction: for streams of any length."""
    name = f"arbiter_{'fixed' if fixed else 'turn'}"
    assert prove(ArbiterProperties(fixed=fixed), name, "prove", depth=6).statements >= 9
    assert prove(ArbiterProperties(fixed=fixed), name, "cover", depth=8).statements == 1


@pytest.mark.deep
def test_a_beat_reaches_the_initiator_that_is_owed_it():
    """By induction: for any number of bursts."""
    assert prove(ReadJoinProperties(), "read_join", "prove", depth=3).statements >= 12
    assert prove(ReadJoinProperties(), "read_join", "cover", depth=10).statements == 1


@pytest.mark.deep
def test_write_data_follow_the_order_of_their_addresses():
    assert prove(WriteJoinProperties(), "write_join", "bmc", depth=12).statements >= 10
    assert prove(WriteJoinProperties(), "write_join", "cover", depth=12).statements == 1


@pytest.mark.deep
def test_the_proof_of_the_order_can_fail():
    refuted(WriteJoinProperties(in_order=False), "write_join_out_of_order", depth=8)
