"""A stand-in of the functional unit: exact, fast, with results that identify their inputs."""

import numpy as np
from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

LATENCY = 7

Words = NDArray[np.uint32]


class StandInUnit(wiring.Component):
    """p ^ g, m + 1, v - 1, `LATENCY` enabled cycles later; ports of a FunctionalUnit."""

    def __init__(self, rule: object) -> None:
        self.rule = rule
        self.latency = LATENCY
        super().__init__(
            {
                "i_en": In(1),
                "i_valid": In(1),
                **{f"i_{name}": In(32) for name in rule.arrays_in},
                **{f"s_{name}": In(32) for name in rule.scalars},
                **{f"s_{name}": In(1) for name in rule.switches},
                "o_valid": Out(1),
                **{f"o_{name}": Out(32) for name in rule.arrays_out},
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        valid = self.i_valid
        values = {"p": self.i_p ^ self.i_g, "m": self.i_m + 1, "v": self.i_v - 1}
        for stage in range(1, LATENCY + 1):
            last = stage == LATENCY
            next_valid = self.o_valid if last else Signal(name=f"valid{stage}")
            with m.If(self.i_en):
                m.d.sync += next_valid.eq(valid)
            valid = next_valid
            for name, value in values.items():
                register = getattr(self, f"o_{name}") if last else Signal(32, name=f"{name}{stage}")
                with m.If(self.i_en):
                    m.d.sync += register.eq(value)
                values[name] = register
        return m


def stand_in_results(arrays: dict[str, Words]) -> dict[str, Words]:
    """Apply the unit to whole arrays."""
    return {
        "p": arrays["p"] ^ arrays["g"],
        "m": arrays["m"] + np.uint32(1),
        "v": arrays["v"] - np.uint32(1),
    }
