"""Stochastic rounding of the states of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole
from nearstep_spec.rounding import INDEX_BITS, SKIP_BITS, STREAMS, WORD_BITS, alignment
from nearstep_spec.rule.columns import stream_of
from nearstep_spec.rule.rule import Rule
from nearstep_spec.updater.config import UpdateKernelConfig


@dataclass(frozen=True)
class Numbering:
    """Indices of the elements of one channel's blocks of an array.

    Attributes
    ----------
    index : of the first element.
    within : its offset in its block.
    skip : indices after each block that are on other channels.
    """

    index: int = 0
    within: int = 0
    skip: int = 0


FROM_ZERO = Numbering()
"""Numbering of an array on one channel."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Stochastic rounding of states in bfloat16: up with the probability of the dropped fraction
    (`nearstep_spec.rounding`).

    The same seed, step, index, state and value give the same bits on every device. So steps of one
    optimizer need different step counts, and independent optimizers different seeds.

    Parameters
    ----------
    seed : from 0, below 2**32.
    step : likewise. None is the step count of the update.
    states : of the rule, in bfloat16; None: all of them.
    numbering : of the elements. Multiples of the lanes of the kernel, at least of 4.
    """

    seed: int = 0
    step: int | None = None
    states: Sequence[str] | None = None
    numbering: Numbering = FROM_ZERO

    def streams(self, rule: Rule, config: UpdateKernelConfig) -> Mapping[str, int]:
        """Streams of random bits of the states that are rounded.

        Raises
        ------
        ArgumentError : the kernel cannot round stochastically, or not one of the states.
        """
        if not config.stochastic_rounding:
            raise ArgumentError(
                "rounding must be None with this kernel, not stochastic: open the device with "
                "stochastic_rounding=yes and a state in bf16, such as state_format=bf16"
            )
        able = [each for each in config.stochastic if each in rule.states]
        states = able if self.states is None else self.states
        for each in states:
            if each not in able:
                has = ", ".join(able) or "none"
                raise ArgumentError(
                    f"rounding.states must be states of {rule.name} in bf16 ({has}), not {each!r}"
                )
        if not states:
            raise ArgumentError(f"rounding needs a state in bf16, and {rule.name} has none here")
        numbers = {each: stream_of(rule, each) for each in states}
        assert max(numbers.values()) < STREAMS
        return numbers

    def key(self, step: int | None) -> tuple[int, int]:
        """Checked seed and step; `step` is that of the update.

        Raises
        ------
        ArgumentError : seed or step is missing, or too large.
        """
        chosen = step if self.step is None else self.step
        if chosen is None:
            raise ArgumentError("rounding.step must be given: the update has no step count")
        _check("seed", self.seed, WORD_BITS)
        _check("step", chosen, WORD_BITS)
        return int(self.seed), int(chosen)

    def drawn(self, rule: Rule, step: int | None, config: UpdateKernelConfig) -> Drawn:
        """Compute the kernel's registers for an update of a rule in a step, after all checks."""
        streams = self.streams(rule, config)
        seed, chosen = self.key(step)
        self.check_numbering(config)
        return Drawn(streams=streams, seed=seed, step=chosen, numbering=self.numbering)

    def check_numbering(self, config: UpdateKernelConfig) -> None:
        """Raise `ArgumentError` unless the kernel supports the numbering."""
        begins = alignment(config.lanes)
        for name, bits in (("index", INDEX_BITS), ("within", SKIP_BITS), ("skip", SKIP_BITS)):
            value = getattr(self.numbering, name)
            _check(f"numbering.{name}", value, bits)
            if value % begins:
                raise ArgumentError(
                    f"rounding.numbering.{name} must be a multiple of {begins}, not {value}"
                )


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Registers of stochastic rounding.

    Parameters
    ----------
    streams : by state.
    """

    streams: Mapping[str, int]
    seed: int
    step: int
    numbering: Numbering


def _check(name: str, value: object, bits: int) -> None:
    if not is_whole(value) or not 0 <= value < 1 << bits:
        raise ArgumentError(f"rounding.{name} must be an integer in [0, 2**{bits}), not {value!r}")
