"""Parameters and state as torch has them, updated in place by this machine's processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearstep.errors import ArgumentError
from nearstep.threads import once
from nearstep.torch.checks import check_gradient, check_parameter, is_plain, shares_memory
from nearstep.torch.convert import mark_changed
from nearstep.torch.dtensor import local, redistributed
from nearstep.torch.errors import GradientError, ParameterError, StateError
from nearstep.torch.layout import Layout
from nearstep.torch.state import check_moment
from nearstep.updater.arguments import RuleArguments
from nearstep.updater.processor import Processor
from nearstep_spec.rule.optimizer import Form

EXPECTED = "of torch.float32 on the CPU, with memory, if there is no device"
PARAMETER, GRADIENT = "p", "g"


class HostUpdate(NamedTuple):
    """A parameter to be updated. A parameter that is twice in a group has two updates.

    Attributes
    ----------
    name : what errors call the parameter.
    arguments : of the rule. Updates with the same object share a run.
    negate : maximize.
    state : `optimizer.state[parameter]`, or what `first_state` returned.
    """

    name: str
    arguments: RuleArguments
    negate: bool
    parameter: Tensor
    gradient: Tensor
    state: Mapping[str, Any]


class _Run(NamedTuple):
    """Updates of one rule with the same arguments.

    Attributes
    ----------
    first : one of them.
    joined : tensors of each update of one call of the processor.
    counts, rows : their elements and addresses.
    alone : updates one after the other: of tensors that are no plain ones, or share memory.
    """

    first: HostUpdate
    joined: list[list[Tensor]]
    counts: NDArray[np.uint64]
    rows: NDArray[np.uint64]
    alone: list[HostUpdate]


class HostHome:
    """Updates the user's tensors in place: parameters, and state in `optimizer.state`.

    A tensor that is not dense, or is a negated view, is updated through a copy; dense layouts such
    as `torch.channels_last` are not copied where all tensors of a parameter have the same.
    """

    def __init__(self, layout: Layout, processor: Processor) -> None:
        self.layout = layout
        self.processor = processor
        self._keys = {array: key for key, array in layout.moments.items()}

    def check(self, form: Form) -> None:
        """Compile a rule, unless that has been done.

        Raises
        ------
        ArgumentError : the rule has other arrays than parameters, gradients and state, or keeps
            state in other formats than fp32.
        NearstepError : the compiler failed.
        """
        rule, known = form.rule, (PARAMETER, GRADIENT, *self._keys)
        wrong = [each for each in (*rule.arrays_in, *rule.outputs) if each not in known]
        if wrong:
            raise ArgumentError(
                f"{rule.location}: arrays of {rule.name} must be of {', '.join(known)}, "
                f"not {', '.join(wrong)}"
            )
        self.processor.prepare(form)

    def first_state(
        self, parameter: Tensor, keys: Iterable[str], initial: Mapping[str, float]
    ) -> dict[str, Any]:
        """State of a parameter before its first step.

        Parameters
        ----------
        keys : of the moments that there are.
        initial : value of the elements of an array.
        """
        zero = torch.zeros((), dtype=torch.float32, device="cpu")
        first = {key: initial.get(self.layout.moments[key], 0.0) for key in keys}
        moments = {key: torch.full_like(parameter, value) for key, value in first.items()}
        return {"step": zero, **moments} if self.layout.counts else moments

    def update(
        self,
        updates: Sequence[HostUpdate],
        scale: float = 1.0,
        keep: Callable[[], object] = int,
    ) -> None:
        """Make a step, and add 1 to the step counts; all is checked before anything changes.

        A step that is interrupted by Ctrl-C is made all the same, or not at all.

        Parameters
        ----------
        scale : gradients are divided by it first, in place, as by torch's fused steps.
        keep : called when all has been checked, perhaps twice: keeps the states.

        Raises
        ------
        ParameterError, GradientError, StateError : nothing has changed.
        ArgumentError : scalar registers cannot hold what follows from the options, or as `check`;
            nothing has changed.
        """
        same: dict[tuple[int, bool], list[HostUpdate]] = {}
        for each in updates:
            same.setdefault((id(each.arguments), each.negate), []).append(each)
        runs = [self._checked(each) for each in same.values()]
        divided, changes = ({}, []) if scale == 1.0 else _divided(updates, scale)
        changes.append(keep)
        for run in runs:
            for each in run.alone:
                gradient = divided.get(id(each.gradient), each.gradient)
                changes.append(self._alone(each._replace(gradient=gradient)))
            if run.joined:
                changes.append(self._run(run.first, run.counts, run.rows))
                written = _written(run.first)
                changed = [tensors[index] for tensors in run.joined for index in written]
                changes.append(partial(torch.autograd.graph.increment_version, changed))
        counts = [each.state["step"] for each in updates] if self.layout.counts else []
        if counts:  # without alpha torch would make each its own tensor of 1
            one = torch.ones((), device="cpu")
            changes.append(once(partial(torch._foreach_add_, counts, one, alpha=1)))
        _make(changes)

    def _checked(self, updates: Sequence[HostUpdate]) -> _Run:
        """Updates with the same arguments as a run."""
        first = updates[0]
        first.arguments.check()
        self.check(first.arguments.form)
        plain: list[HostUpdate] = []
        alone: list[HostUpdate] = []
        joined: list[list[Tensor]] = []
        for each in updates:
            tensors, shape = self._tensors(each), each.parameter.shape
            if not all(is_plain(t) and t.shape == shape and not t.is_neg() for t in tensors):
                self._check(each)
                alone.append(each)
            else:
                plain.append(each)
                joined.append(tensors)
        counts, rows = _memory(joined)
        for each in [u for u, row in zip(plain, rows, strict=True) if not row.all()]:
            self._check(each)
        if _overlap(counts, rows):
            for each, tensors in zip(plain, joined, strict=True):
                if _overlap(*_memory([[tensors[index] for index in _written(each)]])):
                    raise StateError(each.name, "share no memory with it", "memory of it")
            return _Run(first, [], counts[:0], rows[:0], list(updates))
        return _Run(first, joined, counts, rows, alone)

    def _tensors(self, update: HostUpdate) -> list[Tensor]:
        """Arrays of an update, in the order of the rule."""
        _, arguments, _, parameter, gradient, state = update
        found = []
        for name in arguments.form.rule.arrays_in:
            if name == PARAMETER:
                found.append(parameter)
            elif name == GRADIENT:
                found.append(gradient)
            else:
                key = self._keys[name]
                if key not in state:
                    raise StateError(update.name, f"have {key!r}", sorted(state))
                found.append(state[key])
        return found

    def _check(self, update: HostUpdate) -> None:
        """Raise unless tensors can be updated."""
        name, parameter, gradient = update.name, update.parameter, update.gradient
        arrays = update.arguments.form.rule.states
        check_parameter(name, parameter)
        if not _is_here(parameter):
            raise ParameterError(name, EXPECTED, _described(parameter))
        check_gradient(name, parameter, gradient)
        if not _is_here(gradient):
            raise GradientError(name, EXPECTED, _described(gradient))
        for key in (key for array, key in self._keys.items() if array in arrays):
            moment = update.state[key]
            check_moment(name, parameter, key, moment)
            if not _is_here(moment) or shares_memory(local(moment)):
                raise StateError(name, f"have {key!r} {EXPECTED}", _described(moment))

    def _alone(self, update: HostUpdate) -> Callable[[], None]:
        """What updates a parameter of any layout; called again, it does what was left out."""
        changes: list[Callable[[], object]] = []

        def make() -> None:
            changes.extend(() if changes else self._changes(update))
            for each in changes:
                each()

        return make

    def _changes(self, update: HostUpdate) -> list[Callable[[], object]]:
        """What changes tensors of any layout, as they are now, each once."""
        gradient = redistributed(update.gradient, update.parameter)
        tensors = self._tensors(update._replace(gradient=gradient))
        strides = local(update.parameter).stride()
        order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
        views = [local(each).permute(order) for each in tensors]
        ready = [each.resolve_neg().contiguous() for each in views]
        if _overlap(*_memory([ready])):  # of the gradient with another tensor
            ready = [each.clone() for each in ready]
        run = self._run(update, *_memory([ready]))
        changes: list[Callable[[], object]] = [run, partial(tuple, ready)]  # keeps their memory
        for index in _written(update):
            if ready[index].data_ptr() != views[index].data_ptr():
                changes.append(once(partial(views[index].copy_, ready[index])))
            changes.append(partial(mark_changed, tensors[index]))
        return changes

    def _run(
        self, update: HostUpdate, counts: NDArray[np.uint64], rows: NDArray[np.uint64]
    ) -> Callable[[], None]:
        factor = -1.0 if update.negate else 1.0
        return self.processor.blocks(update.arguments, counts, rows, factor)


def _make(changes: Sequence[Callable[[], object]]) -> None:
    try:
        for each in changes:
            each()
    except BaseException:
        for each in changes:  # Ctrl-C: those that were made are not made again
            each()
        raise


def _written(update: HostUpdate) -> list[int]:
    """Positions of the tensors that an update writes."""
    names = update.arguments.form.rule.arrays_in
    return [index for index, name in enumerate(names) if name != GRADIENT]


def _is_here(tensor: Tensor) -> bool:
    """Whether elements are fp32 in memory of the host."""
    part = local(tensor)
    has_memory = not part.numel() or part.data_ptr() != 0
    return part.dtype is torch.float32 and part.is_cpu and has_memory


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}, of strides {tuple(tensor.stride())}"


def _memory(tensors: Sequence[Sequence[Tensor]]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Elements and addresses of the tensors of some updates."""
    counts = np.array([each[0].numel() for each in tensors], np.uint64)
    rows = np.array([[t.data_ptr() for t in each] for each in tensors], np.uint64)
    return counts, rows.reshape(len(tensors), -1 if tensors else 0)


def _overlap(counts: NDArray[np.uint64], rows: NDArray[np.uint64]) -> bool:
    """Whether any of the arrays at these addresses, of so many fp32 elements, share memory."""
    starts = rows.ravel()
    stops = (rows + np.uint64(4) * counts[:, None]).ravel()
    order = np.argsort(starts)
    reached = np.maximum.accumulate(stops[order])
    return bool((starts[order][1:] < reached[:-1]).any())


def _divided(
    updates: Iterable[HostUpdate], scale: float
) -> tuple[dict[int, Tensor], list[Callable[[], object]]]:
    """What divides gradients, in place unless their elements share memory; gradients by `id` of
    those that there were."""
    divided: dict[int, Tensor] = {}
    changes: list[Callable[[], object]] = []
    for each in updates:
        gradient = each.gradient
        if id(gradient) in divided:
            continue
        if is_plain(gradient) or not shares_memory(local(gradient)):
            divided[id(gradient)] = gradient
            changes.append(once(partial(local(gradient).div_, scale)))
        else:
            divided[id(gradient)] = gradient / scale
            changes.append(partial(setattr, each.parameter, "grad", divided[id(gradient)]))
    return divided, changes
