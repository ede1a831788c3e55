"""Parameters and state as torch has them, updated in place by this machine's processor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearstep.errors import ArgumentError
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
    parameter, gradient
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
    joined : updates of one call of the processor.
    counts, rows : elements, and addresses of the arrays, of each of these.
    alone : updates one after the other: of tensors that are no plain ones, or share memory.
    """

    joined: list[HostUpdate]
    counts: NDArray[np.uint64]
    rows: NDArray[np.uint64]
    alone: list[HostUpdate]


class HostHome:
    """Updates the user's tensors in place: parameters, and state in `optimizer.state`.

    A tensor that is not dense, or is a negated view, is updated through a copy; dense layouts such
    as `torch.channels_last` are not copied where all tensors of a parameter have the same.

    Parameters
    ----------
    layout : state of a parameter.
    processor
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
        parameter
        keys : of the moments that there are.
        initial : value of the elements of an array.
        """
        state: dict[str, Any] = {}
        if self.layout.counts:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        for key in keys:
            first = initial.get(self.layout.moments[key], 0.0)
            state[key] = torch.full_like(
                parameter.detach(), first, memory_format=torch.preserve_format
            )
        return state

    def update(self, updates: Sequence[HostUpdate], scale: float = 1.0) -> None:
        """Make a step, and add 1 to the step counts; all is checked before anything changes.

        A step that is interrupted leaves some tensors new, as one of torch does.

        Parameters
        ----------
        updates
        scale : gradients are divided by it first, in place, as by torch's fused steps.

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
        if scale != 1.0:
            divided = _divided(updates, scale)
            runs = [
                run._replace(
                    alone=[each._replace(gradient=divided[id(each.gradient)]) for each in run.alone]
                )
                for run in runs
            ]
        for run in runs:
            self._make(run)
        counts = [each.state["step"] for each in updates] if self.layout.counts else []
        if counts:  # without alpha torch would make each its own tensor of 1
            torch._foreach_add_(counts, torch.ones((), device="cpu"), alpha=1)

    def _checked(self, updates: Sequence[HostUpdate]) -> _Run:
        """Updates with the same arguments as a run."""
        arguments = updates[0].arguments
        arguments.check()
        self.check(arguments.form)
        joined: list[HostUpdate] = []
        alone: list[HostUpdate] = []
        rows: list[list[int]] = []
        for each in updates:
            tensors = self._tensors(each)
            if not all(map(_is_direct, tensors)) or len({t.shape for t in tensors}) > 1:
                self._check(each)
                alone.append(each)
            elif each.parameter.numel():
                joined.append(each)
                rows.append([t.data_ptr() for t in tensors])
        counts = np.array([each.parameter.numel() for each in joined], np.uint64)
        table = np.array(rows, np.uint64).reshape(len(joined), len(arguments.form.rule.arrays_in))
        if not table.all():
            self._check(joined[int((table == 0).any(axis=1).argmax())])
        if _overlap(counts, table):
            written = [
                n for n, name in enumerate(arguments.form.rule.arrays_in) if name != GRADIENT
            ]
            for each, row in zip(joined, table, strict=True):
                if _overlap(np.array([each.parameter.numel()], np.uint64), row[None, written]):
                    raise StateError(each.name, "share no memory with it", "memory of it")
            alone = [each for each in updates if each.parameter.numel()]
            joined, counts, table = [], counts[:0], table[:0]
        return _Run(joined, counts, table, alone)

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
        check_parameter(name, parameter)
        if not _is_here(parameter):
            raise ParameterError(name, EXPECTED, _described(parameter))
        check_gradient(name, parameter, gradient)
        if not _is_here(gradient):
            raise GradientError(name, EXPECTED, _described(gradient))
        for array in update.arguments.form.rule.states:
            if array == PARAMETER:
                continue
            key = self._keys[array]
            moment = update.state[key]
            check_moment(name, parameter, key, moment)
            if not _is_here(moment) or shares_memory(local(moment)):
                raise StateError(name, f"have {key!r} {EXPECTED}", _described(moment))

    def _make(self, run: _Run) -> None:
        for update in run.alone:
            self._update_alone(update)
        if not run.joined:
            return
        first = run.joined[0]
        self.processor.run_blocks(
            first.arguments, run.counts, run.rows, -1.0 if first.negate else 1.0
        )
        written = [each.parameter for each in run.joined]
        keys = [key for name, key in self._keys.items() if name in first.arguments.form.rule.states]
        for key in keys:
            written += [each.state[key] for each in run.joined]
        torch.autograd.graph.increment_version(written)

    def _update_alone(self, update: HostUpdate) -> None:
        """Update a parameter of any layout."""
        names = update.arguments.form.rule.arrays_in
        gradient = redistributed(update.gradient, update.parameter)
        tensors = self._tensors(update._replace(gradient=gradient))
        parts = [local(each) for each in tensors]
        strides = local(update.parameter).stride()
        order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
        views = [each.permute(order) for each in parts]
        ready = [each.resolve_neg().contiguous() for each in views]
        count = np.array([ready[0].numel()], np.uint64)
        if _overlap(count, _addresses(ready)):  # of the gradient with another tensor
            ready = [each.clone() for each in ready]
        row = _addresses(ready)
        self.processor.run_blocks(update.arguments, count, row, -1.0 if update.negate else 1.0)
        for name, tensor, view, made in zip(names, tensors, views, ready, strict=True):
            if name != GRADIENT:
                if made.data_ptr() != view.data_ptr():
                    view.copy_(made)
                mark_changed(tensor)


def _is_direct(tensor: object) -> bool:
    """Whether the address of a tensor is that of its elements in order."""
    return isinstance(tensor, Tensor) and is_plain(tensor) and not tensor.is_neg()


def _is_here(tensor: Tensor) -> bool:
    """Whether elements are fp32 in memory of the host."""
    part = local(tensor)
    has_memory = not part.numel() or part.data_ptr() != 0
    return part.dtype is torch.float32 and part.is_cpu and has_memory


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}, of strides {tuple(tensor.stride())}"


def _addresses(tensors: Iterable[Tensor]) -> NDArray[np.uint64]:
    return np.array([[each.data_ptr() for each in tensors]], np.uint64)


def _overlap(counts: NDArray[np.uint64], rows: NDArray[np.uint64]) -> bool:
    """Whether any of the arrays at these addresses, of so many fp32 elements, share memory."""
    starts = rows.ravel()
    stops = (rows + np.uint64(4) * counts[:, None]).ravel()
    order = np.argsort(starts)
    reached = np.maximum.accumulate(stops[order])
    return bool((starts[order][1:] < reached[:-1]).any())


def _divided(updates: Iterable[HostUpdate], scale: float) -> dict[int, Tensor]:
    """Divide gradients, in place unless their elements share memory; gradients by `id` of those
    that there were."""
    divided: dict[int, Tensor] = {}
    for each in updates:
        gradient = each.gradient
        if id(gradient) in divided:
            continue
        if is_plain(gradient) or not shares_memory(local(gradient)):
            divided[id(gradient)] = gradient
            local(gradient).div_(scale)
        else:
            divided[id(gradient)] = gradient / scale
            each.parameter.grad = divided[id(gradient)]
    return divided
