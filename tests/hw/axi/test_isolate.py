"""AxiIsolate: an initiator is reset at any moment, and nobody behind it notices."""

import random
from collections import deque

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import SimulatorContext

from nearstep_hw.axi.isolate import AxiIsolate
from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_sim.bench.axi_checker import CHANNELS, AxiChecker, ProtocolError
from nearstep_sim.bench.axi_memory import STALL_MODES, AxiMemory
from nearstep_sim.bench.axi_sample import Address, AxiSample, WriteBeat

from ..axi_port import AxiPins
from ..simulate import simulate

IDS, BEAT, BYTES = 4, 4, 1 << 12
WIDTHS = {"address_width": 12, "data_width": 8 * BEAT, "id_width": 2}


class Bare(wiring.Component):
    """What an isolation must not be: wires, of which only the answers are cut."""

    s_axi: In(Axi4Signature(**WIDTHS))
    m_axi: Out(Axi4Signature(**WIDTHS))
    i_isolate: In(1)
    o_isolated: Out(1)
    o_idle: Out(1, init=1)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        connect_channels(m, wiring.flipped(self.s_axi), self.m_axi)
        m.d.sync += self.o_isolated.eq(self.i_isolate)
        with m.If(self.o_isolated):
            for mine, its in ((self.s_axi.r, self.m_axi.r), (self.s_axi.b, self.m_axi.b)):
                m.d.comb += [mine.valid.eq(0), its.ready.eq(1)]
        return m


class Initiator:
    """Reads and writes until it is reset, and knows what belongs to this life of it.

    Attributes
    ----------
    mirror : memory as it is once every beat that was taken is written.
    beats : of answers that were right.
    """

    def __init__(self, rng: random.Random, mirror: np.ndarray, idle: float) -> None:
        self.random = rng
        self.mirror = mirror
        self.idle = idle
        self.beats = 0
        self.reset()

    def reset(self) -> None:
        self.shown: dict[str, tuple[int, ...] | None] = {"ar": None, "aw": None, "w": None}
        self.data: deque[WriteBeat] = deque()  # to be sent
        self.places: deque[int] = deque()  # of the beats whose address was taken
        self.unplaced: deque[tuple[int, WriteBeat]] = deque()
        self.ready = {"r": 1, "b": 1}

    def show(self, going: bool) -> None:
        """Offer what comes next."""
        goes = [going and self.random.random() >= self.idle for _ in range(3)]
        if self.shown["ar"] is None and goes[0]:
            self.shown["ar"] = self._burst()
        if self.shown["aw"] is None and goes[1] and len(self.data) < 40:
            burst = self._burst()
            self.shown["aw"] = burst
            for k in range(burst.len + 1):
                strobe = self.random.choice((15, 15, 0, 6))
                value = self.random.getrandbits(8 * BEAT)
                self.data.append(WriteBeat(value, strobe, int(k == burst.len)))
        if self.shown["w"] is None and self.data and self.random.random() >= self.idle:
            self.shown["w"] = self.data.popleft()
        for channel in self.ready:
            self.ready[channel] = int(self.random.random() >= self.idle / 2)

    def _burst(self) -> Address:
        beats = self.random.choice((1, 2, self.random.randint(1, 16)))
        at = self.random.randrange(BYTES // BEAT - beats + 1) * BEAT
        return Address(self.random.randrange(IDS), at, beats - 1, 2, 1)

    def step(self, seen: AxiSample) -> None:
        """One clock edge."""
        if seen.fires("aw"):
            burst = seen.aw
            self.places += [burst.addr + BEAT * k for k in range(burst.len + 1)]
        if seen.fires("w"):
            at, beat = self.places.popleft(), seen.w
            for k in range(BEAT):
                if beat.strb >> k & 1:
                    self.mirror[at + k] = beat.data >> 8 * k & 0xFF
        for channel in self.shown:
            if seen.fires(channel):
                self.shown[channel] = None
        self.beats += seen.fires("r") + seen.fires("b")


def run(dut: wiring.Component, *, mode: str, seed: int, resets: int, deaf: bool = True) -> dict:
    """Reset the initiator so often; `deaf`: it takes answers when it likes to."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    data = np.random.default_rng(seed).integers(0, 256, BYTES, dtype=np.uint8)
    memory = AxiMemory(
        data, beat_bytes=BEAT, stalls=STALL_MODES[mode], latency=5, seed=seed, reorder=True
    )
    initiator = Initiator(rng, data.copy(), 0.3 if mode in ("source", "both") else 0.05)
    below = AxiChecker(beat_bytes=BEAT, read_ids=IDS, write_ids=IDS, always_ready=False)
    above = AxiChecker(beat_bytes=BEAT, read_ids=IDS, write_ids=IDS, always_ready=False)
    found = dict.fromkeys(("resets", "cycles", "cut off", "drained"), 0)

    inside, outside = AxiPins(dut.s_axi), AxiPins(dut.m_axi)

    async def edge(ctx: SimulatorContext, *, alive: bool, going: bool = True) -> None:
        if alive:
            initiator.show(going)
        inside.ask(ctx, initiator.shown, initiator.ready if deaf else {"r": 1, "b": 1})
        outside.answer(ctx, memory)
        top, port = inside.sample(ctx), outside.sample(ctx)
        await ctx.tick()
        found["cycles"] += 1
        if alive:
            above.step(top)
            initiator.step(top)
        else:
            assert not any(top.fires(channel) for channel in CHANNELS), "it is cut off"
        below.step(port)
        memory.step(port)

    async def bench(ctx: SimulatorContext) -> None:
        for _ in range(resets):
            for _ in range(rng.randint(1, 60)):
                await edge(ctx, alive=True)
            ctx.set(dut.i_isolate, 1)
            while not ctx.get(dut.o_isolated):
                await edge(ctx, alive=True)
            found["cut off"] += any(above._reads) or bool(above._writes)
            initiator.reset()
            above.reset()
            for number in range(2000):
                if ctx.get(dut.o_idle) and number > 3:
                    break
                await edge(ctx, alive=False)
                found["drained"] += 1
            assert ctx.get(dut.o_idle)
            ctx.set(dut.i_isolate, 0)
            while ctx.get(dut.o_isolated):
                await edge(ctx, alive=False)
            found["resets"] += 1
        for _ in range(1000):
            await edge(ctx, alive=True, going=False)
            if ctx.get(dut.o_idle) and not any(initiator.shown.values()):
                break
        above.finish()
        below.finish()
        assert (data == initiator.mirror).all(), "what was written is what was taken"

    simulate(dut, bench)
    found["answers"] = initiator.beats
    print(found)
    return found


def check(mode: str, seed: int, resets: int, *, deaf: bool = True) -> None:
    dut = AxiIsolate(**WIDTHS, bursts=8, write_bursts=4)
    found = run(dut, mode=mode, seed=seed, resets=resets, deaf=deaf)
    assert found["resets"] == resets
    assert found["answers"] > 3 * resets
    assert found["cut off"] > resets // 2


@pytest.mark.parametrize("mode", ["free", "both"])
def test_an_initiator_can_be_reset_at_any_moment(mode: str) -> None:
    check(mode, seed=1, resets=10)


@pytest.mark.deep
@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("mode", STALL_MODES)
def test_an_initiator_can_be_reset_often(mode: str, deaf: bool) -> None:
    check(mode, seed=2, resets=100, deaf=deaf)


def test_a_wire_is_no_isolation() -> None:
    with pytest.raises(ProtocolError) as caught:
        run(Bare(), mode="both", seed=1, resets=20)
    assert caught.value.rule == "read_beat_of_burst"  # of the life before


def test_a_burst_a_cycle_and_a_beat_a_cycle() -> None:
    dut = AxiIsolate(**WIDTHS)
    taken = dict.fromkeys(("ar", "aw", "w"), 0)

    async def bench(ctx: SimulatorContext) -> None:
        for channel in taken:
            ctx.set(getattr(dut.s_axi, channel).valid, 1)
            ctx.set(getattr(dut.m_axi, channel).ready, 1)
        for _ in range(100):
            for channel in taken:
                taken[channel] += ctx.get(getattr(dut.m_axi, channel).valid)
            await ctx.tick()

    simulate(dut, bench)
    assert taken == {"ar": 99, "aw": 99, "w": 97}


@pytest.mark.parametrize("bursts", [0, 3, 12])
def test_bursts_are_a_power_of_two(bursts: int) -> None:
    with pytest.raises(ValueError, match=f"must be a power of two, not {bursts}"):
        AxiIsolate(**WIDTHS, bursts=bursts)
