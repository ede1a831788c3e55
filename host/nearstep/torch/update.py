"""One step of an optimizer: gather, check and plan everything, then have the plan executed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import cast

import numpy as np
import torch
from torch import Tensor

from nearstep.torch import convert
from nearstep.torch.checks import check_gradient, check_parameter, is_plain, label, shares_memory
from nearstep.torch.compression import Compressed, ScratchPool
from nearstep.torch.device_gradient import DeviceGradient, SparseGradient
from nearstep.torch.dtensor import local, redistributed
from nearstep.torch.exchange import TOGETHER_ELEMENTS, Results, Sends
from nearstep.torch.flat_bucket import FlatBucket, ReadyBucket, fits
from nearstep.torch.formats import copy_array, gradient_array
from nearstep.torch.homes.durable import DurableHome
from nearstep.torch.state import RESIDUAL, ParameterState, SavedState
from nearstep.torch.step import Gradient, RunKey, Scaling, StepItem, StepPlan
from nearstep.torch.table import Groups, Owner, States, StateTable
from nearstep.updater.accelerated import AcceleratedRuns


class Stepper:
    """Runs the steps of one optimizer, whose arrays are in a table.

    Attributes
    ----------
    buckets : groups of small parameters that are updated together.
    """

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._residuals = ScratchPool()
        self.buckets: list[FlatBucket] = []
        self._grouped: list[list[Tensor]] = []
        self._is_open = False

    def step(
        self,
        owner: Owner,
        scaling: Scaling,
        only: Container[Tensor] | None = None,
        *,
        ends: bool = True,
    ) -> bool:
        """Update every parameter that has a gradient; return False if the step was skipped.

        Parameters
        ----------
        owner : the optimizer.
        scaling : of the gradients, by a `GradScaler`.
        only : update these parameters alone; None: all.
        ends : False: others are updated later in the step.
        """
        table, groups = self._table, owner.param_groups
        if not self._is_open:
            table.executor.clear()
        self._is_open = not ends
        if only is not None:
            self.buckets.clear()  # their members are updated one by one
        bucketed = self._ready_buckets(owner)
        items = list(self._items(groups, [bucket for bucket, _ in bucketed], only))
        for index, group in enumerate(groups):
            wanted = [i.parameter for i in items if i.group == index and i.parameter is not None]
            if table.home.is_durable and not ends:  # a rollback keeps the extents of all
                wanted = [each for each in group["params"] if each.requires_grad]
            table.place(owner, group, wanted)
        plan = self._plan(owner, items, bucketed, scaling)
        home = table.home
        if isinstance(home, DurableHome):
            made = home.step(owner, plan, partial(self._apply, owner), ends=ends)
        else:
            made = self._apply(owner, plan)
        if not made:
            return False
        if scaling.scale != 1.0 and scaling.found is None:
            self._unscale(plan, scaling.scale)
        for item in items:
            if isinstance(item.gradient, SparseGradient):
                item.gradient.spent = True
        table.traffic.steps += ends
        table.traffic.elements += sum(item.resident.elements for item in plan.items)
        if only is None:
            self._keep_buckets(groups, bucketed, items)
        return True

    def _items(
        self, groups: Groups, buckets: Sequence[FlatBucket], only: Container[Tensor] | None
    ) -> Iterator[StepItem]:
        """Yield the checked items of parameters outside `buckets`.

        As in torch, the options of a group without gradients are not checked.
        """
        table = self._table
        for index, group in enumerate(groups):
            found: dict[Tensor, StepItem] = {}
            parameters = group["params"]
            own = [each for each in buckets if each.group == index]
            for position in _others(len(parameters), own):
                parameter = parameters[position]
                if not (only is None or parameter in only):
                    continue
                gradient = self._gradient(parameter)
                if gradient is None:
                    continue
                if not (found or own):
                    table.check_group(group)
                if isinstance(gradient, SparseGradient):
                    gradient.check(label(group, index, position), parameter)
                elif not isinstance(gradient, DeviceGradient):
                    plain = is_plain(parameter) and is_plain(gradient)
                    if not plain or gradient.shape != parameter.shape:
                        self._check_given(label(group, index, position), parameter, gradient)
                if parameter in found:
                    found[parameter].times += 1
                else:
                    found[parameter] = StepItem(index, position, gradient, 1, parameter)
            table.settings.check_parameters(found)
            yield from found.values()

    def _gradient(self, parameter: Tensor) -> Gradient | None:
        resident = self._table.parameters.get(parameter)
        held = None if resident is None else resident.held
        if held is not None:
            return None if held.applied else held
        return parameter.grad

    def _check_given(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        resident = self._table.parameters.get(parameter)
        if resident is None or not resident.offloaded:
            check_parameter(name, parameter)
        check_gradient(name, parameter, gradient)

    def _plan(
        self,
        owner: Owner,
        items: Sequence[StepItem],
        bucketed: Sequence[ReadyBucket],
        scaling: Scaling,
    ) -> StepPlan:
        """Determine the phase (step count, first step), state and run arguments of each item."""
        table, rule, arguments = self._table, self._table.rule, {}
        every = [*items, *(StepItem(b.group, -1, gradients) for b, gradients in bucketed)]
        for item, (bucket, _) in zip(every[len(items) :], bucketed, strict=True):
            item.resident = bucket
        for item in every:
            group = owner.param_groups[item.group]
            if item.parameter is None:
                resident, state = item.resident.first  # type: ignore[union-attr]
            else:
                item.resident = resident = table.parameters[item.parameter]
                resident.check_size()
                item.found = table.state_of(owner, resident)
                if isinstance(item.gradient, SparseGradient):
                    residual = self._residual_of(item.found)
                    item.gradient.check_residual(resident.label, residual)
                if isinstance(item.found, SavedState):
                    state = ParameterState.of(resident, item.found.step, item.found.moments)
                else:
                    state = item.found or table.first_state(resident, group)
            item.phase = rule.phase(group, resident.label, state, item.times)
            if rule.has_two_runs:
                form = table.formats.state_of("p")
                item.second = rule.second(item.phase, resident.label, resident.parameter, form)
            for phase in filter(None, (item.phase, item.second)):
                if (item.group, phase) not in arguments:
                    arguments[item.group, phase] = table.arguments(group, phase)
        arrays = [rule.arrays(each) for each in owner.param_groups]
        return StepPlan(every, arrays, arguments, scaling, fetches=not rule.has_two_runs)

    def _apply(self, owner: Owner, plan: StepPlan) -> bool:
        """Prepare the items of a plan, execute the plan, and give the parameters their results;
        return False if the step is skipped."""
        table, items, begun = self._table, plan.items, list[AcceleratedRuns]()
        try:
            sends = Sends(at_once=table.home.at_once)
            for item in items:
                self._prepare(owner, item, plan.arrays[item.group], sends)
            results = table.executor.make(plan, sends, begun)
            if results is None:
                return False
            if not plan.fetches:
                results = self._run_again(owner, plan)
            written = [table.rule.written(each) for each in plan.arrays]
            counts: list[Tensor] = []
            for item in items:
                item.resident.take_result(results)
                if item.parameter is not None:
                    counts += self._finish(owner, item, written[item.group])
            if counts:
                torch._foreach_add_(counts, 1)
            for item in items:
                if isinstance(item.resident, FlatBucket):
                    item.resident.count_step()
        except BaseException as error:
            if any(each.has_begun for each in begun):
                table.interrupt([item.resident for item in items], error)
            raise
        finally:
            for item in items:
                item.resident.end_loan()
        return True

    def _prepare(
        self, owner: Owner, item: StepItem, arrays: Mapping[str, float], sends: Sends
    ) -> None:
        """Add the data of an item's update to `sends`, or lend it to the device.

        Large arrays are sent now if the home does so (`at_once`). Compressed gradients are sent by
        operations of the step.
        """
        table, gradient, resident = self._table, item.gradient, item.resident
        group = owner.param_groups[item.group]
        maximize, scales = bool(group.get("maximize")), table.device.config.gradient_scale
        negated = maximize and not scales
        if isinstance(resident, FlatBucket):
            assert isinstance(gradient, list), "a bucket has a gradient for each parameter"
            resident.extent.segment.reserve({**arrays, "g": 0.0})
            resident.send(gradient, sends, negated=negated)
            item.state = resident.first[1]
            item.key = RunKey(item.group, item.phase, "fp32", None, 1, maximize and scales)
            return
        item.state = table.ready_state(owner, resident, group, item.found, arrays)
        resident.is_new = False
        resident.send_master_if_changed(sends)
        compression = table.settings.compression
        assert not isinstance(gradient, list), "an item of one parameter"
        if isinstance(gradient, Tensor):
            assert item.parameter is not None, "an item of one parameter"
            gradient = redistributed(gradient, item.parameter)
        elif isinstance(gradient, DeviceGradient) and compression is not None:
            gradient = gradient.whole()
        if isinstance(gradient, DeviceGradient):
            gradient.ready(negated=negated)
            form = gradient.form
        elif isinstance(gradient, SparseGradient):
            assert compression is not None, "the gradient was compressed"
            form, item.compressed = compression.format, gradient.land()
        elif compression is None:
            form = resident.gradient_format(gradient.dtype)
            resident.extent.segment.reserve({gradient_array(form): 0.0})
            resident.send_gradient(gradient, sends, negated=negated)
        else:
            form = compression.format
            item.compressed = self.compress(
                resident.parameter, gradient, self._residual_of(item.state)
            )
        copied = resident.copy_format
        if copied is not None:
            resident.extent.segment.reserve({copy_array(copied): 0.0})
        item.key = RunKey(item.group, item.phase, form, copied, item.times, maximize and scales)

    def _run_again(self, owner: Owner, plan: StepPlan) -> Results:
        """Run the rule a second time, with gradients that the host computes of those of the first
        run and of the moments (`Optimizer.between`)."""
        table = self._table
        sends, held = Sends(at_once=table.home.at_once), list[tuple[DeviceGradient, Tensor]]()
        for item in plan.items:
            resident, parameter, gradient = item.single, item.single.parameter, item.gradient
            if isinstance(gradient, DeviceGradient):
                held.append((gradient, gradient.whole()))
                gradient = held[-1][1].view(parameter.shape).to(parameter.device)
            assert isinstance(gradient, Tensor), "whole gradients of one parameter"
            moments = {
                array: resident.fetch(key)[key]
                for key, array in table.layout.moments.items()
                if item.state.has_moment(key)
            }
            group = owner.param_groups[item.group]
            gradient = redistributed(gradient, parameter)
            assert item.second is not None, "planned with the first run"
            made = table.rule.second_gradient(group, item.second, gradient, moments)
            form = resident.gradient_format(made.dtype)
            resident.extent.segment.reserve({gradient_array(form): 0.0})
            resident.send_gradient(made, sends)
            item.key = item.key._replace(phase=item.second, gradient_format=form, negate=False)
        results = table.executor.make(replace(plan, fetches=True), sends, [])
        assert results is not None, "gradients are not scanned"
        for device_gradient, whole in held:
            device_gradient.restore(whole)
        return results

    def _finish(self, owner: Owner, item: StepItem, written: Sequence[str]) -> list[Tensor]:
        """Record a parameter's update and the moments written.

        Returns
        -------
        list[Tensor] : step counts, for the caller to increment.
        """
        state, resident = item.state, item.single
        is_kept = len(state) > 0
        counts = state.written(written) * item.times
        if item.compressed is not None and item.compressed.residual is not None:
            state.keep_residual(convert.to_tensor(item.compressed.residual, resident.parameter))
        if not is_kept:
            self._table.keep(owner, resident, state)
        return counts

    def _unscale(self, plan: StepPlan, scale: float) -> None:
        """Divide the gradients by `scale`, as torch's fused steps do."""
        for item in plan.items:
            if isinstance(item.gradient, DeviceGradient):
                item.gradient.divide(scale)
            elif isinstance(item.resident, FlatBucket):
                for gradient in cast(list[Tensor], item.gradient):
                    gradient.div_(scale)
            elif isinstance(item.gradient, Tensor):  # compressed gradients are not kept
                if shares_memory(local(item.gradient)):
                    item.resident.parameter.grad = item.gradient / scale
                else:
                    local(item.gradient).div_(scale)

    def hold_pairs(
        self, states: States, parameter: Tensor, make: Callable[[Tensor | None], Compressed]
    ) -> SparseGradient:
        """Keep a parameter's compressed gradient and its residual for the next step.

        Parameters
        ----------
        make : adds a residual to the gradient and compresses the sum, as `compress` does.
        """
        resident, state = self._table.parameters[parameter], states.get(parameter)
        residual = self._residual_of(state if isinstance(state, ParameterState) else None)

        def compressed() -> Compressed:
            done = make(residual)
            left = done.residual
            if isinstance(left, np.ndarray):
                done = replace(done, residual=torch.from_numpy(left))
            return done

        resident.held = held = SparseGradient(compressed, residual)
        return held

    def compress(self, parameter: Tensor, gradient: Tensor, residual: Tensor | None) -> Compressed:
        """Return the elements of a gradient to send, and the residual; compression is set."""
        compression = self._table.settings.compression
        assert compression is not None, "gradients are compressed"
        resident, memory = self._table.parameters[parameter], self._residuals.empty
        return resident.compress(gradient, residual, compression, memory)

    def _residual_of(self, state: ParameterState | SavedState | None) -> Tensor | None:
        """Return the residual to add to the next gradient before it is compressed."""
        compression = self._table.settings.compression
        if compression is None or not compression.error_feedback or state is None:
            return None
        if isinstance(state, SavedState):
            found: Tensor | None = state.others.get(RESIDUAL)
            return found
        return state.residual

    def _ready_buckets(self, owner: Owner) -> list[ReadyBucket]:
        """Return the buckets that this step can use; change nothing."""
        table, groups = self._table, owner.param_groups
        if table.home.is_durable or not self.buckets or not _same(groups, self._grouped):
            return []  # in changed groups a parameter may be in a group twice
        found = ((each, each.gradients(owner.state)) for each in self.buckets)
        ready = [(each, gradients) for each, gradients in found if gradients is not None]
        written: dict[int, list[str]] = {}
        for index in {bucket.group: None for bucket, _ in ready}:
            table.check_group(groups[index])
            written[index] = table.rule.written(table.rule.arrays(groups[index]))
        return [each for each in ready if each[0].has(written[each[0].group])]

    def _keep_buckets(
        self,
        groups: Groups,
        bucketed: Sequence[ReadyBucket],
        items: Sequence[StepItem],
    ) -> None:
        """Make buckets of this step's items for the next step."""
        table = self._table
        if (not items and bucketed) or table.home.is_durable or table.rule.has_two_runs:
            return
        single = len({item.resident.extent for item in items}) == len(items)
        if table.settings.compression is not None or not single or any(i.times > 1 for i in items):
            self.buckets.clear()
            return
        made = [
            FlatBucket(
                run[0].group,
                [item.position for item in run],
                [item.single for item in run],
                [item.state for item in run],
                table.traffic,
            )
            for run in _runs(items)
            if len(run) > 1
        ]
        self.buckets = [*(bucket for bucket, _ in bucketed), *made]
        if made:
            self._grouped = [list(group["params"]) for group in groups]


def _same(groups: Groups, known: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether the groups have these parameters."""
    return len(groups) == len(known) and all(
        len(group["params"]) == len(own) and all(map(is_, group["params"], own))
        for group, own in zip(groups, known, strict=True)
    )


def _runs(items: Iterable[StepItem]) -> Iterator[list[StepItem]]:
    """Group adjacent items that fit a bucket and have equal keys, up to TOGETHER_ELEMENTS."""
    run: list[StepItem] = []
    for item in (each for each in items if fits(each.single, each.state)):
        extent = item.resident.extent
        if run and not (
            extent.joins(run[-1].resident.extent)
            and item.key == run[-1].key
            and item.state.held == run[-1].state.held
            and extent.end - run[0].resident.extent.start <= TOGETHER_ELEMENTS
        ):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _others(count: int, buckets: Sequence[FlatBucket]) -> Sequence[int]:
    """Return the positions, among `count` in a group, of parameters in none of the buckets."""
    if not buckets:
        return range(count)
    known = {position for bucket in buckets for position in bucket.positions}
    return [] if len(known) == count else [each for each in range(count) if each not in known]
