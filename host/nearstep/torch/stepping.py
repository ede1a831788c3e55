"""One step of an optimizer on a device: all is checked, then sent, run and fetched."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nearstep.placement import Extent
from nearstep.run import Run
from nearstep.torch import convert, options
from nearstep.torch.checks import check_gradient, check_parameter, is_plain, label, shares_memory
from nearstep.torch.compression import Compressed
from nearstep.torch.device_gradient import DeviceGradient
from nearstep.torch.dtensor import local, redistributed
from nearstep.torch.errors import HyperparameterError
from nearstep.torch.exchange import Sends
from nearstep.torch.flat_bucket import FlatBucket, FlatBuckets, Member, ReadyBucket
from nearstep.torch.formats import copy_array, gradient_array
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.placed import PlacedOptimizer
from nearstep.torch.saved import SavedState
from nearstep.torch.scratch import ScratchPool
from nearstep.torch.sparse_gradient import SparseGradient
from nearstep.torch.state import RESIDUAL, ParameterState
from nearstep.torch.step import Arrays, Given, GradientOptions, RunKey, Scaling, StepInputs, Update
from nearstep.torch.work import Checked, Work


class SteppingOptimizer(PlacedOptimizer):
    """Updates parameters from the gradients that they have, one by one or in bundles."""

    _residual_memory: ScratchPool
    _bundles: FlatBuckets
    _held_only: bool
    _report_inf: Tensor | None

    def _update(self) -> None:
        self._check_whole("step")
        self.device.check_open("step")
        bundled = self._ready_bundles()
        gradients = list(self._gradients([each.bundle for each in bundled]))
        scale, found_inf = self._scaling()
        if found_inf:
            self._traffic.skipped += 1
            return
        for index, group in enumerate(self.param_groups):
            self._place(group, (each.parameter for each in gradients if each.group == index))
        scaling = Scaling(scale, self._report_inf)
        arrays = [self._arrays(group) for group in self.param_groups]
        checked = self._checked(gradients)
        phases = [self._checked_bundle(each.bundle) for each in bundled]
        work = Work(gradients, checked, bundled, phases, arrays, scaling)
        if self._tier is None:
            updates = self._apply(work)
        else:
            updates = self._apply_by_units(self._tier, work)
        if updates is None:
            self._traffic.skipped += 1
            return
        if scale != 1.0 and self._report_inf is None:
            for parameter in (
                *(each.parameter for each in gradients),
                *(parameter for bundle, _ in bundled for parameter in bundle.parameters),
            ):
                self._unscale(parameter, scale)
        for each in gradients:
            if isinstance(each.gradient, SparseGradient):
                each.gradient.spent = True
        self._traffic.steps += 1
        self._traffic.elements += sum(update.resident.elements for update in updates.values())
        self._keep_bundles(bundled, gradients, updates)

    def _scaling(self) -> tuple[float, bool]:
        """What a scaler multiplied the gradients by, and whether it found an infinity or NaN."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        found_inf = found is not None and bool(found)
        factor = 1.0 if scale is None else options.scalar("grad_scale", scale)
        if not (found_inf or (math.isfinite(factor) and factor > 0.0)):
            raise HyperparameterError("grad_scale", "finite and above 0", factor)
        return factor, found_inf

    def _unscale(self, parameter: Tensor, scale: float) -> None:
        """Divide the gradient of a parameter by `scale`, as torch's fused steps do."""
        gradient = self._gradient(parameter)
        if isinstance(gradient, DeviceGradient):
            gradient.divide(scale)
        elif isinstance(gradient, SparseGradient) or gradient is None:
            return  # nothing is kept of it after the step
        elif shares_memory(local(gradient)):
            parameter.grad = gradient / scale
        else:
            local(gradient).div_(scale)

    def _forget_scaling(self) -> None:
        self._report_inf = None
        for name in ("grad_scale", "found_inf"):
            vars(self).pop(name, None)

    def _gradients(self, bundles: Sequence[FlatBucket]) -> Iterator[Given]:
        """What is to be updated besides these bundles; all is checked.

        As in torch, options of a group without gradients are of no account.
        """
        for index, group in enumerate(self.param_groups):
            given: dict[Tensor, Given] = {}
            parameters = group["params"]
            bundled = [each for each in bundles if each.group == index]
            for position in _others(len(parameters), bundled):
                parameter = parameters[position]
                gradient = self._gradient(parameter)
                if gradient is None:
                    continue
                if not (given or bundled):
                    self._check_group(group, self.defaults)
                if isinstance(gradient, SparseGradient):
                    gradient.check(label(group, index, position), parameter)
                elif not isinstance(gradient, DeviceGradient):
                    plain = is_plain(parameter) and is_plain(gradient)
                    if not plain or gradient.shape != parameter.shape:
                        self._check_given(label(group, index, position), parameter, gradient)
                first = Given(index, position, parameter, gradient, 1)
                found = given.setdefault(parameter, first)
                if found is not first:
                    given[parameter] = found.once_more()
            self._settings.check_parameters(given)
            yield from given.values()

    def _check_given(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        resident = self._residents.get(parameter)
        if resident is None or not resident.offloaded:
            check_parameter(name, parameter)
        check_gradient(name, parameter, gradient)

    def hold_pairs(
        self, parameter: Tensor, make: Callable[[Tensor | None], Compressed]
    ) -> SparseGradient:
        """Have the next step update a parameter by what `make` compresses its gradient to, of which
        nothing else is kept.

        What stays of it is on the host then.

        Parameters
        ----------
        parameter : that has a place.
        make : compresses the gradient, to which a residual is added first, as `compress` does.
        """
        resident, state = self._residents[parameter], self.state.get(parameter)
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
        """What of a gradient is to be sent, and what of it stays; the settings have compression."""
        compression = self._settings.compression
        assert compression is not None, "gradients are compressed"
        memory = self._residual_memory.empty
        return self._residents[parameter].compress(gradient, residual, compression, memory)

    def _residual_of(self, state: ParameterState | SavedState | None) -> Tensor | None:
        """What the next gradient is added to before it is compressed."""
        compression = self._settings.compression
        if compression is None or not compression.error_feedback or state is None:
            return None
        if isinstance(state, SavedState):
            found: Tensor | None = state.others.get(RESIDUAL)
            return found
        return state.residual

    def _gradient(self, parameter: Tensor) -> Tensor | DeviceGradient | SparseGradient | None:
        resident = self._residents.get(parameter)
        held = None if resident is None else resident.held
        if held is not None:
            return None if held.applied else held
        return None if self._held_only else parameter.grad

    def _checked(self, gradients: Iterable[Given]) -> list[Checked]:
        """Phase and state of every parameter to be updated; nothing is sent.

        Raises
        ------
        ArgumentError : scalars of a run do not fit into their registers.
        ParameterError, StateError
        """
        checked: set[tuple[int, Hashable]] = set()
        found: list[Checked] = []
        for index, _, parameter, gradient, times in gradients:
            group, resident = self.param_groups[index], self._residents[parameter]
            resident.check_size()
            kept = self._checked_state(resident)
            if isinstance(gradient, SparseGradient):
                gradient.check_residual(resident.label, self._residual_of(kept))
            if isinstance(kept, SavedState):
                state = ParameterState.of(resident, kept.step, kept.moments)
            else:
                state = self._first_state(resident, group) if kept is None else kept
            phase = self._phase(group, resident, state, times)
            if (index, phase) not in checked:
                arguments = self._arguments(group, phase)
                self.device.check_arguments(self.definition, **arguments)
                checked.add((index, phase))
            found.append((resident, phase, kept))
        return found

    def _apply(self, work: Work) -> dict[Extent, Update] | None:
        """Send, update and fetch; None if the step is to be skipped."""
        updates: dict[Extent, Update] = {}
        started: list[Run] = []
        try:
            sends = self._steps.sends()
            for each, found in zip(work.gradients, work.checked, strict=True):
                extent, update = self._prepare(each, found, work.arrays[each.group], sends)
                updates[extent] = update
            for (bundle, given), phase in zip(work.bundled, work.phases, strict=True):
                own = work.arrays[bundle.group]
                updates[bundle.extent] = self._prepare_bundle(bundle, given, phase, own, sends)
            fetches = not all(resident.offloaded for resident, _, _ in work.checked)
            fetches = fetches or bool(work.bundled)
            inputs = StepInputs(updates, sends, work.scaling, self._start_group, started, fetches)
            results = self._steps.make(inputs)
            if results is None:
                return None
            written = [self._written(each) for each in work.arrays]
            counts: list[Tensor] = []
            for update in updates.values():
                update.resident.take_result(results)
                if isinstance(update.resident, DeviceParameter):
                    counts += self._finish(update, update.resident, written[update.key.group])
            if counts:
                torch._foreach_add_(counts, 1)
            for bundle, _ in work.bundled:
                if bundle.steps:  # without alpha torch would make each its own tensor of 1
                    torch._foreach_add_(bundle.steps, torch.ones((), device="cpu"), alpha=1)
        except BaseException as error:
            if started:
                self._interrupt([update.resident for update in updates.values()], error)
            raise
        finally:
            for resident, _, _ in work.checked:
                resident.end_loan()
            for bundle, _ in work.bundled:
                bundle.end_loan()
        return updates

    def _prepare(
        self, given: Given, checked: Checked, arrays: Mapping[str, float], sends: Sends
    ) -> tuple[Extent, Update]:
        """Send what a parameter's update needs; of a gradient that is compressed, not yet."""
        group = self.param_groups[given.group]
        resident, phase, found = checked
        state = self._ready_state(resident, group, found, arrays)
        resident.send_master_if_changed(sends)
        compression = self._settings.compression
        maximize, scales = bool(group["maximize"]), self.device.config.gradient_scale
        compressed = None
        negated = maximize and not scales
        gradient = given.gradient
        if isinstance(gradient, Tensor):
            gradient = redistributed(gradient, given.parameter)
        elif isinstance(gradient, DeviceGradient) and compression is not None:
            gradient = gradient.whole()
        if isinstance(gradient, DeviceGradient):
            form = resident.take_gradient(gradient, negated=negated)
        elif isinstance(gradient, SparseGradient):
            assert compression is not None, "it was compressed"
            resident.begin_use()
            form, compressed = compression.format, gradient.land()
        elif compression is None:
            form = resident.gradient_format(gradient)
            resident.extent.segment.reserve({gradient_array(form): 0.0})
            resident.send_gradient(gradient, sends, negated=negated)
        else:
            form = compression.format
            resident.begin_use()
            compressed = self.compress(given.parameter, gradient, self._residual_of(state))
        copy_format = resident.copy_format
        if copy_format is not None:
            resident.extent.segment.reserve({copy_array(copy_format): 0.0})
        key = RunKey(given.group, phase, form, copy_format, given.times, maximize and scales)
        return resident.extent, Update(key, resident, state, arrays, compressed)

    def _finish(
        self, update: Update, resident: DeviceParameter, written: Sequence[str]
    ) -> list[Tensor]:
        """A step has updated a parameter, and wrote these moments.

        Returns
        -------
        list[Tensor] : what 1 is still to be added to.
        """
        is_kept = len(update.state) > 0
        counts = update.state.written(written) * update.key.times
        if update.compressed is not None and update.compressed.residual is not None:
            parameter = resident.parameter
            update.state.keep_residual(convert.to_tensor(update.compressed.residual, parameter))
        if not is_kept:
            self._keep(resident, update.state)
        return counts

    def _start_group(self, arrays: Arrays, key: RunKey, gradient: GradientOptions) -> Run:
        return self._start(arrays, self.param_groups[key.group], key.phase, gradient)

    def _written(self, arrays: Container[str]) -> list[str]:
        """Keys of the moments that a rule with these arrays writes."""
        return [key for key, name in self.layout.moments.items() if name in arrays]

    def _ready_bundles(self) -> list[ReadyBucket]:
        """Those that this step can use. Nothing has been done with them yet."""
        if self._tier is not None:
            return []
        ready = self._bundles.ready(self.param_groups, self.state)
        if not ready:
            return []
        written: dict[int, list[str]] = {}
        for index in {each.bundle.group: None for each in ready}:
            group = self.param_groups[index]
            self._check_group(group, self.defaults)
            written[index] = self._written(self._arrays(group))
        return [each for each in ready if each.bundle.has(written[each.bundle.group])]

    def _checked_bundle(self, bundle: FlatBucket) -> Hashable:
        """The phase of all its parameters. Raises as `_checked`."""
        group = self.param_groups[bundle.group]
        phase = self._phase(group, *bundle.first, 1)
        arguments = self._arguments(group, phase)
        self.device.check_arguments(self.definition, **arguments)
        return phase

    def _prepare_bundle(
        self,
        bundle: FlatBucket,
        gradients: list[Tensor],
        phase: Hashable,
        arrays: Mapping[str, float],
        sends: Sends,
    ) -> Update:
        """Send what the update of a bundle needs."""
        maximize = bool(self.param_groups[bundle.group]["maximize"])
        scales = self.device.config.gradient_scale
        bundle.extent.segment.reserve({**arrays, "g": 0.0})
        bundle.send(gradients, sends, negated=maximize and not scales)
        key = RunKey(bundle.group, phase, "fp32", None, 1, maximize and scales)
        return Update(key, bundle, bundle.first[1], arrays, None)

    def _keep_bundles(
        self,
        bundled: Sequence[ReadyBucket],
        gradients: Sequence[Given],
        updates: Mapping[Extent, Update],
    ) -> None:
        """Make bundles for the next step of what this one has updated."""
        if (not gradients and bundled) or self._tier is not None:
            return
        single = len(updates) == len(gradients) + len(bundled)
        if self._settings.compression is not None or not single:
            self._bundles.clear()
            return
        members = []
        for each in gradients:
            resident = self._residents[each.parameter]
            update = updates[resident.extent]
            if each.times > 1:
                self._bundles.clear()
                return
            members.append(Member(each.group, each.position, update.key, resident, update.state))
        used = [bundle for bundle, _ in bundled]
        self._bundles.keep(used, members, self.param_groups, self._traffic)


def _others(count: int, bundles: Sequence[FlatBucket]) -> Sequence[int]:
    """Positions of the parameters of a group, of `count`, that are in none of these bundles."""
    if not bundles:
        return range(count)
    known = {position for bundle in bundles for position in bundle.positions}
    return [] if len(known) == count else [each for each in range(count) if each not in known]
