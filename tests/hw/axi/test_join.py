"""AxiReadJoin and AxiWriteJoin: every answer reaches who asked, in four stall modes."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.arbiter import StreamArbiter
from nearstep_hw.axi.join import AxiReadJoin, AxiWriteJoin
from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.axi_memory import STALL_MODES, AxiMemory, Stalls
from nearstep_sim.bench.axi_sample import Address, AxiSample, WriteBeat

from ..axi_port import AxiPins
from ..simulate import simulate

PORTS, IDS, BEAT, ID_WIDTH = 3, 4, 4, 2
WIDTHS = {"address_width": 16, "data_width": 8 * BEAT}
AREA = 1 << 12  # bytes of each initiator
READY = {"r": 1, "b": 1}


class Joined(wiring.Component):
    """Both joins side by side."""

    def __init__(self, *, fixed: bool, bursts_ahead: int = 4) -> None:
        options = {"ports": PORTS, **WIDTHS, "id_width": ID_WIDTH, "fixed": fixed}
        self.read = AxiReadJoin(**options)
        self.write = AxiWriteJoin(**options, bursts_ahead=bursts_ahead)
        super().__init__(
            {
                "s_axi": In(Axi4Signature(**WIDTHS, id_width=ID_WIDTH)).array(PORTS),
                "m_axi": Out(Axi4Signature(**WIDTHS, id_width=len(self.read.m_axi.ar.payload.id))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.read, m.submodules.write = self.read, self.write
        for join in (self.read, self.write):
            connect_channels(m, join.m_axi, self.m_axi)
            for mine, its in zip(self.s_axi, join.s_axi, strict=True):
                connect_channels(m, its, mine)
        return m


@dataclass
class Initiator:
    """Reads a shared area and writes one of its own, and knows what has to come back."""

    number: int
    seed: int
    memory: np.ndarray
    idle: float
    reads_left: int = 40
    writes_left: int = 40
    reads: dict[int, deque] = field(default_factory=lambda: {i: deque() for i in range(IDS)})
    unanswered: list[int] = field(default_factory=lambda: [0] * IDS)
    beats: deque = field(default_factory=deque)
    ar: Address | None = None
    aw: Address | None = None
    w: WriteBeat | None = None
    checks: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed * 16 + self.number)
        self.mirror = {}

    @property
    def finished(self) -> bool:
        owed = any(self.reads.values()) or any(self.unanswered) or self.beats
        return not (self.reads_left or self.writes_left or self.ar or self.aw or self.w or owed)

    def step(self, seen: AxiSample) -> None:
        """One clock edge."""
        if seen.fires("ar"):
            self.reads_left -= 1
            self.reads[seen.ar.id].extend(
                (seen.ar.addr + BEAT * k, k == seen.ar.len) for k in range(seen.ar.len + 1)
            )
            self.ar = None
        if seen.fires("aw"):
            self.aw = None
        if seen.fires("w"):
            self.w = None
        if seen.r is not None:
            address, last = self.reads[seen.r.id].popleft()
            wanted = int.from_bytes(self.memory[address : address + BEAT].tobytes(), "little")
            assert (seen.r.data, seen.r.resp, seen.r.last) == (wanted, 0, last)
            self.checks += 1
        if seen.b is not None:
            assert self.unanswered[seen.b.id] > 0
            self.unanswered[seen.b.id] -= 1
            self.checks += 1
        self._offer()

    def _offer(self) -> None:
        if self.ar is None and self.reads_left and self._goes():
            self.ar = self._burst(0, AREA)
        if self.aw is None and self.writes_left and len(self.beats) < 64 and self._goes():
            self.aw = self._burst((1 + self.number) * AREA, AREA)
            self.writes_left -= 1
            self.unanswered[self.aw.id] += 1
            for k in range(self.aw.len + 1):
                value = self.random.getrandbits(8 * BEAT)
                self.mirror[self.aw.addr + BEAT * k] = value
                self.beats.append(WriteBeat(value, (1 << BEAT) - 1, int(k == self.aw.len)))
        # The beats of a burst may be shown before its address is taken.
        if self.w is None and self.beats and self._goes():
            self.w = self.beats.popleft()

    def _goes(self) -> bool:
        return self.random.random() >= self.idle

    def _burst(self, base: int, nbytes: int) -> Address:
        beats = self.random.choice((1, 1, 2, 3, 8))
        at = self.random.randrange(0, nbytes // BEAT - beats)
        return Address(self.random.randrange(IDS), base + BEAT * at, beats - 1, 2, 1)


@pytest.mark.parametrize(
    "fixed",
    [pytest.param(False, id="in-turn"), pytest.param(True, id="fixed", marks=pytest.mark.deep)],
)
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.deep) if mode in ("source", "sink") else mode
        for mode in STALL_MODES
    ],
)
def test_every_answer_reaches_who_asked(mode, fixed):
    seed = 5
    print(f"seed {seed}")
    dut = Joined(fixed=fixed)
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (1 + PORTS) * AREA, dtype=np.uint8)
    memory = AxiMemory(data, beat_bytes=BEAT, stalls=STALL_MODES[mode], seed=seed, reorder=True)
    idle = 0.5 if mode in ("source", "both") else 0.0
    initiators = [Initiator(k, seed, data, idle) for k in range(PORTS)]
    outside = AxiChecker(beat_bytes=BEAT, read_ids=4 * IDS, write_ids=4 * IDS)
    inside = [AxiChecker(beat_bytes=BEAT, read_ids=IDS, write_ids=IDS) for _ in range(PORTS)]

    port, ports = AxiPins(dut.m_axi), [AxiPins(each) for each in dut.s_axi]

    async def bench(ctx):
        for _ in range(20_000):
            for initiator, pins in zip(initiators, ports, strict=True):
                shown = {channel: getattr(initiator, channel) for channel in ("ar", "aw", "w")}
                pins.ask(ctx, shown, READY)
            port.answer(ctx, memory)
            seen = port.sample(ctx)
            each = [pins.sample(ctx) for pins in ports]
            outside.step(seen)
            memory.step(seen)
            for initiator, checker, mine in zip(initiators, inside, each, strict=True):
                checker.step(mine)
                initiator.step(mine)
            if all(initiator.finished for initiator in initiators):
                return
            await ctx.tick()

    simulate(dut, bench)
    checks = 0
    for initiator in initiators:
        assert initiator.finished
        for address, value in initiator.mirror.items():
            assert int.from_bytes(data[address : address + BEAT].tobytes(), "little") == value
            checks += 1
        checks += initiator.checks
    outside.finish()
    assert checks > PORTS * 150, checks


@pytest.mark.parametrize("fixed", [False, True], ids=["in-turn", "fixed"])
def test_a_beat_moves_in_every_cycle_and_direction(fixed):
    """All initiators always have bursts of one beat: nothing waits."""
    dut = Joined(fixed=fixed)
    data = np.zeros((1 + PORTS) * AREA, np.uint8)
    memory = AxiMemory(data, beat_bytes=BEAT, stalls=Stalls())
    cycles, start = 400, 40
    moved = dict.fromkeys(("ar", "r", "aw", "w", "b"), 0)
    served = [0] * PORTS

    port, ports = AxiPins(dut.m_axi), [AxiPins(each) for each in dut.s_axi]

    async def bench(ctx):
        for number, pins in enumerate(ports):
            burst = Address(0, (1 + number) * AREA, 0, 2, 1)
            pins.ask(ctx, {"ar": burst, "aw": burst, "w": (number, 15, 1)}, READY)
        for cycle in range(cycles):
            port.answer(ctx, memory, ("ar", "aw", "w"))
            seen = port.sample(ctx)
            memory.step(seen)
            for number, pins in enumerate(ports):
                mine = pins.sample(ctx)
                if cycle >= start and mine.fires("ar"):
                    served[number] += 1
            if cycle >= start:
                for channel in moved:
                    moved[channel] += seen.fires(channel)
            await ctx.tick()

    simulate(dut, bench)
    assert moved == dict.fromkeys(moved, cycles - start)
    if fixed:
        assert served == [cycles - start, 0, 0]
    else:
        assert served == [(cycles - start) // PORTS] * PORTS


def test_an_arbiter_has_at_least_one_port():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        StreamArbiter(8, ports=0)
