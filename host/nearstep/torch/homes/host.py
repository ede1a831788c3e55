"""Parameters and state as torch has them, updated in place by this machine's processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearstep import blockwise
from nearstep.errors import ArgumentError
from nearstep.threads import once
from nearstep.torch.checks import (
    check_gradient,
    check_parameter,
    is_plain,
    label,
    shares_memory,
)
from nearstep.torch.convert import mark_changed, size
from nearstep.torch.dtensor import local, redistributed
from nearstep.torch.errors import GradientError, ParameterError, StateError
from nearstep.torch.formats import TENSORS, Formats, encoded
from nearstep.torch.layout import Layout
from nearstep.torch.state import check_moment, check_scales
from nearstep.updater.arguments import RuleArguments
from nearstep.updater.processor import Processor
from nearstep_spec.rule.columns import Columns
from nearstep_spec.rule.optimizer import Form

EXPECTED = "of {} on the CPU, with memory, if there is no device"
PARAMETER, GRADIENT = "p", "g"


class HostUpdate(NamedTuple):
    """A parameter to be updated. A parameter that is twice in a group has two updates.

    Attributes
    ----------
    place : group of the parameter, number of the group, position in it.
    arguments : of the rule. Updates with the same object share a run.
    negate : maximize.
    state : `optimizer.state[parameter]`, or what `first_state` returned.
    columns : formats of the tensors.
    number : index of the first element, for random bits.
    """

    place: tuple[Mapping[str, Any], int, int]
    arguments: RuleArguments
    negate: bool
    columns: Columns
    number: int
    parameter: Tensor
    gradient: Tensor
    state: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What errors call the parameter."""
        return label(*self.place)


class _Part(NamedTuple):
    """A tensor of an update: an array, or the scales of one in 8 bits."""

    name: str
    dtype: torch.dtype
    scales: bool


class _Run(NamedTuple):
    """Updates of one rule with the same arguments.

    Attributes
    ----------
    first : one of them.
    joined : tensors of each update of one call of the processor.
    blocks : as of `Processor.blocks`.
    alone : updates one after the other: of tensors that are no plain ones, or share memory.
    """

    first: HostUpdate
    joined: list[list[Tensor]]
    blocks: NDArray[np.uint64]
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

    def check(self, form: Form, columns: Columns) -> None:
        """Compile a rule, unless that has been done.

        Raises
        ------
        ArgumentError : the rule has other arrays than parameters, gradients and state.
        NearstepError : the compiler failed.
        """
        rule, known = form.rule, (PARAMETER, GRADIENT, *self._keys)
        wrong = [each for each in (*rule.arrays_in, *rule.outputs) if each not in known]
        if wrong:
            raise ArgumentError(
                f"{rule.location}: arrays of {rule.name} must be of {', '.join(known)}, "
                f"not {', '.join(wrong)}"
            )
        self.processor.prepare(form, columns)

    def first_state(
        self,
        parameter: Tensor,
        keys: Iterable[str],
        initial: Mapping[str, float],
        formats: Formats,
    ) -> dict[str, Any]:
        """State of a parameter before its first step.

        Parameters
        ----------
        parameter
        keys : of the moments that there are.
        initial : value of the elements of an array.
        formats : of arrays.
        """
        state: dict[str, Any] = {}
        if self.layout.counts:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        for key in keys:
            array = self.layout.moments[key]
            form, value = formats.state_of(array), initial.get(array, 0.0)
            if key not in self.layout.scales:
                state[key] = self.allocate(key, parameter, TENSORS[form]).fill_(value)
                continue
            codes, scales = encoded(torch.full((1,), value, dtype=torch.float32), form)
            state[key] = self.allocate(key, parameter, torch.uint8).fill_(codes.item())
            groups = local(parameter).new_empty(blockwise.groups(size(parameter)))
            name = self.layout.scales[key]
            state[name] = self.allocate(name, groups, torch.float32).fill_(scales.item())
        return state

    def allocate(self, key: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor of the state under a key, of the shape and layout of another one."""
        return torch.empty_like(like, dtype=dtype, requires_grad=False)

    def update(
        self,
        updates: Sequence[HostUpdate],
        scale: float = 1.0,
        keep: Callable[[], object] = int,
        seed: int = 0,
    ) -> None:
        """Make a step, and add 1 to the step counts; all is checked before anything changes.

        A step that is interrupted by Ctrl-C is made all the same, or not at all.

        Parameters
        ----------
        scale : gradients are divided by it, in place, as by torch's fused steps: those of fp32
            first; others after the update, which divides them in fp32 without rounding.
        keep : called when all has been checked, perhaps twice: keeps the states.
        seed : of random bits.

        Raises
        ------
        ParameterError, GradientError, StateError : nothing has changed.
        ArgumentError : scalar registers cannot hold what follows from the options, or as `check`;
            nothing has changed.
        """
        same: dict[tuple[int, bool, int], list[HostUpdate]] = {}
        for each in updates:
            same.setdefault((id(each.arguments), each.negate, id(each.columns)), []).append(each)
        runs = [self._checked(each, scale) for each in same.values()]
        divided, changes, late = ({}, [], []) if scale == 1.0 else _divided(updates, scale)
        changes.append(keep)
        for run in runs:
            for each in run.alone:
                gradient = divided.get(id(each.gradient), each.gradient)
                changes.append(self._alone(each._replace(gradient=gradient), scale, seed))
            if run.joined:
                changes.append(self._run(run.first, run.blocks, seed))
                written = self._written(run.first)
                changed = [tensors[index] for tensors in run.joined for index in written]
                changes.append(partial(torch.autograd.graph.increment_version, changed))
        counts = [each.state["step"] for each in updates] if self.layout.counts else []
        if counts:  # without alpha torch would make each its own tensor of 1
            one = torch.ones((), device="cpu")
            changes.append(once(partial(torch._foreach_add_, counts, one, alpha=1)))
        _make([*changes, *late])

    def _checked(self, updates: Sequence[HostUpdate], scale: float) -> _Run:
        """Updates with the same arguments and formats as a run."""
        if scale != 1.0:
            columns = updates[0].columns.widened(GRADIENT)
            updates = [each._replace(columns=columns) for each in updates]
        first = updates[0]
        first.arguments.check()
        self.check(first.arguments.form, first.columns)
        parts, slots = self._parts(first), self._slots(first)
        dtypes, coded = [each.dtype for each in parts], bool(self.layout.scales)
        plain: list[HostUpdate] = []
        alone: list[HostUpdate] = []
        joined: list[list[Tensor]] = []
        for each in updates:
            tensors, shape = _tensors(each, slots), each.parameter.shape
            shapes = self._shapes(each) if coded else [shape] * len(tensors)
            for tensor, dtype, expected in zip(tensors, dtypes, shapes, strict=True):
                known = is_plain(tensor, dtype) and tensor.shape == expected
                if not known or tensor.is_neg():
                    self._check(each)
                    alone.append(each)
                    break
            else:
                plain.append(each)
                joined.append(tensors)
        blocks = _blocks(plain, joined)
        if not blocks[:, 2:].all():
            for each, row in zip(plain, blocks[:, 2:], strict=True):
                if not row.all():
                    self._check(each)
        if _overlap(blocks, parts):
            written = self._written(first)
            for each, tensors in zip(plain, joined, strict=True):
                own = _blocks([each], [[tensors[index] for index in written]])
                if _overlap(own, [parts[index] for index in written]):
                    raise StateError(each.name, "share no memory with it", "memory of it")
            return _Run(first, [], blocks[:0], list(updates))
        return _Run(first, joined, blocks, alone)

    def _parts(self, update: HostUpdate) -> list[_Part]:
        """What the tensors of an update are."""
        columns = update.columns
        return [
            _Part(name, torch.float32 if scales else TENSORS[columns.format_of(name)], scales)
            for name, scales in columns.parts(update.arguments.form.rule.arrays_in)
        ]

    def _shapes(self, update: HostUpdate) -> list[Sequence[int]]:
        """Shapes of the tensors of an update."""
        shape, groups = update.parameter.shape, (blockwise.groups(size(update.parameter)),)
        return [groups if part.scales else shape for part in self._parts(update)]

    def _written(self, update: HostUpdate) -> list[int]:
        """Positions of the tensors that an update writes."""
        parts = enumerate(self._parts(update))
        return [index for index, part in parts if part.name != GRADIENT]

    def _slots(self, update: HostUpdate) -> list[str]:
        """Where the tensors of an update are: keys of the state, `PARAMETER` or `GRADIENT`."""
        keys, scales = {**self._keys, PARAMETER: PARAMETER, GRADIENT: GRADIENT}, self.layout.scales
        parts = self._parts(update)
        return [scales[keys[each.name]] if each.scales else keys[each.name] for each in parts]

    def _check(self, update: HostUpdate) -> None:
        """Raise unless tensors can be updated."""
        name, parameter, gradient = update.name, update.parameter, update.gradient
        arrays, columns = update.arguments.form.rule.states, update.columns
        check_parameter(name, parameter)
        if not _is_here(parameter, TENSORS[columns.format_of(PARAMETER)]):
            raise ParameterError(name, EXPECTED.format(parameter.dtype), _described(parameter))
        check_gradient(name, parameter, gradient)
        if not _is_here(gradient, gradient.dtype):
            raise GradientError(name, EXPECTED.format(gradient.dtype), _described(gradient))
        for key in (key for array, key in self._keys.items() if array in arrays):
            scales = self.layout.scales.get(key)
            dtype = TENSORS[columns.format_of(self.layout.moments[key])]
            check_moment(name, parameter, key, update.state[key], dtype if scales else None)
            self._check_here(update, key, dtype)
            if scales:
                check_scales(name, parameter, scales, update.state[scales])
                self._check_here(update, scales, torch.float32)

    def _check_here(self, update: HostUpdate, key: str, dtype: torch.dtype) -> None:
        moment = update.state[key]
        if not _is_here(moment, dtype) or shares_memory(local(moment)):
            expected = f"have {key!r} {EXPECTED.format(dtype)}"
            raise StateError(update.name, expected, _described(moment))

    def _alone(self, update: HostUpdate, scale: float, seed: int) -> Callable[[], None]:
        """What updates a parameter of any layout; called again, it does what was left out."""
        changes: list[Callable[[], object]] = []

        def make() -> None:
            changes.extend(() if changes else self._changes(update, scale, seed))
            for each in changes:
                each()

        return make

    def _changes(self, update: HostUpdate, scale: float, seed: int) -> list[Callable[[], object]]:
        """What changes tensors of any layout, as they are now, each once."""
        gradient = redistributed(update.gradient, update.parameter)
        if scale != 1.0 and gradient.dtype is not torch.float32:
            gradient = gradient.float().div_(scale)
        tensors = _tensors(update._replace(gradient=gradient), self._slots(update))
        strides = local(update.parameter).stride()
        order = list(range(len(strides)))
        if not update.columns.in_order:
            order.sort(key=strides.__getitem__, reverse=True)
        shape = local(update.parameter).shape
        views = [
            part.permute(order) if part.shape == shape else part for part in map(local, tensors)
        ]
        ready = [each.resolve_neg().contiguous() for each in views]
        # A gradient may share memory with another tensor.
        if _overlap(_blocks([update], [ready]), self._parts(update)):
            ready = [each.clone() for each in ready]
        run = self._run(update, _blocks([update], [ready]), seed)
        changes: list[Callable[[], object]] = [run, partial(tuple, ready)]  # keeps their memory
        for index in self._written(update):
            if ready[index].data_ptr() != views[index].data_ptr():
                changes.append(once(partial(views[index].copy_, ready[index])))
            changes.append(partial(mark_changed, tensors[index]))
        return changes

    def _run(self, update: HostUpdate, blocks: NDArray[np.uint64], seed: int) -> Callable[[], None]:
        factor = -1.0 if update.negate else 1.0
        return self.processor.blocks(
            update.arguments, update.columns, blocks, gradient_scale=factor, seed=seed
        )


def _make(changes: Sequence[Callable[[], object]]) -> None:
    try:
        for each in changes:
            each()
    except BaseException:
        for each in changes:  # Ctrl-C: those that were made are not made again
            each()
        raise


def _is_here(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether elements are of a dtype, in memory of the host."""
    part = local(tensor)
    has_memory = not part.numel() or part.data_ptr() != 0
    return part.dtype is dtype and part.is_cpu and has_memory


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}, of strides {tuple(tensor.stride())}"


def _tensors(update: HostUpdate, slots: Iterable[str]) -> list[Tensor]:
    """Tensors of an update.

    Raises
    ------
    StateError
    """
    state, own = update.state, {PARAMETER: update.parameter, GRADIENT: update.gradient}
    try:
        return [own[slot] if slot in own else state[slot] for slot in slots]
    except KeyError as error:
        raise StateError(update.name, f"have {error.args[0]!r}", sorted(state)) from None


def _blocks(
    updates: Sequence[HostUpdate], tensors: Sequence[Sequence[Tensor]]
) -> NDArray[np.uint64]:
    """Elements, index and addresses of the tensors of some updates."""
    rows = [
        [each[0].numel(), update.number, *[t.data_ptr() for t in each]]
        for update, each in zip(updates, tensors, strict=True)
    ]
    return np.array(rows, np.uint64).reshape(len(rows), -1 if rows else 2)


def _overlap(blocks: NDArray[np.uint64], parts: Sequence[_Part]) -> bool:
    """Whether any of the arrays of these blocks share memory."""
    counts, starts = blocks[:, :1].astype(np.int64), blocks[:, 2:].astype(np.int64)
    groups, scales = -(-counts // blockwise.GROUP), np.array([each.scales for each in parts])
    sizes = np.where(scales, groups, counts) * np.array([each.dtype.itemsize for each in parts])
    stops = (starts + sizes).ravel() if len(blocks) else starts.ravel()
    order = np.argsort(starts.ravel())
    reached = np.maximum.accumulate(stops[order])
    return bool((starts.ravel()[order][1:] < reached[:-1]).any())


def _divided(
    updates: Iterable[HostUpdate], scale: float
) -> tuple[dict[int, Tensor], list[Callable[[], object]], list[Callable[[], object]]]:
    """What divides gradients: before the updates those of fp32, after them others, in place unless
    their elements share memory; gradients by `id` of those that there were."""
    divided: dict[int, Tensor] = {}
    changes: list[Callable[[], object]] = []
    late: list[Callable[[], object]] = []
    for each in updates:
        gradient = each.gradient
        if id(gradient) in divided:
            continue
        divided[id(gradient)] = gradient
        is_wide = gradient.dtype is torch.float32
        if is_plain(gradient, gradient.dtype) or not shares_memory(local(gradient)):
            (changes if is_wide else late).append(once(partial(local(gradient).div_, scale)))
        elif is_wide:
            divided[id(gradient)] = gradient / scale
            changes.append(partial(setattr, each.parameter, "grad", divided[id(gradient)]))
        else:
            late.append(once(partial(setattr, each.parameter, "grad", gradient / scale)))
    return divided, changes, late
