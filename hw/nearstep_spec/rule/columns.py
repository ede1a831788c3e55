"""How the arrays of a rule lie in memory that a processor computes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from nearstep_spec.blockwise import SIGNED
from nearstep_spec.rule.rule import Rule

__all__ = ["HALVES", "Columns", "stream_of"]

HALVES = ("fp16", "bf16")
"""Formats in 16 bits."""


def stream_of(rule: Rule, state: str) -> int:
    """Stream of the random bits that a state is rounded with, see `nearstep_spec.rounding`."""
    return 1 + rule.arrays_out.index(state)


class Columns(NamedTuple):
    """How the arrays of a rule lie in memory.

    Attributes
    ----------
    formats : those that are not fp32, by array.
    streams : of random bits, by state: those that are rounded stochastically.
    """

    formats: tuple[tuple[str, str], ...] = ()
    streams: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, rule: Rule, formats: Mapping[str, str], *, stochastic: bool = False) -> Self:
        """Those of a rule: states in bf16 are rounded to nearest even, or stochastically."""
        named = tuple(
            (each, formats[each]) for each in rule.arrays_in if formats.get(each, "fp32") != "fp32"
        )
        drawn = (each for each, form in named if form == "bf16" and each in rule.states)
        return cls(named, tuple((each, stream_of(rule, each)) for each in drawn if stochastic))

    def format_of(self, name: str) -> str:
        """Format of an array."""
        return dict(self.formats).get(name, "fp32")

    def parts(self, names: Iterable[str]) -> list[tuple[str, bool]]:
        """List what has an address: each array; and behind one in 8 bits its scales, marked."""
        return [
            (name, scales)
            for name in names
            for scales in ((False, True) if self.format_of(name) in SIGNED else (False,))
        ]

    def widened(self, name: str) -> Self:
        """The same with an array in fp32."""
        return self._replace(formats=tuple(each for each in self.formats if each[0] != name))

    @property
    def in_order(self) -> bool:
        """Whether results depend on the places of elements: groups share scales, or places have
        random bits."""
        return bool(self.streams) or any(form in SIGNED for _, form in self.formats)

    def uniform(self, rule: Rule) -> bool:
        """Whether all arrays of a rule are of one format, and rounded to nearest."""
        return not self.in_order and len(set(map(self.format_of, rule.arrays_in))) == 1
