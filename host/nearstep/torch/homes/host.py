"""Parameters and state as torch has them, updated in place by this machine's processor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearstep import blockwise
from nearstep.errors import ArgumentError
from nearstep.threads import once
from nearstep.torch.checks import (
    KnownTensors,
    any_nested,
    are_plain,
    check_gradient,
    check_parameter,
    is_plain,
    label,
    shares_memory,
)
from nearstep.torch.convert import mark_changed, size
from nearstep.torch.dtensor import local, redistributed
from nearstep.torch.errors import GradientError, ParameterError, StateError
from nearstep.torch.formats import TENSORS, Formats, quantize, spread_scales
from nearstep.torch.layout import Layout
from nearstep.torch.state import check_moment, check_scales
from nearstep.updater.arguments import RuleArguments
from nearstep.updater.processor import Processor
from nearstep_spec.rule.columns import Columns
from nearstep_spec.rule.optimizer import Form

EXPECTED = "of {} on the CPU, with memory, if there is no device"
PARAMETER, GRADIENT = "p", "g"
_SHAPE = operator.attrgetter("shape")


class HostUpdate(NamedTuple):
    """Parameters of a group that are updated alike: one run of the rule.

    Attributes
    ----------
    group : of the parameters.
    number : of the group.
    arguments : of the rule.
    negate : maximize.
    columns : formats of the tensors.
    positions : of the parameters in the group; one that is there twice is updated twice.
    indices : of the first element of each parameter, for random bits.
    states : `optimizer.state` of each parameter, or what `first_state` returned.
    """

    group: Mapping[str, Any]
    number: int
    arguments: RuleArguments
    negate: bool
    columns: Columns
    positions: list[int]
    indices: list[int]
    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[Mapping[str, Any]]

    def take(self, chosen: Sequence[int]) -> HostUpdate:
        """Return the update of some of the parameters."""
        return self._replace(
            positions=[self.positions[i] for i in chosen],
            indices=[self.indices[i] for i in chosen],
            parameters=[self.parameters[i] for i in chosen],
            gradients=[self.gradients[i] for i in chosen],
            states=[self.states[i] for i in chosen],
        )

    def each(self) -> list[HostUpdate]:
        """Return an update for each parameter."""
        return [self.take([index]) for index in range(len(self.parameters))]

    @property
    def name(self) -> str:
        """What errors call the first parameter."""
        return label(self.group, self.number, self.positions[0])


SecondUpdate = tuple[Callable[[], object], HostUpdate]
"""What computes the gradient of one parameter for the second run of a step, and that run."""


class _Part(NamedTuple):
    """A tensor of an update: an array, or the scales of one in 8 bits."""

    name: str
    dtype: torch.dtype
    scales: bool


class _Run(NamedTuple):
    """An update that has been checked.

    Attributes
    ----------
    plain : parameters of one call of the processor.
    columns : their tensors, by parts of an update.
    blocks : as of `Processor.blocks`.
    alone : parameters that are updated one after the other: of tensors that are no plain ones, or
        share memory.
    """

    plain: HostUpdate
    columns: list[list[Tensor]]
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
        self._known = KnownTensors()

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
            full = partial(torch.full, dtype=torch.float32, device="cpu")
            codes, scales = quantize(full((1,), value), form)
            state[key] = self.allocate(key, parameter, torch.uint8).fill_(codes.item())
            groups = full((blockwise.groups(size(parameter)),), scales.item())
            first = spread_scales(groups.to(local(parameter).device), parameter)
            name = self.layout.scales[key]
            state[name] = self.allocate(name, first, torch.float32).copy_(first)
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
        again: Sequence[SecondUpdate] = (),
    ) -> int:
        """Make a step, and add 1 to the step counts; all is checked before anything changes.

        A step that is interrupted by Ctrl-C is made all the same, or not at all.

        Parameters
        ----------
        scale : gradients are divided by it, in place, as by torch's fused steps: those of fp32
            first; others after the update, which divides them in fp32 without rounding.
        keep : called when all has been checked, perhaps twice: keeps the states.
        seed : of random bits.
        again : updates in order, after all others.

        Returns
        -------
        int : elements of `updates`.

        Raises
        ------
        ParameterError, GradientError, StateError : nothing has changed.
        ArgumentError : scalar registers cannot hold what follows from the options, or as `check`;
            nothing has changed.
        """
        runs = [self._checked(each, scale) for each in updates]
        divided, changes, late = ({}, [], []) if scale == 1.0 else _divided(updates, scale)
        changes.append(keep)
        for run in runs:
            changes += self._changes_of(run, divided, scale, seed)
        later = [(compute, self._checked(each)) for compute, each in again]
        for compute, run in later:
            changes += [compute, *self._changes_of(run, {}, 1.0, seed)]
        states = [state for each in updates for state in each.states]
        counts = [state["step"] for state in states] if self.layout.counts else []
        if counts:  # without alpha torch would make each its own tensor of 1
            one = torch.ones((), device="cpu")
            changes.append(once(partial(torch._foreach_add_, counts, one, alpha=1)))
        _make([*changes, *late])
        alone = (each.parameters[0].numel() for run in runs for each in run.alone)
        return sum(int(run.blocks[:, 0].sum()) for run in runs) + sum(alone)

    def _changes_of(
        self, run: _Run, divided: Mapping[int, Tensor], scale: float, seed: int
    ) -> Iterator[Callable[[], object]]:
        """Yield the changes of a run."""
        for each in run.alone:
            gradients = [divided.get(id(g), g) for g in each.gradients]
            yield self._alone(each._replace(gradients=gradients), scale, seed)
        if len(run.blocks):
            yield self._run(run.plain, run.blocks, seed)
            changed = [t for index in self._written(run.plain) for t in run.columns[index]]
            yield partial(torch.autograd.graph.increment_version, changed)

    def _checked(self, update: HostUpdate, scale: float = 1.0) -> _Run:
        """An update as a run."""
        if scale != 1.0:
            update = update._replace(columns=update.columns.widened(GRADIENT))
        update.arguments.check()
        self.check(update.arguments.form, update.columns)
        parts, slots = self._parts(update), self._slots(update)
        alone: list[HostUpdate] = []
        columns = _columns(update, slots)
        key = update.number, update.indices[0], *parts
        tensors = [*chain.from_iterable(columns)]
        moments = (c for c, s in zip(columns, slots, strict=True) if s not in (PARAMETER, GRADIENT))
        check = partial(_are_plain, update, columns, parts)
        if any(map(any_nested, moments)) or not self._known.passed(key, tensors, check):
            plain = []
            for index, each in enumerate(update.each()):
                if _are_plain(each, _columns(each, slots), parts):
                    plain.append(index)
                else:
                    self._check(each)
                    alone.append(each)
            update = update.take(plain)
            columns = _columns(update, slots)
        blocks = _blocks(update, columns)
        for index in np.flatnonzero(~blocks[:, 2:].all(1)).tolist():
            self._check(update.take([index]))
        if _overlap(blocks, parts):
            written = self._written(update)
            for index, row in enumerate(blocks):
                own = row[None, [0, 1, *(2 + column for column in written)]]
                if _overlap(own, [parts[column] for column in written]):
                    name = update.take([index]).name
                    raise StateError(name, "share no memory with it", "memory of it")
            return _Run(update, [], blocks[:0], [*update.each(), *alone])
        return _Run(update, columns, blocks, alone)

    def _parts(self, update: HostUpdate) -> list[_Part]:
        """What the tensors of an update are."""
        columns = update.columns
        return [
            _Part(name, torch.float32 if scales else TENSORS[columns.format_of(name)], scales)
            for name, scales in columns.parts(update.arguments.form.rule.arrays_in)
        ]

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
        """Raise unless the tensors of a parameter can be updated."""
        (parameter,), (gradient,), (state,) = update.parameters, update.gradients, update.states
        name = update.name
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
            check_moment(name, parameter, key, state[key], dtype if scales else None)
            self._check_here(update, key, dtype)
            if scales:
                check_scales(name, parameter, scales, state[scales])
                self._check_here(update, scales, torch.float32)

    def _check_here(self, update: HostUpdate, key: str, dtype: torch.dtype) -> None:
        moment = update.states[0][key]
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
        (parameter,), (gradient,) = update.parameters, update.gradients
        gradient = redistributed(gradient, parameter)
        if scale != 1.0 and gradient.dtype is not torch.float32:
            gradient = gradient.float().div_(scale)
        columns = _columns(update._replace(gradients=[gradient]), self._slots(update))
        tensors = [tensor for (tensor,) in columns]
        strides = local(parameter).stride()
        order = list(range(len(strides)))
        if not update.columns.in_order:
            order.sort(key=strides.__getitem__, reverse=True)
        shape = local(parameter).shape
        views = [
            part.permute(order) if part.shape == shape else part for part in map(local, tensors)
        ]
        ready = [each.resolve_neg().contiguous() for each in views]
        # A gradient may share memory with another tensor.
        if _overlap(_blocks(update, [[each] for each in ready]), self._parts(update)):
            ready = [each.clone() for each in ready]
        run = self._run(update, _blocks(update, [[each] for each in ready]), seed)
        changes: list[Callable[[], object]] = [run, partial(tuple, ready)]  # keeps their memory
        for index in self._written(update):
            if ready[index].data_ptr() != views[index].data_ptr():
                changes.append(_once_written(Tensor.copy_, views[index], ready[index]))
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


def _once_written(write: Callable[..., Tensor], tensor: Tensor, value: Any) -> Callable[[], object]:
    """What writes a tensor in place, once."""
    if tensor.is_inference():  # and can be written in that mode alone
        write = torch.inference_mode()(write)
    return once(partial(write, tensor, value))


def _is_here(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether elements are of a dtype, in memory of the host."""
    part = local(tensor)
    has_memory = not part.numel() or part.data_ptr() != 0
    return part.dtype is dtype and part.is_cpu and has_memory


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}, of strides {tuple(tensor.stride())}"


def _columns(update: HostUpdate, slots: Iterable[str]) -> list[list[Tensor]]:
    """Tensors of an update, by slots.

    Raises
    ------
    StateError
    """
    columns = []
    for slot in slots:
        if slot in (PARAMETER, GRADIENT):
            columns.append(update.parameters if slot == PARAMETER else update.gradients)
            continue
        try:
            columns.append([state[slot] for state in update.states])
        except KeyError:
            wrong = next(each for each in update.each() if slot not in each.states[0])
            raise StateError(wrong.name, f"have {slot!r}", sorted(wrong.states[0])) from None
    return columns


def _are_plain(
    update: HostUpdate, columns: Sequence[Sequence[Tensor]], parts: Sequence[_Part]
) -> bool:
    """Whether all tensors of an update are plain, with the dtypes and shapes of its parts.

    Columns are checked one after the other: a loop over tensors takes three times as long.
    """

    def are_alike(tensors: Sequence[Tensor], part: _Part) -> bool:
        return are_plain(tensors, part.dtype) and not any(map(Tensor.is_neg, tensors))

    def fit(tensors: Sequence[Tensor], part: _Part) -> bool:
        if not part.scales:
            return all(map(Tensor.is_same_size, tensors, update.parameters))
        shapes = ((blockwise.groups(size(each)),) for each in update.parameters)
        return all(map(operator.eq, map(_SHAPE, tensors), shapes))

    return all(map(are_alike, columns, parts)) and all(
        tensors is update.parameters or fit(tensors, part)
        for tensors, part in zip(columns, parts, strict=True)
    )


def _blocks(update: HostUpdate, columns: Sequence[Sequence[Tensor]]) -> NDArray[np.uint64]:
    """Elements, index and addresses of the tensors of each parameter."""
    rows = [map(Tensor.numel, columns[0]), update.indices]
    rows += [map(Tensor.data_ptr, tensors) for tensors in columns]
    return np.stack([np.fromiter(row, np.uint64, len(update.indices)) for row in rows], 1)


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
    pairs = [pair for e in updates for pair in zip(e.parameters, e.gradients, strict=True)]
    for parameter, gradient in pairs:
        if id(gradient) in divided:
            continue
        divided[id(gradient)] = gradient
        is_wide = gradient.dtype is torch.float32
        if is_plain(gradient, gradient.dtype) or not shares_memory(local(gradient)):
            divided_by = _once_written(Tensor.div_, local(gradient), scale)
            (changes if is_wide else late).append(divided_by)
        elif is_wide:
            divided[id(gradient)] = gradient / scale
            changes.append(partial(setattr, parameter, "grad", divided[id(gradient)]))
        else:
            late.append(once(partial(setattr, parameter, "grad", gradient / scale)))
    return divided, changes, late
