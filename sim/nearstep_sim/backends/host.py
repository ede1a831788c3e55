"""`host:`: this machine's processor, which runs compiled update rules on arrays of the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.options import HOST, Family, Variant, open_family
from nearstep.errors import ArgumentError
from nearstep.threads import at_once, once, shared, simulation_threads
from nearstep.updater.arguments import RuleArguments
from nearstep.updater.checks import real
from nearstep.updater.processor import Processor
from nearstep.updater.rounding import Rounding
from nearstep_sim.golden.rule_cpp import BlockKernel, register_words
from nearstep_spec.blockwise import GROUP
from nearstep_spec.codec import Option, check_bounds
from nearstep_spec.rule.columns import Columns
from nearstep_spec.rule.errors import RuleError
from nearstep_spec.rule.optimizer import Form
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scale import GRADIENT_SCALE, scaled

PART = 1 << 16
"""Elements that are worth a thread."""


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options of `host:`."""

    threads: Annotated[
        int | None,
        Option(
            meaning="threads of a step, at most",
            low=1,
            high=1024,
            unset="NEARSTEP_THREADS, or as many as this process has cores",
        ),
    ] = None
    order: Annotated[
        Literal["default", "paper"],
        Option(meaning="of Adam's arithmetic: torch's bits, or Algorithm 1 of the AXDIMM paper"),
    ] = "default"

    def __post_init__(self) -> None:
        check_bounds(self)


DEVICES: Mapping[str, Family] = {
    "": Family(
        f"{HOST}:",
        (
            Variant(
                options=HostOptions,
                opens="nearstep_sim.backends.host:HostProcessor",
                summary="this machine's processor: updates tensors of the host in place",
            ),
        ),
    )
}
"""Devices of this backend."""


def open_device(target: str, options: dict[str, str]) -> Processor:
    """Open `host:`. A rule is compiled at its first use.

    Raises
    ------
    UrlError : there is a target.
    OptionError
    """
    return open_family(HOST, DEVICES, target, options, Processor)


class HostProcessor(Processor):
    """Compiled rules with a factor on their gradients, in several threads."""

    def __init__(self, options: HostOptions) -> None:
        self.order = options.order
        self._threads = options.threads

    def prepare(self, form: Form, columns: Columns) -> None:
        _kernel(form.rule, form.remainder, columns)

    def blocks(
        self,
        arguments: RuleArguments,
        columns: Columns,
        blocks: NDArray[np.uint64],
        *,
        gradient_scale: float = 1.0,
        seed: int = 0,
    ) -> Callable[[], None]:
        chosen = _kernel(arguments.form.rule, arguments.form.remainder, columns)
        arguments.check()
        factor = real(GRADIENT_SCALE, gradient_scale)
        if not math.isfinite(factor):
            raise ArgumentError(f"{GRADIENT_SCALE} must be finite, not {factor}")
        words = register_words(chosen.rule, {**arguments.scalars, GRADIENT_SCALE: factor})
        if columns.streams:
            rounding = Rounding(seed=seed).key(arguments.step)
            words = np.concatenate([words, np.array(rounding, np.uint32)])
        # A thread begins with a group, whose elements are whole cache lines.
        ends = np.cumsum(-(-blocks[:, 0].astype(np.int64) // GROUP) * GROUP).astype(np.uint64)
        rows = np.concatenate([ends[:, None], blocks], 1)
        total = int(ends[-1]) if ends.size else 0
        parts = min(shared(self._threads or simulation_threads()), -(-total // PART))
        edges = [total * part // parts // GROUP * GROUP for part in range(parts)] + [total]
        run = chosen.on(words, rows)
        return partial(at_once, [once(run(begin, end)) for begin, end in pairwise(edges)])


def on_blocks(
    rule: Rule, remainder: Rule | None, columns: Columns
) -> tuple[Rule, Columns, Rule | None]:
    """Return what is compiled for a rule of an optimizer: with a factor on the gradients.

    Raises
    ------
    RuleError : the rule has no gradient.
    """
    other = remainder if columns.uniform(rule) else None
    return scaled(rule), columns, None if other is None else scaled(other)


@cache
def _kernel(rule: Rule, remainder: Rule | None, columns: Columns) -> BlockKernel:
    """Return the compiled rule.

    Raises
    ------
    ArgumentError : the rule has no gradient.
    """
    try:
        return BlockKernel(*on_blocks(rule, remainder, columns))
    except RuleError as error:
        raise ArgumentError(str(error)) from error
