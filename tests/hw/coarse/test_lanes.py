"""Lanes between two clocks: every phit comes whole; of damage only the phit under way suffers."""

from __future__ import annotations

import random
from collections.abc import Callable, Container

import pytest
from amaranth import ClockDomain, DomainRenamer, Module, Signal
from amaranth.sim import Simulator, SimulatorContext

from nearstep_hw.coarse.lanes import LaneReceiver, LanesLayout, LaneTransmitter
from nearstep_hw.coarse.wire import LinkPhit
from nearstep_spec.coarse.lanes import PHIT_CYCLES, PINS, TRANSFERS

from ..simulate import simulate

PERIOD = 20e-9
BITS = len(Signal(LinkPhit).as_value())


class Pins:
    """A transmitter and a receiver with clocks of their own, and what is wrong on the pins."""

    def __init__(self) -> None:
        self.wrong = Signal(PINS)
        self.pulled = Signal()
        self.transmitter = LaneTransmitter()
        self.receiver = LaneReceiver()
        self.reset = {"tx": Signal(), "rx": Signal()}
        self.m = m = Module()
        m.domains.bench = ClockDomain(reset_less=True)  # with the transmitter's, without its reset
        for name, each in (("tx", self.transmitter), ("rx", self.receiver)):
            domain = ClockDomain(name)
            m.domains += domain
            m.submodules[name] = DomainRenamer(name)(each)
            m.d.comb += domain.rst.eq(self.reset[name])
        with m.If(~self.pulled):
            pins = self.transmitter.o.as_value() ^ self.wrong
            m.d.comb += self.receiver.i.eq(LanesLayout(pins))


def carry(
    phits: list[int],
    *,
    ratio: float = 1.0,
    gap: Callable[[], int] = lambda: 0,
    before: Callable[[SimulatorContext, Pins, int], None] = lambda ctx, pins, number: None,
    missed: Container[int] = (),
) -> list[int]:
    """What comes of these, with a receiver whose clock is `ratio` as slow.

    `before` is called with the number of each phit before it is given to the transmitter, and with
    that behind the last one. `missed` are the transfers, counted from the first phit on, whose
    change of the strobe does not get to the receiver.
    """
    pins, found = Pins(), []
    ended = 0

    async def send(ctx: SimulatorContext) -> None:
        nonlocal ended
        port = pins.transmitter.i
        for number, phit in enumerate(phits):
            await ctx.tick("bench").repeat(gap() + 1)
            before(ctx, pins, number)
            await ctx.tick("bench").repeat(4)  # the receiver has seen it
            ctx.set(port.payload.as_value(), phit)
            ctx.set(port.valid, 1)
            await ctx.tick("bench").until(port.ready)
            ctx.set(port.valid, 0)
        await ctx.tick("bench").repeat(PHIT_CYCLES + 20)
        before(ctx, pins, len(phits))
        await ctx.tick("bench").repeat(PHIT_CYCLES)
        ended = 1

    async def miss(ctx: SimulatorContext) -> None:
        level = transfer = 0
        while True:
            await ctx.tick("bench")
            if ctx.get(pins.transmitter.o.strobe) != level:
                if transfer in missed:  # the inverse of what it changes to is what it was
                    ctx.set(pins.wrong, ctx.get(pins.wrong) ^ 1)
                level, transfer = 1 - level, transfer + 1

    async def receive(ctx: SimulatorContext) -> None:
        while not ended:
            _, _, valid, payload = await ctx.tick("rx").sample(
                pins.receiver.o.valid, pins.receiver.o.payload.as_value()
            )
            if valid:
                found.append(payload)

    simulator = Simulator(pins.m)
    simulator.add_clock(PERIOD, domain="tx")
    simulator.add_clock(PERIOD, domain="bench")
    simulator.add_clock(PERIOD * ratio, phase=PERIOD * 0.37, domain="rx")
    simulator.add_testbench(send)
    simulator.add_testbench(receive, background=True)
    simulator.add_testbench(miss, background=True)
    simulator.run()
    return found


def draw(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(BITS) for _ in range(count)]


@pytest.mark.parametrize("ratio", [1.0, 1.0002, 1 / 1.0002, 0.7, 1.4])
def test_every_phit_comes_whole_whatever_the_clocks(ratio: float) -> None:
    rng = random.Random(1)
    phits = [0, (1 << BITS) - 1, *draw(20, seed=1)]
    found = carry(phits, ratio=ratio, gap=lambda: rng.choice((0, 0, 3, 100)))
    assert found == phits


def test_a_damaged_phit_is_wrong_or_lost_and_the_next_one_is_right() -> None:
    """With each pin wrong for a phit in its turn, and the strobe as well."""
    phits = draw(3 * PINS, seed=2)

    def damage(ctx: SimulatorContext, pins: Pins, number: int) -> None:
        ctx.set(pins.wrong, 1 << number // 3 if number % 3 == 1 else 0)

    found = carry(phits, gap=lambda: PHIT_CYCLES + 20, before=damage)
    right = [phit for number, phit in enumerate(phits) if number % 3 != 1]
    assert [each for each in found if each in right] == right
    # Data of eight pins are wrong, `first` was never seen; an inverted strobe is a strobe, but
    # its inversion is a transfer as well.
    others = [each for each in found if each not in right]
    assert len(others) >= PINS - 2
    assert len(found) < len(phits)


@pytest.mark.parametrize("gap", [0, PHIT_CYCLES + 20])
@pytest.mark.parametrize("at", [(0,), (1,), (TRANSFERS // 2,), (TRANSFERS - 1,), (3, 4)])
def test_a_transfer_that_is_missed_costs_its_phit_alone(at: tuple[int, ...], gap: int) -> None:
    """It has too few when the next one begins, with the strobe at the other level from then on."""
    phits = draw(6, seed=7)
    missed = {3 * TRANSFERS + each for each in at}
    assert carry(phits, gap=lambda: gap, missed=missed) == phits[:3] + phits[4:]


def test_a_transfer_too_many_between_phits_costs_none() -> None:
    phits = draw(6, seed=3)

    def glitch(ctx: SimulatorContext, pins: Pins, number: int) -> None:
        if number == 3:  # before it: a transfer too many, without a phit
            ctx.set(pins.wrong, 1)

    found = carry(phits, gap=lambda: PHIT_CYCLES + 20, before=glitch)
    assert found == phits


def test_a_cable_that_is_pulled_is_silence_and_works_again() -> None:
    phits = draw(9, seed=4)

    def pull(ctx: SimulatorContext, pins: Pins, number: int) -> None:
        ctx.set(pins.pulled, 3 <= number < 6)

    found = carry(phits, gap=lambda: PHIT_CYCLES + 20, before=pull)
    assert found == phits[:3] + phits[6:]


@pytest.mark.parametrize("which", ["tx", "rx"])
def test_a_reset_of_either_end_costs_the_phit_under_way(which: str) -> None:
    phits = draw(9, seed=5)

    def reset(ctx: SimulatorContext, pins: Pins, number: int) -> None:
        ctx.set(pins.reset[which], number == 5)  # while phit 4 is on the pins

    found = carry(phits, gap=lambda: TRANSFERS, before=reset)
    assert found[:4] == phits[:4]
    assert found[-3:] == phits[-3:]
    assert phits[4] not in found
    assert set(found) <= set(phits)


def test_phits_follow_each_other_without_a_gap() -> None:
    """As many transfers as phits have, in as many cycles."""
    phits, edges = draw(5, seed=6), 0
    transmitter = LaneTransmitter()

    async def bench(ctx: SimulatorContext) -> None:
        nonlocal edges
        ctx.set(transmitter.i.valid, 1)
        level = 0
        for cycle in range(5 * PHIT_CYCLES):
            ctx.set(transmitter.i.payload.as_value(), phits[min(4, (cycle + 1) // PHIT_CYCLES)])
            await ctx.tick()
            edges += ctx.get(transmitter.o.strobe) != level
            level = ctx.get(transmitter.o.strobe)

    simulate(transmitter, bench)
    assert edges == 5 * TRANSFERS
