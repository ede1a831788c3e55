"""Benches of designs in Amaranth's simulator."""

from collections.abc import Callable, Coroutine
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
