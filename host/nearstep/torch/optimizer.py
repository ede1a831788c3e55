"""What every optimizer on a device has in common; each adds its rule."""

from __future__ import annotations

import copy
import math
import weakref
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Self, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT

from nearstep.device import Device
from nearstep.placement import LINE_ELEMENTS, Extent, Placement, Segment
from nearstep.run import Run
from nearstep.torch import convert, options
from nearstep.torch.bundle import Bundle, Bundled, Bundles, Member
from nearstep.torch.checks import check_gradient, check_parameter, is_plain, label, shares_memory
from nearstep.torch.eager import eager
from nearstep.torch.errors import (
    HyperparameterError,
    InterruptedStepError,
    StateError,
    UnsupportedOptionError,
)
from nearstep.torch.graphs import steps_of
from nearstep.torch.held import HeldGradient
from nearstep.torch.layout import Layout
from nearstep.torch.lease import Lease
from nearstep.torch.overflow.opening import OpenStore, given_groups
from nearstep.torch.overflow.steps import OverflowSteps
from nearstep.torch.overflow.tier import Tier
from nearstep.torch.pairs import PairSpace
from nearstep.torch.recycled import Recycled
from nearstep.torch.resident import Formats, Resident, copy_array, gradient_array
from nearstep.torch.saved import SavedState, Verbatim, count, export
from nearstep.torch.settings import Settings, scans
from nearstep.torch.spread import is_sharded, local, redistributed
from nearstep.torch.state import ParameterState
from nearstep.torch.step import (
    Arrays,
    Given,
    GradientOptions,
    Key,
    Scaling,
    StepInputs,
    Steps,
    Update,
)
from nearstep.torch.traffic import Traffic
from nearstep.torch.transfers import Outbox
from nearstep.torch.waiting import waiting
from nearstep.torch.work import Checked, Work
from nearstep.updater.device import KernelDevice
from nearstep.updater.formats import DTYPES
from nearstep.work.timeline import Timeline
from nearstep_spec.rule import optimizer as rules


class DeviceOptimizer(OverflowSteps):
    """An optimizer of torch whose parameters and state live on a device, where its steps run.

    A subclass has a layout of its state, checks its options, names the rule and the arrays of a
    group, and starts the rule on a launch. The rest is here: which parameters have memory, what is
    sent and fetched, checkpoints and copies, steps that fail half way, counters.

    Parameters
    ----------
    params
    defaults : options of a group, those of torch's optimizer.
    device
    settings
    """

    layout: ClassVar[Layout]
    """State of a parameter."""

    definition: rules.Optimizer
    """The optimizer as data, which the device takes."""

    around_update: Callable[[], AbstractContextManager[None]]
    """Entered by each step, after its closure, before anything else: by `nearstep.offload`."""

    _report_inf: Tensor | None
    _steps: Steps

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        device: str | Device,
        settings: Settings,
    ) -> None:
        options.reject_unsupported(defaults)
        self._check_options(defaults)
        self._attach(device, settings)
        if settings.overflow is None:
            super().__init__(params, defaults)
            self._begin()
            return
        groups = given_groups(params)
        opened = OpenStore(settings.overflow, self._title, groups, len(self.layout.moments))
        try:
            memory = opened.memory(len(self.layout.required))
            self._tier = Tier(settings.overflow, opened.store, memory, self.device, self._traffic)
            super().__init__(groups, defaults)
            self._begin()
        except BaseException:
            opened.give_up()
            raise
        if opened.owns:
            weakref.finalize(self, opened.store.close)

    @abstractmethod
    def _check_options(self, group: Mapping[str, Any]) -> None:
        """Raise `HyperparameterError` for a group that no step can be made with."""

    @abstractmethod
    def _rule(self, group: Mapping[str, Any]) -> str:
        """Name of the update rule that the kernel runs for a group."""

    @abstractmethod
    def _arrays(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        """Arrays of that rule, each with what its elements are before the first step."""

    @abstractmethod
    def _arguments(self, group: Mapping[str, Any], phase: Hashable) -> dict[str, Any]:
        """`step`, `first` and hyper-parameters for the device, of parameters in one phase."""

    @abstractmethod
    def _start(
        self, arrays: Arrays, group: Mapping[str, Any], phase: Hashable, gradient: GradientOptions
    ) -> Run:
        """Start the rule on the arrays of a launch, whose parameters are in one phase.

        `gradient` goes to the device as it is.
        """

    def _phase(
        self, group: Mapping[str, Any], resident: Resident, state: ParameterState, times: int
    ) -> Hashable:
        """What a run needs to know of a parameter besides its group; here t, from 1.

        Neighbours in one phase share a run. A parameter that is in its group several `times` has
        as many runs, each with the t of the last, as in torch's fused step.

        Raises
        ------
        StateError
        """
        return count(resident.label, state.step) + times

    @property
    def device(self) -> KernelDevice:
        """The device that the steps run on."""
        return self._lease.device

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` leaves the division by its scale to the step.

        Where gradients are compressed it does not: their elements are compared, and what is left of
        them is added up, without the scale.
        """
        return self._settings.compression is None and scans(self.device.config)

    @property
    def looks_for_inf(self) -> bool:
        """Whether a step can look for infinities and NaN on the device, and end if it finds one.

        It cannot where other processes have other elements of a parameter: all would have to end.
        """
        if self._tier is not None:
            return False  # updates begin before all gradients are on the device
        parameters = (p for group in self.param_groups for p in group["params"])
        return self._step_supports_amp_scaling and not any(map(is_sharded, parameters))

    @eager
    def report_inf_to(self, found: Tensor) -> None:
        """Have the next step look for infinities and NaN.

        If it finds one, it sets `found`, of one element, to 1, and updates nothing; nor does it
        count as a step.
        """
        self._report_inf = found

    @property
    def traffic(self) -> Traffic:
        """Counters of what this optimizer has moved and launched. Live: copy it to keep it."""
        return self._traffic

    @property
    def timeline(self) -> Timeline | None:
        """When each transfer and run of the last step was under way, in device cycles; None before
        the first step, and on a device without a clock.

        It refers to no data.
        """
        return self._steps.timeline

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @eager
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, on the device.

        Everything that can be checked is checked before anything is sent. If the device fails
        later, what is in its memory is part old and part new, and the optimizer refuses further use
        until a checkpoint is loaded. Parameters on the host change only after the last run, unless
        the device updates them where they are (`golden:axdimm`, large ones): then with their run,
        so that a step that is interrupted leaves some of them new, or part old and part new.

        Parameters
        ----------
        closure : reevaluates the model with gradients enabled, and returns the loss.

        Returns
        -------
        float | None : what the closure returned.

        Raises
        ------
        ArgumentError, OutOfDeviceMemoryError : nothing has been updated: an option, a gradient, a
            parameter or its state is wrong (HyperparameterError, UnsupportedOptionError,
            GradientError, ParameterError, StateError), or scalar registers cannot hold what follows
            from the options.
        DeviceError : the device failed during the update.
        InterruptedStepError : it failed in an earlier step.
        ClosedDeviceError
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with torch.no_grad(), self.around_update():
                self._update()
        except BaseException:
            self._forget_scaling()  # GradScaler does so after steps that return
            raise
        self._report_inf = None
        return loss

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does; those that the device keeps are not fetched for it
        unless they become zeros."""
        for resident in self._residents.values() if set_to_none else ():
            if resident.held is not None and not resident.held.applied:
                resident.release_gradient()
        super().zero_grad(set_to_none)

    @eager
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does, and place its parameters that require a gradient.

        Raises
        ------
        UnsupportedOptionError, HyperparameterError, ParameterError, OutOfDeviceMemoryError
        ArgumentError : the kernel does not have the rule. In any case the group has not been added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group, self.defaults)
            parameters = group["params"]
            for index, parameter in enumerate(parameters):
                if waiting(parameter) is None:
                    check_parameter(label(group, len(self.param_groups) - 1, index), parameter)
            self._settings.check_parameters(parameters)
            self._place(group, (p for p in parameters if p.requires_grad))
        except BaseException:
            self.param_groups.pop()
            raise

    @eager
    def state_dict(self) -> dict[str, Any]:
        """The state as torch has it, with the values of now, in fp32: a snapshot, not a view.

        Its groups have `fused=True`, so that an optimizer of torch that loads it goes on with the
        step that has the same bits, under the conditions that this module states.

        Raises
        ------
        InterruptedStepError : the last step failed half way.
        """
        self._check_whole("make a checkpoint")
        packed = super().state_dict()
        packed["state"] = {
            key: export(value) if isinstance(value, ParameterState) else value
            for key, value in packed["state"].items()
        }
        packed["param_groups"] = [{**group, "fused": True} for group in packed["param_groups"]]
        return packed

    @eager
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch's returned.

        The state is sent to the device as fp32 and every parameter goes down with its next step.
        What the checkpoint says about torch's way to compute (foreach, capturable) is not taken
        over.

        Raises
        ------
        UnsupportedOptionError, HyperparameterError, StateError, ValueError : nothing has been
            loaded.
        """
        # Registered now, it runs after the hooks of the user.
        handle = self.register_load_state_dict_pre_hook(_prepare_to_load)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    @eager
    def __getstate__(self) -> dict[str, Any]:
        self._check_whole("copy or pickle the optimizer")
        if self._tier is not None:
            reason = "an optimizer with drives cannot be copied or pickled; use state_dict()"
            raise UnsupportedOptionError("drives", self._tier.store, reason)
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for parameter, value in self.state.items():
            state[parameter] = export(value) if isinstance(value, ParameterState) else value
        return {
            **super().__getstate__(),
            "state": state,
            "device": self.device.url,
            "settings": self._settings,
        }

    @eager
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over state from pickle, from a copy, or from `load_state_dict`."""
        state = dict(state)
        if "device" in state:
            self._attach(state.pop("device"), state.pop("settings"))
        labels = _labels(state["param_groups"])
        saved = {
            parameter: SavedState.of(self.layout, labels[parameter], parameter, value)
            for parameter, value in state["state"].items()
            if isinstance(parameter, Tensor) and len(value)
        }
        defaults = (vars(self) | state)["defaults"]
        for group in state["param_groups"]:
            self._complete(group, defaults)
            self._check_group(group, defaults)
        super().__setstate__(state)
        if self._interrupted is not None:
            self.device.reset()
        if self._tier is not None:
            self._load_on_drives(self._tier, saved)
        else:
            self._load(saved)
        self._interrupted = None

    def _labels(self) -> dict[Tensor, str]:
        return _labels(self.param_groups)

    def _load(self, saved: Mapping[Tensor, SavedState]) -> None:
        for group in self.param_groups:
            self._place(group, (p for p in group["params"] if p.requires_grad or p in saved))
        for resident in self._residents.values():
            resident.load_master(None)
        for parameter, value in saved.items():
            resident = self._residents[parameter]
            del self.state[parameter]
            self._keep(resident, self._restore(resident, value))

    @eager
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        state = self.__getstate__()
        del state["device"]
        state = copy.deepcopy(state, memo)
        twin.__setstate__({**state, "device": self._lease})
        return twin

    @property
    def settings(self) -> Settings:
        """What was given besides torch's options."""
        return self._settings

    @property
    def scales(self) -> bool:
        """Whether a scaler has told the step that is being made of the scale of the gradients."""
        return self._report_inf is not None or getattr(self, "grad_scale", None) is not None

    @eager
    def update_held(self) -> None:
        """Update, before the next step, parameters whose gradients the device keeps, but for those
        that are to be left out.

        Raises
        ------
        ArgumentError, OutOfDeviceMemoryError, DeviceError : as of `step`.
        InterruptedStepError, ClosedDeviceError : as of `step`.
        """
        self._held_only = True
        try:
            with torch.no_grad():
                self._update()
        finally:
            self._held_only = False

    @contextmanager
    def stepping_by(self, steps: Callable[[Steps], Steps]) -> Iterator[None]:
        """Make steps in another way in this `with` statement.

        Parameters
        ----------
        steps : makes what makes them, from what has made them before.
        """
        before = self._steps
        self._steps = steps(before)
        try:
            yield
        finally:
            self._steps = before

    def interrupt(self, cause: str) -> None:
        """Refuse further use until a checkpoint is loaded.

        Parameters
        ----------
        cause : name of the class of an error.
        """
        self._interrupted = cause

    def resident(self, parameter: Tensor) -> Resident:
        """The place of a parameter on the device: that of its state if it has one, or else will
        have one, since it is in a group and requires a gradient; another one if not.

        Raises
        ------
        ParameterError, OutOfDeviceMemoryError
        """
        found = self.place_of(parameter)
        return self._lodge(parameter) if found is None else found

    def place_of(self, parameter: Tensor) -> Resident | None:
        """The place of a parameter that has state or will have it, since it is in a group and
        requires a gradient; None for others.

        Raises
        ------
        ParameterError, OutOfDeviceMemoryError
        """
        if parameter not in self._residents and parameter.requires_grad:
            for group in self.param_groups:
                if any(each is parameter for each in group["params"]):
                    self._place(group, [parameter])
        return self._residents.get(parameter)

    def _lodge(self, parameter: Tensor) -> Resident:
        """A place for a parameter alone, without a gradient or state."""
        name = _labels(self.param_groups).get(parameter, "a parameter outside the optimizer")
        formats = self._formats
        formats.check(name, parameter)
        found = waiting(parameter)
        if found is not None and found.is_free(self.device):
            return found.adopt(self, self._placement, name, self.layout, self._traffic)
        dtypes = {each: DTYPES[form] for each, form in formats.state.items()}
        line = 2 * LINE_ELEMENTS if formats.state else LINE_ELEMENTS
        size = convert.size(parameter)
        (extent,) = self._placement.place([size], {"p": 0.0}, line=line, dtypes=dtypes)
        return Resident(parameter, name, extent, self.layout, self._traffic, formats, narrow=False)

    def _attach(self, device: str | Device | Lease, settings: Settings) -> None:
        self._lease = device if isinstance(device, Lease) else Lease.of(device)
        kernel = self._lease.device.config
        settings.check(kernel)
        self._settings = settings
        states = kernel.rule_set.whole.formats
        self._formats = Formats(kernel.gradient_formats, kernel.copy_out_formats, states)
        self._placement = Placement(self._lease.device)
        self._residents: dict[Tensor, Resident] = {}
        self._traffic = Traffic()
        self._tier = None
        self._residual_memory = Recycled()
        self._bundles = Bundles()
        self._steps = steps_of(self._lease.device, self._placement, settings, self._traffic)
        self.around_update = nullcontext
        self._held_only = False
        self._interrupted = None
        self._report_inf = None
        weakref.finalize(self, self._placement.free)

    def _complete(self, group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
        """Make a loaded group one of this optimizer's, which has these defaults."""
        options.normalise(group, defaults)

    def _check_group(self, group: Mapping[str, Any], defaults: Iterable[str]) -> None:
        """Raise unless the device can make steps with the options of a group, of these names."""
        options.reject_unsupported(group)
        options.check_complete(group, defaults)
        self._settings.check_maximize(group["maximize"], self.device.config)
        self._check_options(group)
        self.device.check_rule(self._rule(group))

    def _check_whole(self, action: str) -> None:
        if self._interrupted is not None:
            raise InterruptedStepError(action, self._interrupted)

    def _place(self, group: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
        """Give memory to those that have none yet, next to each other in this order."""
        known = self._residents
        new = list(dict.fromkeys(p for p in parameters if p not in known and not is_lazy(p)))
        if not new:
            return
        compression, formats = self._settings.compression, self._formats
        labels = _labels(self.param_groups)
        for p in new:
            formats.check(labels[p], p)
        arrays = dict(self._states(group))
        narrow = any(formats.narrow(p.dtype) for p in new)
        line = 2 * LINE_ELEMENTS if narrow or formats.state else LINE_ELEMENTS
        dtypes = {name: DTYPES[form] for name, form in formats.state.items()}
        for dtype in {p.dtype: None for p in new}:
            if compression is None:
                arrays[gradient_array(formats.gradient_of(dtype))] = 0.0
            copied = formats.copy_of(dtype)
            if copied is not None:
                arrays[copy_array(copied)] = 0.0
        if self._tier is not None:
            if any(waiting(p) is not None for p in new):
                raise UnsupportedOptionError(
                    "drives", "given", "parameters of nearstep.offload.init are on the device"
                )
            self._place_on_drives(self._tier, new, arrays, line, dtypes)
            return
        rest = self._adopt(new, labels, arrays, narrow=narrow)
        if not rest:
            return
        new = rest
        extents = self._placement.place(
            [convert.size(p) for p in new], arrays, line=line, dtypes=dtypes
        )
        segment = extents[0].segment
        if compression is not None:
            self._steps.pair_spaces[segment] = PairSpace(
                segment, extents, compression, self._steps.cut
            )
        for p, extent in zip(new, extents, strict=True):
            self._residents[p] = Resident(
                p, labels[p], extent, self.layout, self._traffic, self._formats, narrow=narrow
            )

    def _adopt(
        self,
        parameters: Sequence[Tensor],
        labels: Mapping[Tensor, str],
        arrays: Mapping[str, float],
        *,
        narrow: bool,
    ) -> list[Tensor]:
        """Take over those that wait on the device (`nearstep.offload.init`); the others."""
        places = {p: waiting(p) for p in parameters}
        here = {p: w for p, w in places.items() if w is not None and w.is_free(self.device)}
        spaces: dict[Segment, PairSpace] = {}
        try:
            for found in here.values():
                segment = found.resident.extent.segment
                segment.reserve(arrays)
                compression = self._settings.compression
                if compression is not None:
                    extents = [found.resident.extent]
                    spaces[segment] = PairSpace(segment, extents, compression, self._steps.cut)
        except BaseException:
            for found in here.values():
                found.resident.extent.segment.free_besides("p")
            raise
        self._steps.pair_spaces.update(spaces)
        for parameter, found in here.items():
            self._residents[parameter] = found.adopt(
                self, self._placement, labels[parameter], self.layout, self._traffic, narrow=narrow
            )
        return [p for p in parameters if p not in here]

    def _states(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        """Arrays of a group without the gradients, whose format each step decides."""
        return {name: value for name, value in self._arrays(group).items() if name != "g"}

    def _restore(self, resident: Resident, saved: SavedState) -> ParameterState:
        """Send saved state to the device."""
        for key, value in saved.moments.items():
            resident.send(key, value)
        resident.load_master(saved.master)
        state = ParameterState.of(resident, saved.step, saved.moments)
        state.update(saved.others)
        return state

    def _keep(self, resident: Resident, state: ParameterState) -> None:
        """Show the state to the user, and to checkpoints, if there is any."""
        if state or resident.keeps_master:
            self.state[resident.parameter] = state

    def _ready_state(
        self,
        resident: Resident,
        group: Mapping[str, Any],
        found: ParameterState | SavedState | None,
        arrays: Mapping[str, float],
    ) -> ParameterState:
        """State of a parameter that is about to be updated: made, taken over or flushed."""
        resident.extent.segment.reserve(arrays, besides="g")
        if isinstance(found, ParameterState):
            found.flush()
            return found
        if found is not None:
            ready = self._restore(resident, found)
        else:
            resident.reset_moments(self._first_moments(group), arrays)
            ready = self._first_state(resident, group)
        self._keep(resident, ready)
        return ready

    def _checked_state(self, resident: Resident) -> ParameterState | SavedState | None:
        """State of a parameter as it is, or as the user put it there; None if it has none.

        Raises
        ------
        StateError
        """
        state = self.state.get(resident.parameter)
        if isinstance(state, ParameterState) and state.store is resident and state:
            state.check_keys()
            return state
        if state:
            return SavedState.of(self.layout, resident.label, resident.parameter, state)
        return None

    def _first_moments(self, group: Mapping[str, Any]) -> Sequence[str]:
        """Keys of the moments that state has before the first step."""
        return self.layout.required

    def _first_state(self, resident: Resident, group: Mapping[str, Any]) -> ParameterState:
        """State before the first step."""
        step = torch.zeros((), dtype=torch.float32, device="cpu") if self.layout.counts else None
        return ParameterState.of(resident, step, self._first_moments(group))

    def _checked(self, gradients: Iterable[Given]) -> list[Checked]:
        """Phase and state of every parameter to be updated; nothing is sent.

        Raises
        ------
        ArgumentError : scalars of a run do not fit into their registers.
        ParameterError, StateError
        """
        checked: set[tuple[int, Hashable]] = set()
        found: list[Checked] = []
        for index, _, parameter, _, times in gradients:
            group, resident = self.param_groups[index], self._residents[parameter]
            resident.check_size()
            kept = self._checked_state(resident)
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

    def _gradients(self, bundles: Sequence[Bundle]) -> Iterator[Given]:
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
                if not isinstance(gradient, HeldGradient):
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
        if resident is None or not resident.away:
            check_parameter(name, parameter)
        check_gradient(name, parameter, gradient)

    def _gradient(self, parameter: Tensor) -> Tensor | HeldGradient | None:
        resident = self._residents.get(parameter)
        held = None if resident is None else resident.held
        if held is not None:
            return None if held.applied else held
        return None if self._held_only else parameter.grad

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
        self._traffic.steps += 1
        self._traffic.elements += sum(update.resident.elements for update in updates.values())
        self._keep_bundles(bundled, gradients, updates)

    def _apply(self, work: Work) -> dict[Extent, Update] | None:
        """Send, update and fetch; None if the step is to be skipped."""
        updates: dict[Extent, Update] = {}
        started: list[Run] = []
        try:
            outbox = self._steps.outbox()
            for each, found in zip(work.gradients, work.checked, strict=True):
                extent, update = self._prepare(each, found, work.arrays[each.group], outbox)
                updates[extent] = update
            for (bundle, given), phase in zip(work.bundled, work.phases, strict=True):
                own = work.arrays[bundle.group]
                updates[bundle.extent] = self._prepare_bundle(bundle, given, phase, own, outbox)
            fetches = not all(resident.away for resident, _, _ in work.checked)
            fetches = fetches or bool(work.bundled)
            inputs = StepInputs(updates, outbox, work.scaling, self._start_group, started, fetches)
            inbox = self._steps.make(inputs)
            if inbox is None:
                return None
            written = [self._written(each) for each in work.arrays]
            counts: list[Tensor] = []
            for update in updates.values():
                update.resident.fetch_parameter(inbox)
                if isinstance(update.resident, Resident):
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

    def _ready_bundles(self) -> list[Bundled]:
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

    def _written(self, arrays: Container[str]) -> list[str]:
        """Keys of the moments that a rule with these arrays writes."""
        return [key for key, name in self.layout.moments.items() if name in arrays]

    def _checked_bundle(self, bundle: Bundle) -> Hashable:
        """The phase of all its parameters. Raises as `_checked`."""
        group = self.param_groups[bundle.group]
        phase = self._phase(group, *bundle.first, 1)
        arguments = self._arguments(group, phase)
        self.device.check_arguments(self.definition, **arguments)
        return phase

    def _prepare_bundle(
        self,
        bundle: Bundle,
        gradients: list[Tensor],
        phase: Hashable,
        arrays: Mapping[str, float],
        outbox: Outbox,
    ) -> Update:
        """Send what the update of a bundle needs."""
        maximize = bool(self.param_groups[bundle.group]["maximize"])
        scales = self.device.config.gradient_scale
        bundle.extent.segment.reserve({**arrays, "g": 0.0})
        bundle.send(gradients, outbox, negated=maximize and not scales)
        key = Key(bundle.group, phase, "fp32", None, 1, maximize and scales)
        return Update(key, bundle, bundle.first[1], arrays, None)

    def _keep_bundles(
        self,
        bundled: Sequence[Bundled],
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

    def _start_group(self, arrays: Arrays, key: Key, gradient: GradientOptions) -> Run:
        return self._start(arrays, self.param_groups[key.group], key.phase, gradient)

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
        if isinstance(gradient, HeldGradient):
            gradient.divide(scale)
        elif gradient is not None and shares_memory(local(gradient)):
            parameter.grad = gradient / scale
        elif gradient is not None:
            local(gradient).div_(scale)

    def _forget_scaling(self) -> None:
        self._report_inf = None
        for name in ("grad_scale", "found_inf"):
            vars(self).pop(name, None)

    def _prepare(
        self, given: Given, checked: Checked, arrays: Mapping[str, float], outbox: Outbox
    ) -> tuple[Extent, Update]:
        """Send what a parameter's update needs; of a gradient that is compressed, not yet."""
        group = self.param_groups[given.group]
        resident, phase, found = checked
        state = self._ready_state(resident, group, found, arrays)
        resident.send_master_if_changed(outbox)
        compression = self._settings.compression
        maximize, scales = bool(group["maximize"]), self.device.config.gradient_scale
        compressed = None
        negated = maximize and not scales
        if isinstance(given.gradient, HeldGradient):
            form = resident.take_gradient(given.gradient, negated=negated)
        elif compression is None:
            gradient = redistributed(given.gradient, given.parameter)
            form = resident.gradient_format(gradient)
            resident.extent.segment.reserve({gradient_array(form): 0.0})
            resident.send_gradient(gradient, outbox, negated=negated)
        else:
            gradient = redistributed(given.gradient, given.parameter)
            form = compression.format
            residual = state.residual if compression.error_feedback else None
            memory = self._residual_memory.empty
            compressed = resident.compress(gradient, residual, compression, memory)
        copy_format = resident.copy_format
        if copy_format is not None:
            resident.extent.segment.reserve({copy_array(copy_format): 0.0})
        key = Key(given.group, phase, form, copy_format, given.times, maximize and scales)
        return resident.extent, Update(key, resident, state, arrays, compressed)

    def _finish(self, update: Update, resident: Resident, written: Sequence[str]) -> list[Tensor]:
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


def _others(count: int, bundles: Sequence[Bundle]) -> Sequence[int]:
    """Positions of the parameters of a group, of `count`, that are in none of these bundles."""
    if not bundles:
        return range(count)
    known = {position for bundle in bundles for position in bundle.positions}
    return [] if len(known) == count else [each for each in range(count) if each not in known]


def _labels(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, str]:
    return {
        parameter: label(group, index, position)
        for index, group in enumerate(groups)
        for position, parameter in enumerate(group["params"])
    }


def _prepare_to_load(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Keep torch from casting moments to the format of 16-bit parameters.

    Raises
    ------
    StateError : what was saved is no state of an optimizer.
    """
    missing = {"state", "param_groups"} - set(state_dict)
    if missing:
        raise StateError("the optimizer", f"have {sorted(missing)}", sorted(map(str, state_dict)))
    known = {key for group in state_dict["param_groups"] for key in group["params"]}
    for key, value in state_dict["state"].items():
        if key in known and not isinstance(value, Mapping):
            raise StateError(f"parameter {key}", "be a mapping", f"a {type(value).__name__}")
    state = {
        key: {name: Verbatim(item) for name, item in value.items()} if key in known else value
        for key, value in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
