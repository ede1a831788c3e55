"""Benches of designs in Amaranth's simulator, and what gives and takes streams in them."""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from amaranth.sim import Simulator, SimulatorContext

Bench = Callable[[SimulatorContext], Coroutine[Any, Any, None]]


def simulate(dut: Any, *benches: Bench) -> None:
    """Run benches side by side on a design, with a clock if it has one, until all have ended."""
    simulator = Simulator(dut)
    simulator.add_clock(1e-6, if_exists=True)
    for bench in benches:
        simulator.add_testbench(bench)
    simulator.run()


def giving(port: Any, payloads: Iterable[Any], pause: Callable[[], int] = lambda: 0) -> Bench:
    """Offer one payload after the other, each until it is taken, with pauses of cycles between."""

    async def give(ctx: SimulatorContext) -> None:
        for payload in payloads:
            ctx.set(port.payload, payload)
            ctx.set(port.valid, 1)
            await ctx.tick().until(port.ready)
            ctx.set(port.valid, 0)
            for _ in range(pause()):
                await ctx.tick()

    return give


def taking(
    port: Any, found: list[Any], count: int, ready: Callable[[], bool] = lambda: True
) -> Bench:
    """Take so many payloads, in cycles in which one is ready."""

    async def take(ctx: SimulatorContext) -> None:
        while len(found) < count:
            taken = ready()
            ctx.set(port.ready, taken)
            _, _, valid, payload = await ctx.tick().sample(port.valid, port.payload)
            if valid and taken:
                found.append(payload)

    return take
