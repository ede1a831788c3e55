"""Generators of floating-point units."""

from typing import TYPE_CHECKING

from nearstep_hw.generator import Generator
from nearstep_spec.fp import UnitConfig

if TYPE_CHECKING:
    from amaranth.lib import wiring

SUMMARIES = {
    "fp32_add": "binary32 a + b",
    "fp32_sub": "binary32 a - b",
    "fp32_mul": "binary32 a * b",
    "fp32_fma": "binary32 a * b + c, rounded once",
    "fp32_div": "binary32 a / b",
    "fp32_sqrt": "binary32 square root of a",
    "fp16_to_fp32": "binary16 to binary32",
    "fp32_to_fp16": "binary32 to binary16",
    "bf16_to_fp32": "bfloat16 to binary32",
    "fp32_to_bf16": "binary32 to bfloat16",
}


def _unit(name: str, summary: str) -> Generator:
    def build(config: UnitConfig) -> "wiring.Component":
        from nearstep_hw.fp.unit import FpUnit

        return FpUnit(name, depth=config.depth, flags=config.flags)

    return Generator(summary=summary, config=UnitConfig, build=build)


GENERATORS = {name: _unit(name, summary) for name, summary in SUMMARIES.items()}
