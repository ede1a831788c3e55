"""The card around its kernel: the memory BAR beside a run, and the interrupt at its end."""

import random
from itertools import pairwise

from nearstep_hw.smartssd.card import SmartssdCard
from nearstep_sim.bench.axi_sample import Address, WriteBeat
from nearstep_spec.smartssd.config import SmartssdConfig
from nearstep_spec.updater.config import UpdateKernelConfig

from ..axi_port import AxiPins
from ..updater.shell_bench import MEMORY_BYTES, PLACE_BYTES, ShellBench

KERNEL = UpdateKernelConfig(lanes=2, functional_units=1, block_bytes=64)
BEAT, SIZE = 8, 3
BAR = 5 * PLACE_BYTES  # no array of a run lies from here on
READY = {"r": 1, "b": 1}


class Host:
    """Writes a burst through the BAR and reads it back, again and again.

    Attributes
    ----------
    checks : beats that were read as they had been written.
    waited : most cycles from an address to its last answer.
    """

    def __init__(self, port: object, seed: int) -> None:
        print(f"seed {seed}")
        self.pins = AxiPins(port)
        self.random = random.Random(seed)
        self.checks = self.waited = 0
        self.shown = dict.fromkeys(("ar", "aw", "w"))
        self.words: list[int] = []
        self.sent = self.read = self.cycles = 0

    def __call__(self, ctx: object) -> None:
        if not any(self.shown.values()) and not self.words:
            self._begin()
        self.pins.ask(ctx, self.shown, READY)
        seen = self.pins.sample(ctx)
        self.cycles += 1
        for channel in self.shown:
            if seen.fires(channel):
                self.shown[channel] = None
        if seen.fires("w"):
            self.sent += 1
            self._show_beat()
        if seen.b is not None:
            assert (seen.b.id, seen.b.resp) == (self.burst.id, 0)
            assert self.sent == len(self.words)
            self.waited = max(self.waited, self.cycles)
            self.shown["ar"] = self.burst
            self.cycles = 0
        if seen.r is not None:
            last = self.read == len(self.words) - 1
            assert seen.r == (self.burst.id, self.words[self.read], 0, last)
            self.read += 1
            self.checks += 1
            if last:
                self.waited = max(self.waited, self.cycles)
                self.words = []

    def _begin(self) -> None:
        beats = self.random.choice((1, 2, 8))
        at = BAR + self.random.randrange((MEMORY_BYTES - BAR) // BEAT - beats) * BEAT
        self.burst = Address(self.random.randrange(16), at, beats - 1, SIZE, 1)
        self.words = [self.random.getrandbits(8 * BEAT) for _ in range(beats)]
        self.sent = self.read = self.cycles = 0
        self.shown["aw"] = self.burst
        self._show_beat()

    def _show_beat(self) -> None:
        left = len(self.words) - self.sent
        if left:
            self.shown["w"] = WriteBeat(self.words[self.sent], (1 << BEAT) - 1, int(left == 1))


def test_runs_and_the_bar_share_the_memory_and_every_run_ends_with_one_interrupt():
    config = SmartssdConfig(kernel=KERNEL, memory_bytes=MEMORY_BYTES)
    card = SmartssdCard(config, unit=None)
    bench = ShellBench(KERNEL, card)
    host = Host(card.s_axi, seed=2)
    interrupts, busy = [], []

    def watch(ctx):
        busy.append(ctx.get(bench.busy))
        interrupts.append(ctx.get(card.o_interrupt))

    bench.beside = [host, watch]
    bench.counted = ("cycles",)  # the port has the beats of the BAR as well

    async def runs(bench):
        for mode in ("free", "both"):
            bench.disturb(mode, latency=5)
            for fields in ({"count.value": 0}, {"count.value": 35}, {"p_address.value": 1}):
                await bench.run({"count.value": 5} | fields, below=BAR)

    bench.simulate(runs)
    assert interrupts == [0, *(was and not now for was, now in pairwise(busy))]
    assert sum(interrupts) == 6
    print(f"{host.checks} beats through the BAR, {host.waited} cycles at most")
    assert host.checks > 50
    assert host.waited < 100
