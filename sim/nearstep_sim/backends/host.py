"""`host:`: this machine's processor, which runs compiled update rules on arrays of the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.options import HOST, Family, Variant, open_family
from nearstep.errors import ArgumentError
from nearstep.threads import at_once, once, shared, simulation_threads
from nearstep.updater.arguments import RuleArguments
from nearstep.updater.checks import real
from nearstep.updater.processor import Processor
from nearstep_sim.golden.rule import ArrayMismatchError
from nearstep_sim.golden.rule_cpp import Kernel, kernel, register_words
from nearstep_spec.codec import Option, check_bounds
from nearstep_spec.rule.errors import RuleError
from nearstep_spec.rule.optimizer import Form
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scale import GRADIENT_SCALE, scaled

PART = 1 << 16
"""Elements that are worth a thread."""

ALIGNED = 16
"""A thread's first element is a multiple of this: one cache line of fp32."""


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
"""Return the devices of this backend."""


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

    def prepare(self, form: Form) -> None:
        _kernel(form.rule)

    def run(
        self,
        arguments: RuleArguments,
        arrays: Mapping[str, NDArray[Any]],
        gradient_scale: float = 1.0,
    ) -> None:
        try:
            ordered = _kernel(arguments.form.rule).ordered(arrays)
        except ArrayMismatchError as error:
            raise ArgumentError(str(error)) from error
        rows = np.array([[each.ctypes.data for each in ordered]], np.uint64)
        self.blocks(arguments, np.array([ordered[0].size], np.uint64), rows, gradient_scale)()

    def blocks(
        self,
        arguments: RuleArguments,
        counts: NDArray[np.uint64],
        rows: NDArray[np.uint64],
        gradient_scale: float = 1.0,
    ) -> Callable[[], None]:
        chosen = _kernel(arguments.form.rule)
        arguments.check()
        factor = real(GRADIENT_SCALE, gradient_scale)
        if not math.isfinite(factor):
            raise ArgumentError(f"{GRADIENT_SCALE} must be finite, not {factor}")
        words = register_words(chosen.rule, {**arguments.scalars, GRADIENT_SCALE: factor})
        ends, rows = np.cumsum(counts, dtype=np.uint64), np.ascontiguousarray(rows)
        total = int(ends[-1]) if ends.size else 0
        parts = min(shared(self._threads or simulation_threads()), -(-total // PART))
        edges = [total * part // parts // ALIGNED * ALIGNED for part in range(parts)] + [total]
        run = partial(chosen.of_blocks, words, ends, rows)
        return partial(at_once, [once(run(begin, end)) for begin, end in pairwise(edges)])


@cache
def _kernel(rule: Rule) -> Kernel:
    """Return the compiled rule, with a factor on its gradients.

    Raises
    ------
    ArgumentError : the rule has no gradient, or states in formats other than fp32.
    """
    if rule.formats:
        kept = ", ".join(f"{name} in {form}" for name, form in rule.formats.items())
        raise ArgumentError(
            f"{HOST}: has rules that keep fp32, and {rule.name} keeps {kept}: open a device for it"
        )
    try:
        return kernel(scaled(rule))
    except RuleError as error:
        raise ArgumentError(str(error)) from error
