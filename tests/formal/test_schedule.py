"""Proofs of the schedule of bursts, and of the credits that they take."""

import pytest
from amaranth.hdl import Array, Assert, Assume, Cover, Module, Mux, Signal
from amaranth.lib.wiring import Component, In

from nearstep_hw.axi.credits import BeatCredits
from nearstep_hw.axi.schedule import BlockSchedule
from nearstep_hw.axi.signature import PAGE_BYTES
from nearstep_sim.bench.formal import prove

from .toolkit import History

pytestmark = pytest.mark.formal


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
        ports = ("i_credit_own",) if own else ()
        super().__init__(
            {
                name: In(getattr(self.credits, name).shape())
                for name in ("i_credit", "i_stream", "i_beats", "i_take", "i_clear", *ports)
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
            gain = self.i_credit_own[self.own.index(index)] if index in self.own else self.i_credit
            m.d.comb += Assume(~gain | (count < self.CAPACITY))
            m.d.sync += count.eq(count + gain - Mux(mine, self.i_beats, 0))
            with m.If(self.i_clear):
                m.d.sync += count.eq(self.initial)
        return m


class SchedulePages(Component):
    """Bursts of the real size never cross a page, nor the longest burst, and are never empty."""

    def __init__(self, beat_bytes: int, burst_beats: int, quantized: tuple[int, ...] = ()) -> None:
        self.beat_bytes = beat_bytes
        self.dut = BlockSchedule(
            streams=4,
            address_width=34,
            beat_bytes=beat_bytes,
            block_beats=4 * burst_beats,
            burst_beats=burst_beats,
            quantized=quantized,
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


@pytest.mark.deep
@pytest.mark.parametrize(("initial", "own"), [(0, ()), (3, ()), (3, (1,)), (3, (1, 0))])
def test_credits_are_those_of_plain_counters(initial, own):
    name = f"credits{initial}" + "".join(f"_own{stream}" for stream in own)
    assert prove(CreditProperties(initial, own), name, "bmc", depth=9).statements >= 3
    assert prove(CreditProperties(initial, own), name, "cover", depth=16).statements == 1


@pytest.mark.deep
@pytest.mark.parametrize("quantized", [(), (2, 3)])
@pytest.mark.parametrize(("beat_bytes", "burst_beats"), [(64, 64), (4, 256), (16, 16)])
def test_schedule_never_crosses_a_page(beat_bytes, burst_beats, quantized):
    """By induction: for arrays of any length."""
    dut = SchedulePages(beat_bytes, burst_beats, quantized)
    name = f"pages{beat_bytes}" + "".join(f"_quantized{stream}" for stream in quantized)
    assert prove(dut, name, "prove", depth=3).statements >= 5


@pytest.mark.deep
def test_schedule_covers_every_beat_once():
    assert prove(ScheduleCoverage(), "coverage", "bmc", depth=22).statements >= 6
    assert prove(ScheduleCoverage(), "coverage", "cover", depth=24).statements == 1
