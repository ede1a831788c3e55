"""Properties of FPGAs for pipelines: cycles of each operation, and multipliers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nearstep_hw.fp import add, div, fma, mul, sqrt
from nearstep_hw.fp.pipeline import DSP48E2, MULT18X18D
from nearstep_spec.fp import FP32
from nearstep_spec.technology import TECHNOLOGIES as NAMES

__all__ = ["TECHNOLOGIES", "Technology"]

_LOGIC = {"max": 1, "min": 1, "sign": 1, "lt": 1, "le": 1, "eq": 1}


@dataclass(frozen=True, kw_only=True)
class Technology:
    """A family of FPGAs.

    Attributes
    ----------
    depths : cycles of each operation; operations not listed are wires and multiplexers within a
        stage.
    multiplier : bits of the unsigned factors of a multiplier.
    delay : form of delays, see `nearstep_hw.fp.pipeline.Pipeline`.
    """

    depths: Mapping[str, int]
    multiplier: tuple[int, int]
    delay: str


TECHNOLOGIES: Mapping[str, Technology] = MappingProxyType(
    {
        "ultrascale_plus": Technology(
            depths=MappingProxyType(
                {
                    "add": add.DEPTH,
                    "sub": add.DEPTH,
                    "mul": mul.DEPTH,
                    "div": div.default_depth(FP32),
                    "fma": fma.DEPTH,
                    "sqrt": sqrt.default_depth(FP32),
                    **_LOGIC,
                }
            ),
            multiplier=DSP48E2,
            delay="ring",
        ),
        "ecp5": Technology(
            depths=MappingProxyType(
                {
                    "add": 13,
                    "sub": 13,
                    "mul": 12,
                    "div": 34,
                    "fma": 16,
                    "sqrt": 30,
                    "select": 1,
                    **_LOGIC,
                }
            ),
            multiplier=MULT18X18D,
            delay="counted",
        ),
    }
)
"""Technologies by name; the first is the default."""

assert tuple(TECHNOLOGIES) == NAMES
