"""Parameters in the memory devices, and their updates by the devices' kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion, Poll
from nearstep.buffer import Buffer
from nearstep.coarse.device import CoarseDevice
from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.tensor import PoolTensor
from nearstep.errors import ArgumentError
from nearstep.run import Run
from nearstep.updater.accelerated import AcceleratedRuns
from nearstep.updater.arguments import rule_arguments
from nearstep_spec.rule.optimizer import Optimizer
from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.operands import operands

PARAMETERS = "p"
"""Name of a rule's array of parameters."""

ADDING_RULE = "sgd"
"""Adds in binary32, with a learning rate of 1 and gradients times -1."""


class AllOf(Completion):
    """Completions of one run on each device; ends with the last one."""

    def __init__(self, parts: Sequence[Completion]) -> None:
        self.parts = tuple(parts)
        self.backend = self.parts[0].backend

    @property
    def ended(self) -> bool:
        ended = [each.ended for each in self.parts]  # a check of each starts its next run
        return all(ended)

    @property
    def error(self) -> Exception | None:
        return next((each.error for each in self.parts if each.error is not None), None)

    @property
    def cycles(self) -> int | None:
        """Cycles of the slowest part."""
        return _longest(each.cycles for each in self.parts)

    @property
    def polls(self) -> Sequence[Poll]:
        return next((each.polls for each in self.parts if not each.ended), ())

    @property
    def bound(self) -> int | None:
        return _longest(each.bound for each in self.parts)

    def wait(self, max_cycles: int | None = None) -> Self:
        """Wait for all parts, then raise the first error."""
        failed: Exception | None = None
        for each in self.parts:
            try:
                each.wait(max_cycles)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return self

    def abort(self, max_cycles: int | None = None) -> None:
        for each in self.parts:
            each.abort(max_cycles)


def _longest(cycles: Iterable[int | None]) -> int | None:
    """Return the greatest number, or None if one is not known."""
    known = [*cycles]
    return None if None in known else max(each or 0 for each in known)


def accumulate(
    device: CoarseDevice, gradients: Sequence[Buffer], last: Callable[[Buffer], Run]
) -> Completion:
    """Sum arrays into the first one by a device's update kernel, then start `last` with the sum.

    Arrays are added in order; each sum is rounded to binary32.
    """
    total, *others = gradients
    starts: list[Callable[[], Run]] = [
        partial(device.update, "sgd", {PARAMETERS: total, GRADIENT: g}, lr=1.0, gradient_scale=-1.0)
        for g in others
    ]
    starts.append(partial(last, total))
    return AcceleratedRuns(starts).start()


class StoredParameters:
    """Parameters and optimizer state on every device of a pool, as equal copies.

    A ring sum gives every device the same gradients, and a client pulls from its own device; so
    every device updates a copy of everything, and no parameters pass a link.

    Parameters
    ----------
    optimizer : one whose rule the devices have, or its name.
    tensors : `p` and the states of `initial_values`, by name; one-dimensional, of one size.
    hyper : hyper-parameters; the defaults of others.

    Ref: COARSE paper, section III-D and figure 7.
    """

    def __init__(
        self,
        pool: CoarsePool,
        optimizer: str | Optimizer,
        tensors: Mapping[str, PoolTensor],
        hyper: Mapping[str, Any],
    ) -> None:
        self.pool = pool
        self.optimizer = pool.device.optimizer(optimizer)
        self.hyper = dict(hyper)
        self.tensors = dict(tensors)
        self.size = tensors[PARAMETERS].size

    @classmethod
    def make(
        cls, pool: CoarsePool, optimizer: str | Optimizer, values: NDArray[np.float32], **hyper: Any
    ) -> Self:
        """Store parameters (float32, one dimension) and first states on every device."""
        known = pool.device.optimizer(optimizer)
        initial = initial_values(pool.device, known, hyper)
        first = (
            values if name == PARAMETERS else np.full_like(values, initial[name])
            for name in initial
        )
        tensors = pool.tensors(([each] * pool.devices for each in first), reduced=False)
        return cls(pool, known, dict(zip(initial, tensors, strict=True)), hyper)

    def check(self, step: int, hyper: Mapping[str, Any]) -> None:
        """Raise `ArgumentError` unless step `step` can have these hyper-parameters.

        Parameters
        ----------
        step : t, from 1.
        hyper : hyper-parameters that differ from those of the constructor.
        """
        changed = {**self.hyper, **hyper}
        self.pool.device.arguments(self.optimizer, step=step, first=step == 1, **changed)
        wanted = set(initial_values(self.pool.device, self.optimizer, changed))
        if wanted != set(self.tensors):
            raise ArgumentError(
                f"hyper-parameters must leave the states {sorted(self.tensors)}, "
                f"not need {sorted(wanted)}"
            )

    def start(
        self,
        gradients: Sequence[Sequence[Buffer]],
        *,
        step: int,
        scale: float,
        start: int = 0,
        stop: int | None = None,
        hyper: Mapping[str, Any] | None = None,
    ) -> AllOf:
        """Start a step of elements [start, stop) on every device.

        Parameters
        ----------
        gradients : of these elements, by device: one array, or several that the kernel sums first,
            into the first one.
        step : t, from 1.
        scale : of the gradients, such as 1 / clients of a sum.
        start : a multiple of 16, the elements of a memory beat.
        stop : None: the end.
        hyper : hyper-parameters that differ from those of the constructor.
        """
        part = slice(start, self.size if stop is None else stop)
        device = self.pool.device
        begun: list[Completion] = []
        for number, each in enumerate(gradients):
            states = {name: tensor.front(number)[part] for name, tensor in self.tensors.items()}

            def update(g: Buffer, states: Mapping[str, Buffer] = states) -> Run:
                return device.update(
                    self.optimizer,
                    {**states, GRADIENT: g},
                    step=step,
                    first=step == 1,
                    gradient_scale=scale,
                    **{**self.hyper, **(hyper or {})},
                )

            begun.append(accumulate(device, each, update))
        return AllOf(begun)


def initial_values(
    device: CoarseDevice, optimizer: Optimizer, hyper: Mapping[str, Any]
) -> dict[str, float]:
    """Return the first value of each array of an optimizer; that of `p` is unused.

    Raises
    ------
    ArgumentError : a state of the rule is not float32.
    """
    config = device.kernel_config
    given = rule_arguments(optimizer, config.order, step=1, first=True, **hyper)
    device.check_rule(given.rule)
    table = operands(config)
    values = {**optimizer.defaults, **hyper}
    found = {}
    for name in given.form.rule.arrays_in:
        if name == GRADIENT:
            continue
        if table[name].format != "fp32":
            raise ArgumentError(
                f"state {name} of {given.rule} must be fp32 in a pool, not {table[name].format}"
            )
        found[name] = float(values[optimizer.initial[name]]) if name in optimizer.initial else 0.0
    return found
