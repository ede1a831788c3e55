"""Formats of a rule's arrays in memory that a processor computes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from nearstep_spec.blockwise import SIGNED
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scale import GRADIENT

__all__ = ["HALVES", "Columns", "stream_of"]

HALVES = ("fp16", "bf16")
"""Formats in 16 bits."""


def stream_of(rule: Rule, state: str) -> int:
    """Stream of the random bits that a state is rounded with, see `nearstep_spec.rounding`."""
    return 1 + rule.arrays_out.index(state)


class Columns(NamedTuple):
    """Formats and rounding of a rule's arrays in memory.

    Attributes
    ----------
    formats : by array, those other than fp32.
    streams : of random bits, by state; only of states that are rounded stochastically.
    """

    formats: tuple[tuple[str, str], ...] = ()
    streams: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, rule: Rule, formats: Mapping[str, str], *, stochastic: bool = False) -> Self:
        """Make the columns of a rule; its states in bf16 are rounded as `stochastic` tells."""
        named = tuple(
            (each, formats[each]) for each in rule.arrays_in if formats.get(each, "fp32") != "fp32"
        )
        drawn = (each for each, form in named if form == "bf16" and each in rule.states)
        return cls(named, tuple((each, stream_of(rule, each)) for each in drawn if stochastic))

    def format_of(self, name: str) -> str:
        """Format of an array."""
        return dict(self.formats).get(name, "fp32")

    def parts(self, names: Iterable[str]) -> list[tuple[str, bool]]:
        """List each array as (name, False), and the scales of one in 8 bits as (name, True)."""
        return [
            (name, scales)
            for name in names
            for scales in ((False, True) if self.format_of(name) in SIGNED else (False,))
        ]

    def widened(self, name: str) -> Self:
        """Return these columns with an array in fp32."""
        return self._replace(formats=tuple(each for each in self.formats if each[0] != name))

    @property
    def in_order(self) -> bool:
        """Whether results depend on positions of elements: by scales of groups, or random bits."""
        return bool(self.streams) or any(form in SIGNED for _, form in self.formats)

    def uniform(self, rule: Rule) -> bool:
        """Whether all arrays of a rule are of one format, and rounded to nearest; gradients may be
        in fp32 as well, as those in 16 bits that were divided by a scale."""
        others = {self.format_of(each) for each in rule.arrays_in if each != GRADIENT}
        own = len(others) == 1 and self.format_of(GRADIENT) in {*others, "fp32"}
        return own and not self.in_order
