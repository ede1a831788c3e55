"""Several floating-point units in one build, for many tests."""

from collections.abc import Sequence
from dataclasses import dataclass

from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.fp.pipeline import DSP48E2
from nearstep_hw.fp.unit import FpOperation, FpUnit

__all__ = ["FpBank", "Variant"]


@dataclass(frozen=True)
class Variant:
    """Parameters of a unit: an operation, its latency (None: its default), with or without flags,
    and the multiplier, see `Pipeline`.
    """

    operation: FpOperation
    depth: int | None = None
    flags: bool = True
    multiplier: tuple[int, int] = DSP48E2

    @property
    def latency(self) -> int:
        return self.operation.depth if self.depth is None else self.depth

    @property
    def label(self) -> str:
        """Name, latency and `noflags`, for messages."""
        return f"{self.operation.name}@{self.latency}" + ("" if self.flags else " noflags")


class FpBank(wiring.Component):
    """Independent units with a common clock.

    Members
    -------
    u<k>_<port> : ports of unit k: `i_valid`, `i_a` and so on, `o_valid`, `o_z` and so on.
    """

    def __init__(self, variants: Sequence[Variant]) -> None:
        self.units = [
            FpUnit(v.operation, depth=v.depth, flags=v.flags, multiplier=v.multiplier)
            for v in variants
        ]
        super().__init__(
            {
                f"u{k}_{name}": (In if member.flow is In else Out)(member.shape)
                for k, unit in enumerate(self.units)
                for name, member in unit.signature.members.items()
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        for k, unit in enumerate(self.units):
            m.submodules[f"u{k}"] = unit
            for name, member in unit.signature.members.items():
                outer, inner = getattr(self, f"u{k}_{name}"), getattr(unit, name)
                m.d.comb += inner.eq(outer) if member.flow is In else outer.eq(inner)
        return m
