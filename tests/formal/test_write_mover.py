"""Proofs of the mover of writes, for every stimulus."""

from collections.abc import Sequence

import pytest
from amaranth.hdl import Array, Assert, Assume, Cat, Cover, Module, Mux, Signal, Value
from amaranth.lib import stream
from amaranth.lib.data import View
from amaranth.lib.wiring import Component, In, connect, flipped
from amaranth.utils import bits_for, ceil_log2

from nearstep_hw.axi.burst import BurstLayout, id_width
from nearstep_hw.axi.writer import WriteMover
from nearstep_sim.bench.formal import prove

from .toolkit import MOVER_SHAPES, History, each_shape, opened, refuted

pytestmark = pytest.mark.formal


class AnnounceProperties(Component):
    """AW only with all its data at hand, and held; a response for each burst; idle is idle.

    By induction: what the mover counts is what was made, shown and answered.

    Channel W may do anything: `WriteProperties` are about it.

    Parameters
    ----------
    streams, burst, buffer, ahead : of the mover.
    own, cut : of the mover.
    """

    gains = 0  # 1: the mover is told of a beat in each cycle

    def __init__(
        self,
        *,
        streams: int = 2,
        burst: int = 2,
        buffer: int = 4,
        ahead: int = 4,
        own: Sequence[int] = (),
        cut: bool = False,
    ) -> None:
        self.streams, self.burst, self.buffer, self.own = streams, burst, buffer, tuple(own)
        self.layout = BurstLayout(streams=streams, address_width=12, burst_beats=burst)
        self.dut = WriteMover(
            streams=streams,
            address_width=12,
            beat_bytes=1,
            burst_beats=burst,
            buffer_beats=buffer,
            bursts_ahead=ahead,
            own=own,
            cut=cut,
        )
        super().__init__(
            {
                "i": In(stream.Signature(self.layout)),
                "i_credit": In(1),
                **({"i_credit_own": In(len(own))} if own else {}),
                "i_data": In(streams),
                "i_awready": In(1),
                "i_wready": In(1),
                "i_bvalid": In(1),
                "i_bid": In(id_width(streams)),
                "i_bresp": In(2),
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
        each = range(self.streams)
        width = bits_for(self.buffer) + 1
        have = Array(Signal(width, name=f"have{i}") for i in each)  # made, and not yet shown
        bursts = Array(Signal(range(dut.bursts_ahead + 2), name=f"bursts{i}") for i in each)
        waited = history.before(bus.aw.valid & ~bus.aw.ready)
        shown = bus.aw.valid & ~waited  # for the first time
        m.d.comb += [
            dut.i_credit.eq(self.i_credit | self.gains),
            dut.i_stop.eq(self.i_stop),
            bus.aw.ready.eq(self.i_awready),
            bus.w.ready.eq(self.i_wready),
            bus.b.valid.eq(self.i_bvalid),
            bus.b.payload.id.eq(self.i_bid),
            bus.b.payload.resp.eq(self.i_bresp),
            Assume((burst.beats > 0) & (burst.beats <= self.burst)),
            Assume(burst.stream < self.streams),
            Assume(self.i_bid < self.streams),
            Assume(~self.i_bvalid | (bursts[self.i_bid] != 0)),
            Assert(bus.b.ready),
        ]
        if self.own:
            m.d.comb += dut.i_credit_own.eq(self.i_credit_own)
        for index in each:
            gain = self.i_credit_own[self.own.index(index)] if index in self.own else self.i_credit
            its = shown & (bus.aw.payload.id == index)
            beats = Mux(its, bus.aw.payload.len + 1, 0)
            answered = self.i_bvalid & (self.i_bid == index)
            gained = inside[f"ready_beats.gained{index if index in self.own else ''}"]
            issued = inside[f"responses.issued{index}"]
            held = Signal.like(gained, name=f"held{index}")
            open_ = Signal.like(issued, name=f"open{index}")
            m.d.comb += [
                dut.data[index].valid.eq(self.i_data[index]),
                Assume(~gain | (have[index] < self.buffer + beats)),
                held.eq(gained - inside[f"ready_beats.taken{index}"]),
                open_.eq(issued - inside[f"responses.answered{index}"]),
                Assert(have[index] >= beats),
                Assert(have[index] <= self.buffer + beats),
                Assert(held + beats == have[index]),
                Assert(open_ == bursts[index] + its),
                Assert(open_ <= dut.bursts_ahead),
            ]
            m.d.sync += [
                have[index].eq(have[index] + gain - beats),
                bursts[index].eq(bursts[index] + its - answered),
            ]
            if dut.cut:  # the decision is of a cycle ago, and holds for the burst that waits
                decided = inside["may"] & (burst.stream == index)
                m.d.comb += [
                    Assert(~decided | (held >= burst.beats)),
                    Assert(~decided | (open_ < dut.bursts_ahead)),
                ]
        if dut.cut:
            m.d.comb += Assert(~inside["may"] | dut.i.valid)
        m.d.comb += [
            Assert(dut.o_idle == (~bus.aw.valid & (Cat(*bursts) == 0))),
            Cover((bursts[0] == dut.bursts_ahead) & (have[0] == self.buffer)),
        ]
        with m.If(bus.aw.valid):
            m.d.comb += [
                Assert(bus.aw.payload.len < self.burst),
                Assert(bus.aw.payload.id < self.streams),
            ]
        stopped = history.before(self.i_stop & (~bus.aw.valid | bus.aw.ready))
        with m.If(history.exists & stopped):
            m.d.comb += Assert(~bus.aw.valid)
        for value in (bus.aw.payload.id, bus.aw.payload.addr, bus.aw.payload.len):
            past = history.before(value)
            with m.If(history.exists & waited):
                m.d.comb += [Assert(bus.aw.valid), Assert(value == past)]
        return m


class WriteProperties(Component):
    """AW only with all its data; W in the order and length of AW; idle is idle.

    With `invariants` the others follow by induction: what is on its way to channel W are the bursts
    that were shown and have not ended, in their order.
    """

    STREAMS, BURST, BUFFER = 2, 2, 4

    def __init__(self, *, ahead: int = 4, invariants: bool = False) -> None:
        self.ahead, self.invariants = ahead, invariants
        self.layout = BurstLayout(streams=self.STREAMS, address_width=12, burst_beats=self.BURST)
        super().__init__(
            {
                "i": In(stream.Signature(self.layout)),
                "i_credit": In(1),
                "i_awready": In(1),
                "i_wready": In(1),
                "i_bvalid": In(1),
                "i_bid": In(1),
                "i_stop": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        dut = WriteMover(
            streams=self.STREAMS,
            address_width=12,
            beat_bytes=1,
            burst_beats=self.BURST,
            buffer_beats=self.BUFFER,
            bursts_ahead=self.ahead,
        )
        m.submodules.dut, inside = opened(dut)
        bus, burst = dut.bus, dut.i.payload
        connect(m, flipped(self.i), dut.i)
        history = History(m)
        made = Signal(4)
        each = range(self.STREAMS)
        sent = Array(Signal(4, name=f"sent{i}") for i in each)
        announced = Array(Signal(4, name=f"announced{i}") for i in each)
        unanswered = Array(Signal(4, name=f"unanswered{i}") for i in each)
        # Bursts whose AW is or was shown: the stream and length of each, oldest first.
        order = [Signal(3, name=f"order{i}") for i in range(8)]
        waiting = Signal(4)
        beat = Signal(2)

        shown = bus.aw.valid & ~history.before(bus.aw.valid & ~bus.aw.ready)
        w_fires = bus.w.valid & bus.w.ready
        finished = w_fires & bus.w.payload.last
        m.d.comb += [
            dut.i_credit.eq(self.i_credit),
            dut.i_stop.eq(self.i_stop),
            dut.i_tail.eq(1),
            bus.aw.ready.eq(self.i_awready),
            bus.w.ready.eq(self.i_wready),
            bus.b.valid.eq(self.i_bvalid),
            bus.b.payload.id.eq(self.i_bid),
            Assume((burst.beats > 0) & (burst.beats <= self.BURST)),
            Assume(burst.stream < self.STREAMS),
            Assume(~self.i_bvalid | (unanswered[self.i_bid] != 0)),
            Assert(bus.b.ready),
        ]
        m.d.sync += made.eq(made + self.i_credit)
        offered, in_buffer = [], []
        for index, beats in enumerate(dut.data):
            in_buffer.append(Signal(4, name=f"in_buffer{index}"))
            offered.append(Signal(4, name=f"offered{index}"))
            mine = bus.aw.valid & (bus.aw.payload.id == index)
            m.d.comb += [
                in_buffer[index].eq(made - sent[index]),
                offered[index].eq(Mux(mine, bus.aw.payload.len + 1, 0)),
                beats.valid.eq(in_buffer[index] != 0),
                beats.payload.eq(sent[index]),
                Assume(~self.i_credit | (in_buffer[index] < self.BUFFER)),
                Assert(~beats.ready | beats.valid),
            ]
            m.d.sync += sent[index].eq(sent[index] + (beats.valid & beats.ready))
            with m.If(mine):  # announced beats exist
                m.d.comb += Assert(
                    (announced[index] + offered[index] - sent[index])[:4] <= in_buffer[index]
                )
            with m.If(mine & bus.aw.ready):
                m.d.sync += announced[index].eq(announced[index] + offered[index])
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
        if not self.invariants:
            return m

        # Bursts on their way to W: of the beat that is offered, being sent, at the output of the
        # FIFO, in its memory. The newest may be shown in this cycle.
        known = [Mux(shown & (waiting == index), entry, slot) for index, slot in enumerate(order)]
        length = waiting + shown
        queued, sending = inside["w.bursts.o__valid"], inside["w.sending"]
        current = View(self.layout, inside["w.burst"])
        following = View(self.layout, inside.read_data("w.bursts.memory"))
        rows = inside.rows("w.bursts.memory")
        read = inside["w.bursts.read"]
        stored = Signal.like(read)
        over = bus.w.valid & bus.w.payload.last  # of the first, nothing else is on its way
        begun = bus.w.valid & ~bus.w.payload.last

        def at(place: Value) -> Value:
            return Array(known)[place]

        def whole(where: View, place: Value) -> Value:
            """A burst that has not been begun."""
            its = at(place)
            return (where.stream == its[2:]) & (where.beats == its[:2] + 1) & (where.beats <= 2)

        place = Signal(4)  # of the burst at the output of the FIFO, or of the one behind it
        left = [[] for _ in each]  # beats on their way, of each stream
        m.d.comb += [
            stored.eq(inside["w.bursts.written"] - read),
            place.eq(over + sending),
            Assert(stored <= self.ahead),
            Assert(length == place + queued + stored),
            Assert(length < len(order)),
            Assert(~shown | (stored != 0)),
            Assert(~begun | sending),
            Assert(~bus.w.valid | (bus.w.payload.strb == 1)),
            Assert(bus.w.valid | (beat == 0) | sending),
            Assert(~queued | sending | (place == over)),
            Assert(~queued | whole(following, place)),
            Assert((length == 0) | (known[0][:2] < self.BURST)),
        ]
        with m.If(sending):
            its = at(over)
            sent_of_it = Mux(over, 0, beat + begun)
            m.d.comb += [
                Assert(current.stream == its[2:]),
                Assert(current.beats + sent_of_it == its[:2] + 1),
                Assert((current.beats != 0) & (its[:2] < self.BURST)),
            ]
        for index in each:
            left[index] += [
                Mux(sending & (current.stream == index), current.beats, 0),
                Mux(queued & (following.stream == index), following.beats, 0),
            ]
        for step in range(self.ahead):
            row = View(self.layout, rows[(read + step)[: ceil_log2(self.ahead)]])
            with m.If(step < stored):
                m.d.comb += Assert(whole(row, place + queued + step))
            for index in each:
                left[index].append(Mux((step < stored) & (row.stream == index), row.beats, 0))
        for index in each:
            its_bursts = sum(
                (place < length) & (slot[2:] == index) for place, slot in enumerate(known)
            )
            issued = inside[f"responses.issued{index}"]
            open_ = (issued - inside[f"responses.answered{index}"])[: len(issued)]
            taken, gained = inside[f"ready_beats.taken{index}"], inside["ready_beats.gained"]
            promised = (announced[index] + offered[index])[:4]
            m.d.comb += [
                Assert(open_ == unanswered[index] + its_bursts),
                Assert(open_ <= self.ahead),
                Assert(gained == made[:3]),
                Assert(taken == promised[:3]),
                Assert((promised - sent[index])[:4] == sum(left[index])),
                Assert((gained - taken)[:3] + sum(left[index]) == in_buffer[index]),
                Assert(in_buffer[index] <= self.BUFFER),
            ]
        return m


@each_shape
def test_write_mover_announces_what_is_made_and_knows_what_is_unanswered(shape):
    """By induction: for runs of any length."""
    proof = prove(AnnounceProperties(**MOVER_SHAPES[shape]), "announce", "prove", depth=3)
    assert proof.statements >= 20


@pytest.mark.deep
@pytest.mark.parametrize("cut", [False, True])
def test_write_mover_of_three_streams_announces_what_is_made(cut):
    """Of the bursts and FIFOs of the kernel that `nearstep rtl` writes."""
    shape = {"streams": 3, "burst": 64, "buffer": 512, "ahead": 16, "cut": cut}
    assert prove(AnnounceProperties(**shape), "announce", "prove", depth=3).statements >= 25


@pytest.mark.deep
def test_write_mover_fills_all_of_its_places():
    assert prove(AnnounceProperties(), "announce", "cover", depth=24).statements == 1


@pytest.mark.deep
def test_write_mover_announces_only_what_it_has():
    """By induction, for runs of any length, with two bursts ahead of each stream.

    With four z3 does not end within minutes: the first nine cycles, in which the FIFO of bursts
    fills.
    """
    assert prove(WriteProperties(ahead=2, invariants=True), "writer", "prove", 2).statements >= 40
    assert prove(WriteProperties(), "writer", "bmc", depth=9).statements >= 10
    assert prove(WriteProperties(), "writer", "cover", depth=20).statements == 1


class UnmadeBeats(AnnounceProperties):
    """Of a mover that is told of beats which were not made."""

    gains = 1


@pytest.mark.deep
def test_the_proofs_can_fail():
    refuted(UnmadeBeats(), "unmadebeats", depth=8)
