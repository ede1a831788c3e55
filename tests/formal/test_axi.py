"""Proofs of FIFO, credits, schedule, windows and movers, for every stimulus."""

import pytest
from amaranth.hdl import Array, Assert, Assume, Cover, Module, Mux, Signal, Value
from amaranth.lib import stream
from amaranth.lib.wiring import Component, In, Out, connect, flipped

from nearstep_hw.axi.burst import BurstLayout
from nearstep_hw.axi.credits import BeatCredits
from nearstep_hw.axi.reader import ReadMover
from nearstep_hw.axi.schedule import BlockSchedule
from nearstep_hw.axi.signature import PAGE_BYTES
from nearstep_hw.axi.window import WindowChecker, WindowSignature
from nearstep_hw.axi.writer import WriteMover
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_sim.bench.formal import prove

from .toolkit import History, refuted

pytestmark = pytest.mark.formal


class FifoProperties(Component):
    """Whatever goes in comes out once, in order: followed for one item, the `i_index`th."""

    WIDTH = 2

    def __init__(self, depth: int) -> None:
        self.depth = depth
        super().__init__(
            {
                "i": In(stream.Signature(self.WIDTH)),
                "o": Out(stream.Signature(self.WIDTH)),
                "i_clear": In(1),
                "i_index": In(3),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.fifo = fifo = StreamFifo(self.WIDTH, depth=self.depth)
        connect(m, flipped(self.i), fifo.i)
        connect(m, fifo.o, flipped(self.o))
        m.d.comb += fifo.i_clear.eq(self.i_clear)
        history = History(m)
        history.hold(self.i_index)
        history.keeps_valid(fifo.o, cleared=self.i_clear)

        puts, gets = Signal(4), Signal(4)
        item = Signal(self.WIDTH)
        put, get = fifo.i.valid & fifo.i.ready, fifo.o.valid & fifo.o.ready
        m.d.sync += [puts.eq(puts + put), gets.eq(gets + get)]
        with m.If(put & (puts == self.i_index)):
            m.d.sync += item.eq(fifo.i.payload)
        with m.If(self.i_clear):
            m.d.sync += [puts.eq(0), gets.eq(0)]
        with m.If(fifo.o.valid):
            m.d.comb += Assert(gets < puts)
            with m.If(gets == self.i_index):
                m.d.comb += Assert(fifo.o.payload == item)
        inside = puts - gets
        m.d.comb += [
            Assert(inside <= self.depth + 1),
            # Ready unless the memory is full, whatever is at the output.
            Assert(fifo.i.ready | (inside >= self.depth)),
            Cover(get & (gets == self.depth + 3) & (inside == self.depth)),
            Cover(~fifo.i.ready & (inside == self.depth + 1)),
        ]
        return m


class FifoHandshake(Component):
    """Only the rules of a stream, which hold by induction."""

    def __init__(self) -> None:
        super().__init__({"i": In(stream.Signature(4)), "o": Out(stream.Signature(4))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.fifo = fifo = StreamFifo(4, depth=4)
        connect(m, flipped(self.i), fifo.i)
        connect(m, fifo.o, flipped(self.o))
        History(m).keeps_valid(fifo.o)
        return m


class CreditProperties(Component):
    """Against one plain counter a stream, with every legal order of gains and takes."""

    STREAMS, CAPACITY, BURST = 2, 3, 2

    def __init__(self, initial: int, own: tuple[int, ...]) -> None:
        self.initial = initial
        self.own = own
        self.credits = BeatCredits(
            streams=self.STREAMS,
            capacity=self.CAPACITY,
            burst_beats=self.BURST,
            initial=initial,
            own=own,
        )
        ports = ("i_gain_own",) if own else ()
        super().__init__(
            {
                name: In(getattr(self.credits, name).shape())
                for name in ("i_gain", "i_stream", "i_beats", "i_take", "i_clear", *ports)
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.credits = dut = self.credits
        for name in self.signature.members:
            m.d.comb += getattr(dut, name).eq(getattr(self, name))
        held = [Signal(3, name=f"held{i}", init=self.initial) for i in range(self.STREAMS)]
        m.d.comb += [
            Assume(self.i_take <= dut.o_enough),
            Assume(self.i_stream < self.STREAMS),
            Assume((self.i_beats > 0) & (self.i_beats <= self.BURST)),
            Assert(dut.o_enough == (Array(held)[self.i_stream] >= self.i_beats)),
            Cover((held[0] == self.CAPACITY) & (held[1] == 0)),
        ]
        for index, count in enumerate(held):
            mine = self.i_take & (self.i_stream == index)
            m.d.comb += [Assert(count <= self.CAPACITY)]
            gain = self.i_gain_own[self.own.index(index)] if index in self.own else self.i_gain
            m.d.comb += Assume(~gain | (count < self.CAPACITY))
            m.d.sync += count.eq(count + gain - Mux(mine, self.i_beats, 0))
            with m.If(self.i_clear):
                m.d.sync += count.eq(self.initial)
        return m


class SchedulePages(Component):
    """Bursts of the real size never cross a page, nor the longest burst, and are never empty."""

    def __init__(self, beat_bytes: int, burst_beats: int) -> None:
        self.beat_bytes = beat_bytes
        self.dut = BlockSchedule(
            streams=4,
            address_width=34,
            beat_bytes=beat_bytes,
            block_beats=4 * burst_beats,
            burst_beats=burst_beats,
        )
        super().__init__(
            {
                "i_start": In(1),
                "i_clear": In(1),
                "i_beats": In(self.dut.i_beats.shape()),
                "i_base": In(34).array(4),
                "i_ready": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.dut = dut = self.dut
        m.d.comb += [
            dut.i_start.eq(self.i_start),
            dut.i_clear.eq(self.i_clear),
            dut.i_beats.eq(self.i_beats),
            dut.o.ready.eq(self.i_ready),
        ]
        for mine, its in zip(self.i_base, dut.i_base, strict=True):
            m.d.comb += its.eq(mine)
        history = History(m)
        history.keeps_valid(dut.o, cleared=self.i_clear)
        history.hold(self.i_beats)
        burst = dut.o.payload
        nbytes = burst.beats * self.beat_bytes
        with m.If(dut.o.valid):
            m.d.comb += [
                Assert(burst.address[:12] + nbytes <= PAGE_BYTES),
                Assert(burst.beats <= dut.burst_beats),
                Assert(burst.address % self.beat_bytes == 0),
            ]
        return m


class ScheduleCoverage(Component):
    """Every beat of every array once, in the order of blocks: against a count of beats."""

    STREAMS, BLOCK, BURST, BEAT, BEATS = 2, 2, 2, 2, 3

    def __init__(self) -> None:
        self.dut = BlockSchedule(
            streams=self.STREAMS,
            address_width=6,
            beat_bytes=self.BEAT,
            block_beats=self.BLOCK,
            burst_beats=self.BURST,
        )
        super().__init__(
            {
                "i_beats": In(self.dut.i_beats.shape()),
                "i_base": In(6).array(self.STREAMS),
                "i_ready": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.dut = dut = self.dut
        history = History(m)
        history.hold(self.i_beats, *self.i_base)
        m.d.comb += [
            Assume((self.i_beats > 0) & (self.i_beats <= self.BEATS)),
            dut.i_beats.eq(self.i_beats),
            dut.i_start.eq(~history.exists),
            dut.o.ready.eq(self.i_ready),
        ]
        for mine, its in zip(self.i_base, dut.i_base, strict=True):
            m.d.comb += [Assume(mine % self.BEAT == 0), its.eq(mine)]

        burst = dut.o.payload
        turn = Signal(range(self.STREAMS))
        block = Signal(4)  # first beat of the block
        beat = Signal(4)  # next beat
        end = Signal(4)
        finished = Signal()
        fires = dut.o.valid & dut.o.ready
        last_block = block + self.BLOCK >= self.i_beats
        m.d.comb += end.eq(Mux(last_block, self.i_beats, block + self.BLOCK))
        with m.If(dut.o.valid):
            wanted = (Array(self.i_base)[turn] + beat * self.BEAT)[:6]
            m.d.comb += [
                Assert(~finished),
                Assert(burst.stream == turn),
                Assert(burst.address == wanted),
                Assert((burst.beats > 0) & (beat + burst.beats <= end)),
                Assert(burst.block_last == (beat + burst.beats == end)),
                Assert(burst.run_last == (burst.block_last & last_block)),
            ]
        with m.If(fires):
            m.d.sync += beat.eq(beat + burst.beats)
            with m.If(beat + burst.beats == end):
                m.d.sync += [beat.eq(block), turn.eq(turn + 1)]
                with m.If(turn == self.STREAMS - 1):
                    m.d.sync += [turn.eq(0), block.eq(end), beat.eq(end), finished.eq(last_block)]
        with m.If(history.exists):
            m.d.comb += Assert(dut.o_idle == finished)
        m.d.comb += Cover(finished & (self.i_beats == self.BEATS) & self.i_base[0][1])
        return m


class WindowedReads(Component):
    """Checker and mover: no byte outside the windows is ever asked for on the bus."""

    WINDOWS, BEAT, BURST = 2, 64, 64

    def __init__(self, *, checked: bool = True) -> None:
        self.checked = checked
        self.layout = BurstLayout(streams=4, address_width=34, burst_beats=self.BURST)
        super().__init__(
            {
                "window": In(WindowSignature()).array(self.WINDOWS),
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
@pytest.mark.parametrize("depth", [1, 2])
def test_fifo_gives_every_item_once_and_in_order(depth):
    assert prove(FifoProperties(depth), f"fifo{depth}", "bmc", depth=11).statements >= 5
    assert prove(FifoProperties(depth), f"fifo{depth}", "cover", depth=14).statements == 2


def test_fifo_holds_what_it_offers():
    assert prove(FifoHandshake(), "fifo_handshake", "prove", depth=4).statements >= 2


@pytest.mark.deep
@pytest.mark.parametrize(("initial", "own"), [(0, ()), (3, ()), (3, (1,)), (3, (1, 0))])
def test_credits_are_those_of_plain_counters(initial, own):
    name = f"credits{initial}" + "".join(f"_own{stream}" for stream in own)
    assert prove(CreditProperties(initial, own), name, "bmc", depth=9).statements >= 3
    assert prove(CreditProperties(initial, own), name, "cover", depth=16).statements == 1


@pytest.mark.deep
@pytest.mark.parametrize(("beat_bytes", "burst_beats"), [(64, 64), (4, 256), (16, 16)])
def test_schedule_never_crosses_a_page(beat_bytes, burst_beats):
    """By induction: for arrays of any length."""
    dut = SchedulePages(beat_bytes, burst_beats)
    assert prove(dut, f"pages{beat_bytes}", "prove", depth=3).statements >= 5


@pytest.mark.deep
def test_schedule_covers_every_beat_once():
    assert prove(ScheduleCoverage(), "coverage", "bmc", depth=22).statements >= 6
    assert prove(ScheduleCoverage(), "coverage", "cover", depth=24).statements == 1


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
