"""AxiCut: on all five channels everything passes once, in order, through registers alone."""

import random

import pytest
from amaranth.hdl import Value

from nearstep_hw.axi.cut import AxiCut
from nearstep_hw.axi.signature import Axi4Signature
from nearstep_sim.bench.stream_bench import STALLS

from ..simulate import simulate

WIDTHS = {"address_width": 16, "data_width": 32, "id_width": 3}
REQUESTS, ANSWERS = ("ar", "aw", "w"), ("r", "b")
COUNT = 80


class Channel:
    """A channel through the cut: random beats go in, and what comes out is compared.

    Attributes
    ----------
    sent, came : beats so far.
    first, last : cycles in which the first beat went in, and the last came out.
    held : cycles in which a beat that waited was seen to be what it had been.
    """

    def __init__(self, dut, name, seed, *, stalls):
        ends = getattr(dut.s_axi, name), getattr(dut.m_axi, name)
        self.source, self.sink = ends if name in REQUESTS else ends[::-1]
        self.payload = Value.cast(self.source.payload)
        self.out = (Value.cast(self.sink.payload), self.sink.valid)
        self.name = name
        self.random = random.Random(f"{seed} {name}")
        self.idle, self.refuse = stalls
        self.beats = [self.random.getrandbits(len(self.payload)) for _ in range(COUNT)]
        self.sent = self.came = self.held = 0
        self.first = self.last = None
        self.offers = False
        self.waits = None

    def cycle(self, ctx, number):
        """Drive both ends, and look at them; then the clock ticks."""
        before = self.of_cut(ctx)
        if not self.offers and self.sent < COUNT:
            self.offers = self.random.random() >= self.idle
        noise = self.random.getrandbits(len(self.payload))
        ctx.set(self.source.valid, self.offers)
        ctx.set(self.payload, self.beats[self.sent] if self.offers else noise)
        takes = self.random.random() >= self.refuse
        ctx.set(self.sink.ready, takes)
        now = payload, valid, ready = self.of_cut(ctx)
        assert now == before, f"{self.name}, cycle {number}: not of a register"
        if self.waits is not None:
            assert (payload, valid) == (self.waits, 1), f"{self.name}, cycle {number}"
            self.held += 1
        self.waits = payload if valid and not takes else None
        if valid and takes:
            assert self.came < self.sent, f"{self.name}, cycle {number}: nothing went in"
            assert payload == self.beats[self.came], f"{self.name}, beat {self.came}"
            self.came, self.last = self.came + 1, number
        if self.offers and ready:
            self.first = number if self.first is None else self.first
            self.sent += 1
            self.offers = False

    def of_cut(self, ctx):
        """What the cut drives: payload and valid of one end, ready of the other."""
        return *(ctx.get(value) for value in self.out), ctx.get(self.source.ready)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", STALLS)
@pytest.mark.parametrize("waits", [False, True])
def test_beats_pass_once_and_in_order_through_registers(waits, mode, seed):
    print(f"seed {seed}")
    dut = AxiCut(Axi4Signature(**WIDTHS), waits=waits)
    source, sink = STALLS[mode]
    channels = [
        Channel(dut, name, seed, stalls=(source, sink if waits or name in REQUESTS else 0.0))
        for name in REQUESTS + ANSWERS
    ]

    async def bench(ctx):
        quiet = 0  # cycles in which nothing more may come
        for number in range(8 * COUNT):
            for channel in channels:
                channel.cycle(ctx, number)
            await ctx.tick()
            quiet += all(channel.came == COUNT for channel in channels)
            if quiet == 10:
                break

    simulate(dut, bench)
    for channel in channels:
        assert (channel.sent, channel.came) == (COUNT, COUNT), channel.name
        assert (channel.held > COUNT // 2) == (channel.refuse > 0), channel.name
        if mode == "free":  # a beat a cycle, each a cycle later
            assert channel.last - channel.first == COUNT, channel.name


def test_answers_are_taken_always_unless_the_initiator_may_let_them_wait():
    checks = 0
    for waits in (False, True):
        dut = AxiCut(Axi4Signature(**WIDTHS), waits=waits)

        async def bench(ctx, dut=dut, waits=waits):
            nonlocal checks
            for name in ANSWERS:
                ctx.set(getattr(dut.m_axi, name).valid, 1)
                ctx.set(getattr(dut.s_axi, name).ready, 0)
            for taken in range(5):
                for name in ANSWERS:
                    ready = ctx.get(getattr(dut.m_axi, name).ready)
                    assert ready == (not waits or taken < 2), (name, taken)  # two fit in
                    checks += 1
                await ctx.tick()

        simulate(dut, bench)
    assert checks == 2 * 2 * 5
