"""What an optimizer of torch keeps for each parameter, and which array on the device that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from nearstep_spec.rule.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Keys of `optimizer.state[p]`, as torch names them.

    Attributes
    ----------
    counts : there is a `step`.
    moments : array of each tensor that stays on the device, by key.
    optional : those of them that may be missing, or None: there only once an option has asked for
        them.
    """

    counts: bool
    moments: Mapping[str, str]
    optional: frozenset[str] = frozenset()

    @classmethod
    def of(cls, optimizer: Optimizer) -> Layout:
        """What torch keeps for an optimizer."""
        return cls(counts=optimizer.counts, moments=optimizer.state, optional=optimizer.optional)

    @cached_property
    def required(self) -> Sequence[str]:
        """Keys of moments that state always has."""
        return [key for key in self.moments if key not in self.optional]

    @cached_property
    def keys(self) -> Set[str]:
        """Keys that state always has, in order."""
        return dict.fromkeys([*(["step"] if self.counts else []), *self.required]).keys()
