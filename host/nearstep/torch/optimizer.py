"""Optimizers of torch whose parameters and state a device updates, each of the data of one."""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar, Self, Unpack, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from nearstep.device import Device
from nearstep.storage.store import Store
from nearstep.torch import options
from nearstep.torch.checks import check_parameter, label
from nearstep.torch.compression import Compressed
from nearstep.torch.device_gradient import SparseGradient
from nearstep.torch.dtensor import is_sharded
from nearstep.torch.eager import eager
from nearstep.torch.errors import HyperparameterError, StateError, UnsupportedOptionError
from nearstep.torch.homes.durable import DurableHome
from nearstep.torch.homes.generation import digest
from nearstep.torch.homes.open_home import open_home
from nearstep.torch.homes.opening import given_groups
from nearstep.torch.host_table import HOST, HostTable, MakeHome
from nearstep.torch.layout import Layout
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.rule import BoundRule
from nearstep.torch.settings import OnDevice, Settings
from nearstep.torch.state import ParameterState, SavedState, Verbatim, export
from nearstep.torch.step import Scaling
from nearstep.torch.table import StateTable, labels_of
from nearstep.torch.traffic import Traffic
from nearstep.torch.unclaimed import SharedDevice, unclaimed
from nearstep.torch.update import Stepper
from nearstep.updater.device import KernelDevice
from nearstep.work.timeline import Timeline
from nearstep_spec.rule import optimizer as rules
from nearstep_spec.rule.file import is_in_file, load_with_digest
from nearstep_spec.rule.rules import OPTIMIZERS, optimizer_named

_ON_DEVICE = (
    inspect.Parameter(
        "device", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | Device | None"
    ),
    *inspect.signature(Settings.given).parameters.values(),
)
"""Parameters that are in `OnDevice`, as signatures show them."""


class DeviceOptimizer(Optimizer):
    """An optimizer of torch whose parameters and state are on a device, where its steps run.

    A subclass names an optimizer of nearstep, and has the constructor of torch's class; or is made
    of any other (`NamedOptimizer`). What a step does is in `table` (where arrays are), `Stepper`
    (what is updated) and the home of the table (how); here are what a user calls, checkpoints and
    copies.

    Parameters
    ----------
    defaults : options of a group, those of torch's optimizer.
    **on : arguments besides torch's, as of `nearstep.optim.Adam`.

    Attributes
    ----------
    definition : the optimizer as data, which the device takes.
    layout : state of a parameter.
    around_update : entered by each step, after its closure, before anything else: by
        `nearstep.offload`.
    """

    definition: rules.Optimizer
    layout: Layout
    table: StateTable
    _stepper: Stepper | HostTable
    around_update: Callable[[], AbstractContextManager[None]]
    __signature__: ClassVar[inspect.Signature]
    _named = ""  # what `rules=` in a device's name calls the rule, if that is one of a file

    _fixed: Mapping[str, Any] = MappingProxyType({})  # options that a loaded group cannot change

    def __init_subclass__(cls, optimizer: str = "") -> None:
        if optimizer:
            cls.definition = OPTIMIZERS[optimizer]
            cls.layout = Layout.of(cls.definition)
            own = list(inspect.signature(cls.__init__).parameters.values())[1:-1]
            cls.__signature__ = inspect.Signature([*own, *_ON_DEVICE])

    def __init__(self, params: ParamsT, defaults: dict[str, Any], **on: Unpack[OnDevice]) -> None:
        name = type(self).__name__
        for each in on:
            if each not in OnDevice.__annotations__:
                raise TypeError(f"{name}() got an unexpected keyword argument {each!r}")
        given: dict[str, Any] = dict(on)
        device: str | Device | MakeHome | None = given.pop("device", None)
        settings = Settings.given(**given)
        options.reject_unsupported(defaults)
        self._attach(device, settings, defaults)
        if self.settings.overflow is None:
            super().__init__(params, defaults)
            self.table.begin(self)
            return
        groups = given_groups(params)
        opened, home = open_home(self.table, self.title, groups)
        self.table.use(home)
        try:
            super().__init__(groups, defaults)
            self.table.begin(self)
            home.begin_life(self)
        except BaseException:
            opened.give_up()
            raise
        if opened.owns:
            weakref.finalize(self, home.drives.close)
        opened.settle()

    def _attach(
        self,
        device: str | Device | SharedDevice | MakeHome | None,
        settings: Settings,
        defaults: Mapping[str, Any],
    ) -> None:
        rule = BoundRule(self.definition, self.layout, defaults, self._named, self._fixed)
        home = HOST if device is None else device
        if callable(home) or (isinstance(home, str) and home.startswith(HOST)):
            self.table = self._stepper = HostTable(home, settings, rule)
        else:
            self.table = StateTable(home, settings, rule)
            self._stepper = Stepper(self.table)
            # Nothing that refers to a parameter, which may refer to the optimizer.
            weakref.finalize(self, self.table.placement.free)
        self.layout = self.table.layout
        self.around_update = nullcontext
        self._report_inf: Tensor | None = None

    @property
    def device(self) -> KernelDevice:
        """The device that the steps run on."""
        return self.table.device

    @property
    def settings(self) -> Settings:
        """What was given besides torch's options."""
        return self.table.settings

    @property
    def traffic(self) -> Traffic:
        """Counters of what this optimizer has moved and launched. Live: copy it to keep it."""
        return self.table.traffic

    @property
    def timeline(self) -> Timeline | None:
        """When each transfer and run of the last step was under way, in device cycles; None before
        the first step, and on a device without a clock.

        It refers to no data.
        """
        return None if self._is_host else self.table.executor.timeline

    @property
    def _is_host(self) -> bool:
        return isinstance(self.table, HostTable)

    @property
    def _durable(self) -> DurableHome[Any] | None:
        home = None if self._is_host else self.table.home
        return home if isinstance(home, DurableHome) else None

    @property
    def store(self) -> Store | None:
        """The drives that state is kept on, if it was given any.

        Its generation is the last step. Nobody else writes to it.
        """
        return None if self._durable is None else self._durable.drives.last

    @property
    def memory_peak(self) -> int | None:
        """With drives: most bytes of the device's memory that were in use at once since the
        optimizer was made, or since its last step that failed; None without."""
        return None if self._durable is None else self._durable.peak

    @property
    def title(self) -> str:
        """What the optimizer is called on drives."""
        return type(self).__name__

    @property
    def computes(self) -> str:
        """What a generation on drives says of the arithmetic."""
        formats = sorted(self.table.formats.state.items())
        parts = [digest(self.definition, self._source), *(f"{k}:{v}" for k, v in formats)]
        return " ".join(parts)

    @property
    def _source(self) -> str:
        """What steps depend on besides the rules: of a file, SHA-256 of its text."""
        return ""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` leaves the division by its scale to the step.

        Where gradients are compressed it does not: their elements are compared, and what is left of
        them is added up, without the scale.
        """
        return self.settings.compression is None and self.table.scans

    @property
    def looks_for_inf(self) -> bool:
        """Whether a step can look for infinities and NaN on the device, and end if it finds one.

        It cannot where other processes have other elements of a parameter: all would have to end.
        """
        if self._is_host:
            return False  # torch looks for them on the host
        if self._durable is not None:
            return False  # updates begin before all gradients are on the device
        parameters = (p for group in self.param_groups for p in group["params"])
        return self._step_supports_amp_scaling and not any(map(is_sharded, parameters))

    @property
    def scales(self) -> bool:
        """Whether a scaler has told the step that is being made of the scale of the gradients."""
        return self._report_inf is not None or getattr(self, "grad_scale", None) is not None

    @eager
    def report_inf_to(self, found: Tensor) -> None:
        """Make the next step look for infinities and NaN.

        If it finds one, it sets `found`, of one element, to 1, and updates nothing; nor does it
        count as a step.
        """
        self._report_inf = found

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
                scaling = self._ready()
                if scaling is None or not self._stepper.step(self, scaling):
                    self.traffic.skipped += 1
        except BaseException:
            self._report_inf = None
            for name in ("grad_scale", "found_inf"):  # GradScaler does so after steps that return
                vars(self).pop(name, None)
            raise
        self._report_inf = None
        return loss

    def _ready(self) -> Scaling | None:
        """The scale of the gradients, of an optimizer that can make a step; None: a scaler has
        found an infinity or NaN."""
        self._check_whole("step")
        self.table.check_open("step")
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        factor = 1.0 if scale is None else options.scalar("grad_scale", scale)
        found_inf = found is not None and bool(found)
        if not (found_inf or (math.isfinite(factor) and factor > 0.0)):
            raise HyperparameterError("grad_scale", "finite and above 0", factor)
        return None if found_inf else Scaling(factor, self._report_inf)

    @eager
    def update_held(self) -> None:
        """Update, before the next step, parameters whose gradients the device keeps, but for those
        that are to be left out.

        Raises
        ------
        ArgumentError, OutOfDeviceMemoryError, DeviceError : as of `step`.
        InterruptedStepError, ClosedDeviceError : as of `step`.
        """
        with torch.no_grad():
            scaling = self._ready()
            if scaling is not None:
                self._stepper.step(self, scaling, held_only=True)

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does; those that the device keeps are not fetched for it
        unless they become zeros."""
        for resident in self.table.parameters.values() if set_to_none else ():
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
            self.table.check_group(group)
            parameters = group["params"]
            for index, parameter in enumerate(parameters):
                if unclaimed(parameter) is None:
                    check_parameter(label(group, len(self.param_groups) - 1, index), parameter)
            self.settings.check_parameters(parameters)
            wanted = [p for p in parameters if p.requires_grad]
            self.table.place(self, group, wanted)
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

        The state is sent to the device as fp32 and every parameter with its next step. What the
        checkpoint says about torch's way to compute (foreach, capturable) is not taken over.

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
        if self.store is not None:
            reason = "an optimizer with drives cannot be copied or pickled; use state_dict()"
            raise UnsupportedOptionError("drives", self.store, reason)
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for parameter, value in self.state.items():
            state[parameter] = export(value) if isinstance(value, ParameterState) else value
        return {
            **super().__getstate__(),
            "state": state,
            "device": self.table.source,
            "settings": self.settings,
        }

    @eager
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over state from pickle, from a copy, or from `load_state_dict`."""
        state = dict(state)
        if "device" in state:
            self._attach(state.pop("device"), state.pop("settings"), state["defaults"])
        table, labels = self.table, labels_of(state["param_groups"])
        saved = {
            parameter: SavedState.of(self.layout, labels[parameter], parameter, value)
            for parameter, value in state["state"].items()
            if isinstance(parameter, Tensor) and len(value)
        }
        for group in state["param_groups"]:
            table.rule.complete(group)
            table.check_group(group)
        super().__setstate__(state)
        table.reset()

        def load() -> None:
            table.load_all(self, saved)

        if self._durable is not None:
            self._durable.load_checkpoint(self, load)
        else:
            load()
        table.interrupted = None

    @eager
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        state = self.__getstate__()
        del state["device"]
        state = copy.deepcopy(state, memo)
        device = self.table.source if self._is_host else self.table.lease
        twin.__setstate__({**state, "device": device})
        return twin

    def _check_whole(self, action: str) -> None:
        """Raise unless the last step was whole, or could be rolled back.

        Raises
        ------
        InterruptedStepError
        StorageError : the drives do not answer yet.
        """
        if self._durable is not None:
            self._durable.check_whole(self.table)
        self.table.check_whole(action)

    def resident(self, parameter: Tensor) -> DeviceParameter:
        """Return the parameter on the device; allocate its extent if needed: that of its state, or,
        of one that has none, an extent alone.

        Raises
        ------
        ParameterError, OutOfDeviceMemoryError
        """
        found = self.place_of(parameter)
        return self.table.place_one(self, parameter) if found is None else found

    def place_of(self, parameter: Tensor) -> DeviceParameter | None:
        """Return the parameter on the device if it has state or will have it, since it is in a
        group and requires a gradient; None of others.

        Raises
        ------
        ParameterError, OutOfDeviceMemoryError
        """
        if parameter not in self.table.parameters and parameter.requires_grad:
            for group in self.param_groups:
                if any(each is parameter for each in group["params"]):
                    self.table.place(self, group, [parameter])
        return self.table.parameters.get(parameter)

    def hold_pairs(
        self, parameter: Tensor, make: Callable[[Tensor | None], Compressed]
    ) -> SparseGradient:
        """Keep a compressed gradient for the next step: as of `Stepper.hold_pairs`."""
        assert isinstance(self._stepper, Stepper), "gradients are kept on a device"
        return self._stepper.hold_pairs(self.state, parameter, make)

    def compress(self, parameter: Tensor, gradient: Tensor, residual: Tensor | None) -> Compressed:
        """Compress a gradient: as of `Stepper.compress`."""
        assert isinstance(self._stepper, Stepper), "gradients are compressed for a device"
        return self._stepper.compress(parameter, gradient, residual)

    def interrupt(self, cause: str) -> None:
        """Refuse further use until a checkpoint is loaded.

        Parameters
        ----------
        cause : name of the class of an error.
        """
        self.table.interrupted = cause

    def write_failed(self, error: Exception) -> None:
        """Go on after a write to the drives that failed outside of a step.

        What was written since the last generation is lost: gradients that the device was to keep,
        which it keeps no more. If anything else was, the optimizer refuses steps until a checkpoint
        is loaded.

        Parameters
        ----------
        error : nothing is done unless it is one of the drives.
        """
        if self._durable is not None:
            self._durable.write_failed(self.table, error)


class NamedOptimizer(DeviceOptimizer):
    """What `nearstep.optim.from_rule` makes."""

    def __init__(
        self,
        name: str,
        params: ParamsT,
        hyper: Mapping[str, Any],
        *,
        maximize: bool,
        **on: Unpack[OnDevice],
    ) -> None:
        self._define(name)
        defaults: dict[str, Any] = {}
        for key, kind in self.definition.hyper.items():
            if key not in hyper and kind.default is None:
                raise HyperparameterError(key, "given: it has no default", None)
            defaults[key] = hyper.get(key, kind.default)
            if isinstance(kind, rules.Flag) and not isinstance(defaults[key], bool):
                raise HyperparameterError(key, "True or False", defaults[key])
        unknown = [each for each in hyper if each not in defaults]
        if unknown:
            expected = f"of {', '.join(self.definition.hyper)}"
            raise HyperparameterError(f"a hyper-parameter of {name}", expected, unknown[0])
        common = {"maximize": maximize, "foreach": None, "differentiable": False, "fused": None}
        super().__init__(params, {**defaults, **common}, **on)

    @property
    def title(self) -> str:
        return self.name

    @property
    def _source(self) -> str:
        return self._digest

    def _define(self, name: str) -> None:
        self.name = name
        self._named = name if is_in_file(name) else ""
        found = load_with_digest(name) if is_in_file(name) else (optimizer_named(name), "")
        self.definition, self._digest = found
        self.layout = Layout.of(self.definition)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizer": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "optimizer" in state:
            self._define(state.pop("optimizer"))
        super().__setstate__(state)

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, self.name, 1)


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
