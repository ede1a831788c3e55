"""What every optimizer on a device has in common; each adds its rule."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from nearstep.device import Device
from nearstep.placement import Placement
from nearstep.torch import options
from nearstep.torch.attached import labels_of
from nearstep.torch.checks import check_parameter, label
from nearstep.torch.dtensor import is_sharded
from nearstep.torch.eager import eager
from nearstep.torch.errors import StateError, UnsupportedOptionError
from nearstep.torch.execution import StepExecutor
from nearstep.torch.flat_bucket import FlatBuckets
from nearstep.torch.formats import Formats
from nearstep.torch.homes.home import DeviceHome
from nearstep.torch.on_drives import on_drives
from nearstep.torch.overflow.opening import given_groups
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.saved import SavedState, Verbatim, export
from nearstep.torch.scratch import ScratchPool
from nearstep.torch.settings import Settings, scans
from nearstep.torch.shared_device import SharedDevice
from nearstep.torch.state import ParameterState
from nearstep.torch.stepping import SteppingOptimizer
from nearstep.torch.traffic import Traffic
from nearstep.torch.unclaimed import waiting
from nearstep.work.timeline import Timeline


class DeviceOptimizer(SteppingOptimizer):
    """An optimizer of torch whose parameters and state live on a device, where its steps run.

    A subclass has a layout of its state, checks its options, names the rule and the arrays of a
    group, and starts the rule on a launch (`attached`). Which parameters have memory (`placed`),
    and what a step sends and fetches (`stepping`, `overflow.steps`), is the same for all; here are
    what a user calls, checkpoints and copies.

    Parameters
    ----------
    params
    defaults : options of a group, those of torch's optimizer.
    device
    settings
    """

    around_update: Callable[[], AbstractContextManager[None]]
    """Entered by each step, after its closure, before anything else: by `nearstep.offload`."""

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
        if self._settings.overflow is None:
            super().__init__(params, defaults)
            self._begin()
            return
        groups = given_groups(params)
        opened, self._tier, steps = on_drives(
            self.device,
            self._placement,
            self._settings,
            self._traffic,
            self.layout,
            self._title,
            groups,
        )
        if steps is not None:
            self._steps = steps
        try:
            super().__init__(groups, defaults)
            self._begin()
        except BaseException:
            opened.give_up()
            raise
        self._tier.source = None
        if opened.owns:
            weakref.finalize(self, self._tier.drives.close)
        opened.settle()

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
            raise UnsupportedOptionError("drives", self._tier.drives.last, reason)
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
        labels = labels_of(state["param_groups"])
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
    def stepping_by(self, steps: Callable[[StepExecutor], StepExecutor]) -> Iterator[None]:
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

    def _attach(self, device: str | Device | SharedDevice, settings: Settings) -> None:
        self._lease = device if isinstance(device, SharedDevice) else SharedDevice.of(device)
        kernel = self._lease.device.config
        self._settings = settings.on(self._lease.device)
        self._settings.check(kernel)
        if self._settings.stochastic and not self.definition.counts:
            reason = f"{self.definition.name} counts no steps, whose random bits have to differ"
            raise UnsupportedOptionError("rounding", "stochastic", reason)
        self._formats = Formats.of(kernel)
        self.layout = self.layout.on(self._formats.state)  # type: ignore[misc]
        self._placement = Placement(self._lease.device)
        self._residents: dict[Tensor, DeviceParameter] = {}
        self._traffic = Traffic()
        self._tier = None
        self._residual_memory = ScratchPool()
        self._bundles = FlatBuckets()
        home = DeviceHome(self._lease.device)
        self._steps = StepExecutor(
            self._lease.device, self._placement, self._settings, self._traffic, home
        )
        self.around_update = nullcontext
        self._held_only = False
        self._interrupted = None
        self._report_inf = None
        weakref.finalize(self, self._placement.free)


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
