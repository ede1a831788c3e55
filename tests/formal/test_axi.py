"""Proofs of windows and movers, for every stimulus."""

import pytest
from amaranth.hdl import Array, Assert, Assume, Cover, Module, Mux, Signal, Value
from amaranth.lib import stream
from amaranth.lib.wiring import Component, In, connect, flipped

from nearstep_hw.axi.burst import BurstLayout
from nearstep_hw.axi.reader import ReadMover
from nearstep_hw.axi.window import WindowChecker, WindowSignature
from nearstep_hw.axi.writer import WriteMover
from nearstep_sim.bench.formal import prove

from .toolkit import History, refuted

pytestmark = pytest.mark.formal


class WindowedReads(Component):
    """Checker and mover: no byte outside the windows is ever asked for on the bus."""

    WINDOWS, BEAT, BURST = 2, 64, 64

    def __init__(self, *, checked: bool = True) -> None:
        self.checked = checked
        self.layout = BurstLayout(streams=4, address_width=34, burst_beats=self.BURST)
        super().__init__(
            {
                "window": In(WindowSignature(34)).array(self.WINDOWS),
                "i": In(stream.Signature(self.layout)),
                "i_ready": In(1),
                "i_byte": In(34),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.checker = checker = WindowChecker(
            self.layout, beat_bytes=self.BEAT, windows=self.WINDOWS, write=False
        )
        m.submodules.mover = mover = ReadMover(
            streams=4,
            address_width=34,
            beat_bytes=self.BEAT,
            burst_beats=self.BURST,
            landing_beats=2 * self.BURST,
            bursts_ahead=8,
        )
        history = History(m)
        history.hold(self.i_byte)  # one byte, but any
        for mine, its in zip(self.window, checker.window, strict=True):
            connect(m, flipped(mine), its)
            history.hold(*(getattr(mine, name) for name in mine.signature.members))
        if self.checked:
            connect(m, flipped(self.i), checker.i)
            connect(m, checker.o, mover.i)
        else:
            connect(m, flipped(self.i), mover.i)
        m.d.comb += [
            checker.i_clear.eq(self.i_clear),
            mover.bus.ar.ready.eq(self.i_ready),
            Assume((self.i.payload.beats > 0) & (self.i.payload.beats <= self.BURST)),
        ]
        bus = mover.bus

        def granted(address: Value, beats: Value) -> Value:
            """The byte `i_byte` is not in the burst, or a window allows to read it."""
            byte = self.i_byte
            inside = (address <= byte) & (byte < address + beats * self.BEAT)
            allowed = [w.valid & w.read & (w.base <= byte) & (byte < w.limit) for w in self.window]
            return ~inside | allowed[0] | allowed[1]

        with m.If(bus.ar.valid):
            m.d.comb += Assert(granted(bus.ar.payload.addr, bus.ar.payload.len + 1))
        if self.checked:
            with m.If(checker.o.valid):
                offered = checker.o.payload
                m.d.comb += [
                    Assert(granted(offered.address, offered.beats)),
                    Assert((offered.beats > 0) & (offered.beats <= self.BURST)),
                ]
            with m.If(checker.o_refused):
                m.d.comb += Assert(~checker.o.valid & ~checker.i.ready)
        history.keeps_valid(checker.o, cleared=self.i_clear)
        m.d.comb += [
            Cover(bus.ar.valid & granted(bus.ar.payload.addr, bus.ar.payload.len + 1)),
            Cover(checker.o_refused),
        ]
        return m


class ReadProperties(Component):
    """Every beat that was asked for has a place; AR holds; the mover is idle only when it is."""

    STREAMS, BEAT, BURST, LANDING = 2, 1, 2, 4

    def __init__(self) -> None:
        self.dut = ReadMover(
            streams=self.STREAMS,
            address_width=12,
            beat_bytes=self.BEAT,
            burst_beats=self.BURST,
            landing_beats=self.LANDING,
            bursts_ahead=8,
        )
        super().__init__(
            {
                "i": In(stream.Signature(self.layout())),
                "i_arready": In(1),
                "i_rvalid": In(1),
                "i_rid": In(1),
                "i_gain": In(1),
                "i_stop": In(1),
            }
        )

    def layout(self) -> BurstLayout:
        return BurstLayout(streams=self.STREAMS, address_width=12, burst_beats=self.BURST)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.dut = dut = self.dut
        bus, burst = dut.bus, dut.i.payload
        connect(m, flipped(self.i), dut.i)
        history = History(m)

        # The memory: beats it owes each stream, and where its bursts end.
        owed = Array(Signal(4, name=f"owed{i}") for i in range(self.STREAMS))
        landed = Array(Signal(4, name=f"landed{i}") for i in range(self.STREAMS))
        ends = Array(Signal(16, name=f"ends{i}") for i in range(self.STREAMS))
        behind = Signal(4)  # beats owed behind the one that comes
        m.d.comb += [
            behind.eq(owed[self.i_rid] - 1),
            dut.i_gain.eq(self.i_gain),
            dut.i_stop.eq(self.i_stop),
            bus.ar.ready.eq(self.i_arready),
            bus.r.valid.eq(self.i_rvalid),
            bus.r.payload.id.eq(self.i_rid),
            bus.r.payload.last.eq(ends[self.i_rid].bit_select(behind, 1)),
            Assume((burst.beats > 0) & (burst.beats <= self.BURST)),
            Assume(burst.stream < self.STREAMS),
            Assume(burst.address[1:] == 0),  # an address is only handed on: two will do
            Assume(~self.i_rvalid | (owed[self.i_rid] != 0)),
            Assume(~self.i_gain | ((landed[0] != 0) & (landed[1] != 0))),
            Assert(bus.r.ready),
        ]
        for index in range(self.STREAMS):
            asked = bus.ar.valid & self.i_arready & (bus.ar.payload.id == index)
            comes = self.i_rvalid & (self.i_rid == index)
            beats = bus.ar.payload.len + 1
            m.d.comb += Assert(dut.o_landed[index] == comes)
            m.d.sync += [
                owed[index].eq(owed[index] + Mux(asked, beats, 0) - comes),
                landed[index].eq(landed[index] + comes - self.i_gain),
            ]
            with m.If(asked):  # the bit of a beat is the number of beats owed behind it
                m.d.sync += ends[index].eq((ends[index] << beats) | 1)
            # Beats that are in FIFOs, on their way, or offered on AR.
            offered = Mux(bus.ar.valid & (bus.ar.payload.id == index), beats, 0)
            m.d.comb += Assert(landed[index] + owed[index] + offered <= self.LANDING)
        nothing = (owed[0] == 0) & (owed[1] == 0) & ~bus.ar.valid
        m.d.comb += Assert(dut.o_idle == nothing)

        ar = (bus.ar.payload.id, bus.ar.payload.addr, bus.ar.payload.len)
        waits = history.before(bus.ar.valid & ~bus.ar.ready)
        stopped = history.before(self.i_stop & (~bus.ar.valid | bus.ar.ready))
        for value in ar:
            past = history.before(value)
            with m.If(history.exists & waits):
                m.d.comb += [Assert(bus.ar.valid), Assert(value == past)]
        with m.If(history.exists & stopped):
            m.d.comb += Assert(~bus.ar.valid)
        m.d.comb += Cover((landed[0] == self.LANDING) & (landed[1] == self.LANDING))
        return m


class WriteProperties(Component):
    """AW only with all its data; W in the order and length of AW; idle is idle."""

    STREAMS, BURST, BUFFER = 2, 2, 4

    def __init__(self) -> None:
        self.layout = BurstLayout(streams=self.STREAMS, address_width=12, burst_beats=self.BURST)
        super().__init__(
            {
                "i": In(stream.Signature(self.layout)),
                "i_gain": In(1),
                "i_awready": In(1),
                "i_wready": In(1),
                "i_bvalid": In(1),
                "i_bid": In(1),
                "i_stop": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.dut = dut = WriteMover(
            streams=self.STREAMS,
            address_width=12,
            beat_bytes=1,
            burst_beats=self.BURST,
            buffer_beats=self.BUFFER,
            bursts_ahead=4,
        )
        bus, burst = dut.bus, dut.i.payload
        connect(m, flipped(self.i), dut.i)
        history = History(m)
        made = Signal(4)
        sent = Array(Signal(4, name=f"sent{i}") for i in range(self.STREAMS))
        announced = Array(Signal(4, name=f"announced{i}") for i in range(self.STREAMS))
        unanswered = Array(Signal(4, name=f"unanswered{i}") for i in range(self.STREAMS))
        # Bursts whose AW is or was shown: the stream and length of each, oldest first.
        order = [Signal(3, name=f"order{i}") for i in range(8)]
        waiting = Signal(4)
        beat = Signal(2)

        shown = bus.aw.valid & ~history.before(bus.aw.valid & ~bus.aw.ready)
        w_fires = bus.w.valid & bus.w.ready
        finished = w_fires & bus.w.payload.last
        m.d.comb += [
            dut.i_gain.eq(self.i_gain),
            dut.i_stop.eq(self.i_stop),
            dut.i_tail.eq(1),
            bus.aw.ready.eq(self.i_awready),
            bus.w.ready.eq(self.i_wready),
            bus.b.valid.eq(self.i_bvalid),
            bus.b.payload.id.eq(self.i_bid),
            Assume((burst.beats > 0) & (burst.beats <= self.BURST)),
            Assume(burst.stream < self.STREAMS),
            Assume(burst.address[1:] == 0),  # an address is only handed on: two will do
            Assume(~self.i_bvalid | (unanswered[self.i_bid] != 0)),
            Assert(bus.b.ready),
        ]
        m.d.sync += made.eq(made + self.i_gain)
        for index, beats in enumerate(dut.data):
            in_buffer = made - sent[index]
            m.d.comb += [
                beats.valid.eq(in_buffer != 0),
                beats.payload.eq(sent[index]),
                Assume(~self.i_gain | (in_buffer < self.BUFFER)),
                Assert(~beats.ready | beats.valid),
            ]
            m.d.sync += sent[index].eq(sent[index] + (beats.valid & beats.ready))
            mine = bus.aw.valid & (bus.aw.payload.id == index)
            with m.If(mine):  # announced beats exist
                m.d.comb += Assert(
                    (announced[index] + bus.aw.payload.len + 1)[:4] - sent[index] <= in_buffer
                )
            with m.If(mine & bus.aw.ready):
                m.d.sync += announced[index].eq(announced[index] + bus.aw.payload.len + 1)
            ends = finished & (order[0][2:] == index)
            answered = self.i_bvalid & (self.i_bid == index)
            m.d.sync += unanswered[index].eq(unanswered[index] + ends - answered)

        entry = Signal(3)
        m.d.comb += entry.eq((bus.aw.payload.id[0] << 2) | bus.aw.payload.len[:2])
        place = waiting - finished
        for index, slot in enumerate(order):
            following = order[index + 1] if index + 1 < len(order) else slot
            m.d.sync += slot.eq(Mux(finished, following, slot))
            with m.If(shown & (place == index)):
                m.d.sync += slot.eq(entry)
        m.d.sync += waiting.eq(waiting + shown - finished)
        with m.If(bus.w.valid):
            m.d.comb += [
                Assert(waiting != 0),
                Assert(bus.w.payload.last == (beat == order[0][:2])),
                Assert(bus.w.payload.strb == 1),
            ]
        with m.If(w_fires):
            m.d.sync += beat.eq(Mux(bus.w.payload.last, 0, beat + 1))

        nothing = ~bus.aw.valid & (waiting == 0) & (unanswered[0] == 0) & (unanswered[1] == 0)
        m.d.comb += [Assert(dut.o_idle == nothing)]
        for valid, ready, values in (
            (
                bus.aw.valid,
                bus.aw.ready,
                (bus.aw.payload.id, bus.aw.payload.addr, bus.aw.payload.len),
            ),
            (bus.w.valid, bus.w.ready, (bus.w.payload.data, bus.w.payload.last)),
        ):
            waits = history.before(valid & ~ready)
            for value in values:
                past = history.before(value)
                with m.If(history.exists & waits):
                    m.d.comb += [Assert(valid), Assert(value == past)]
        m.d.comb += Cover((waiting == 3) & bus.w.valid)
        return m


@pytest.mark.deep
def test_a_refused_burst_never_reaches_the_bus():
    """By induction: for runs of any length."""
    assert prove(WindowedReads(), "windows", "prove", depth=3).statements >= 4


@pytest.mark.deep
def test_the_window_proof_fails_without_the_checker():
    assert prove(WindowedReads(), "windows", "cover", depth=8).statements == 2
    refuted(WindowedReads(checked=False), "windows_unchecked", depth=6)


@pytest.mark.deep
def test_read_mover_reserves_a_place_for_every_beat():
    assert prove(ReadProperties(), "reader", "bmc", depth=8).statements >= 8
    assert prove(ReadProperties(), "reader", "cover", depth=16).statements == 1


@pytest.mark.deep
def test_write_mover_announces_only_what_it_has():
    assert prove(WriteProperties(), "writer", "bmc", depth=9).statements >= 10
    assert prove(WriteProperties(), "writer", "cover", depth=20).statements == 1
