"""What an optimizer of torch keeps for each parameter, and which array on the device that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from nearstep_spec.blockwise import DYNAMIC8, DYNAMIC8_UNSIGNED, SIGNED
from nearstep_spec.rule.optimizer import Optimizer
from nearstep_spec.rule.rules import NEVER_NEGATIVE, OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Keys of `optimizer.state[p]`, as torch names them.

    Attributes
    ----------
    counts : there is a `step`.
    moments : array of each tensor that stays on the device, by key.
    optional : those of them that may be missing, or None: there only once an option has asked for
        them.
    quantized : format of moments that are in 8 bits somewhere, by key.
    scales : of moments that are in 8 bits on the device: key of their scales, by that of the codes.
    """

    counts: bool
    moments: Mapping[str, str]
    optional: frozenset[str] = frozenset()
    quantized: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, optimizer: Optimizer) -> Layout:
        """What torch keeps for an optimizer."""
        moments = optimizer.state
        return cls(
            counts=optimizer.counts,
            moments=moments,
            optional=optimizer.optional,
            quantized={key: _quantized(optimizer, array) for key, array in moments.items()},
        )

    def on(self, formats: Mapping[str, str]) -> Layout:
        """The same on a device that keeps states in these formats, by array."""
        eight = (key for key, array in self.moments.items() if formats.get(array) in SIGNED)
        return replace(self, scales={key: scales_of(key) for key in eight})

    def with_scales(self, keys: Iterable[str]) -> Iterator[str]:
        """Keys of moments, each with that of its scales behind it."""
        for key in keys:
            yield key
            if key in self.scales:
                yield self.scales[key]

    @cached_property
    def moment_of(self) -> Mapping[str, str]:
        """Key of the codes, by that of their scales."""
        return {scales: key for key, scales in self.scales.items()}

    @cached_property
    def required(self) -> Sequence[str]:
        """Keys of moments that state always has."""
        return [key for key in self.moments if key not in self.optional]

    @cached_property
    def keys(self) -> Set[str]:
        """Keys that state always has, in order."""
        return dict.fromkeys([*(["step"] if self.counts else []), *self.required]).keys()


def scales_of(key: str) -> str:
    """Key of the scales of a moment in 8 bits."""
    return f"{key}_scale"


def _quantized(optimizer: Optimizer, array: str) -> str:
    """Format of a state where it is in 8 bits."""
    for form in optimizer.all_forms:
        named = form.rule.formats.get(array, "")
        if named in SIGNED:
            return named
    never_negative = optimizer.name in OPTIMIZERS and array in NEVER_NEGATIVE
    return DYNAMIC8_UNSIGNED if never_negative else DYNAMIC8
