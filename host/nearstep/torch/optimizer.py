"""Optimizers of torch, each defined by data, whose parameters and state a device updates."""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Self, Unpack, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT

from nearstep.device import Device
from nearstep.errors import ArgumentError
from nearstep.storage.drive_errors import StorageError
from nearstep.storage.store import Store
from nearstep.torch import options
from nearstep.torch.checks import check_parameter, label
from nearstep.torch.compression import Compressed
from nearstep.torch.device_gradient import SparseGradient
from nearstep.torch.dtensor import is_dtensor, is_sharded
from nearstep.torch.eager import eager
from nearstep.torch.errors import HyperparameterError, StateError, UnsupportedOptionError
from nearstep.torch.homes.durable import DurableHome, Watch
from nearstep.torch.homes.generation import digest
from nearstep.torch.homes.open_home import open_home
from nearstep.torch.homes.opening import describe, given_groups, has_step, tensors_of
from nearstep.torch.homes.ranks import Ranks
from nearstep.torch.host_device import host_device
from nearstep.torch.host_table import HOST, NO_DEVICE, HostTable, MakeHome
from nearstep.torch.in_backward import BackwardUpdates
from nearstep.torch.layout import Layout
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.rule import BoundRule
from nearstep.torch.settings import IF_ANY, OnDevice, Settings
from nearstep.torch.state import ParameterState, SavedState, Verbatim, export
from nearstep.torch.step import Scaling, StepPlan
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
"""Parameters of `OnDevice`, for signatures."""


class DeviceOptimizer(Optimizer):
    """An optimizer of torch whose parameters and state are on a device, where its steps run.

    A subclass names an optimizer of nearstep and has the constructor of torch's class;
    `NamedOptimizer` is built from any other rule. `table` has the arrays, `Stepper` selects what a
    step updates, and the table's home runs it; this class has the user's methods, checkpoints and
    copies.

    Parameters
    ----------
    defaults : options of a group, as of torch's optimizer.
    **on : arguments besides torch's, as of `nearstep.optim.Adam`.

    Attributes
    ----------
    definition : the optimizer as data, for the device.
    layout : layout of a parameter's state.
    around_update : context that each step enters after its closure, before anything else; set by
        `nearstep.offload`.
    """

    definition: rules.Optimizer
    layout: Layout
    table: StateTable
    _stepper: Stepper | HostTable
    around_update: Callable[[], AbstractContextManager[None]]
    __signature__: ClassVar[inspect.Signature]
    _named = ""  # the rule's name in `rules=` of a device's name, if the rule is of a file

    _fixed: Mapping[str, Any] = MappingProxyType({})  # options that a loaded group cannot change

    def __init_subclass__(cls, optimizer: str = "") -> None:
        if optimizer:
            cls.definition = OPTIMIZERS[optimizer]
            cls.layout = Layout.of(cls.definition)
            own = list(inspect.signature(cls.__init__).parameters.values())[1:-1]
            cls.__signature__ = inspect.Signature([*own, *_ON_DEVICE])

    @torch.inference_mode(False)  # what is made in it cannot be changed in place outside
    def __init__(self, params: ParamsT, defaults: dict[str, Any], **on: Unpack[OnDevice]) -> None:
        name = type(self).__name__
        for each in on:
            if each not in OnDevice.__annotations__:
                raise TypeError(f"{name}() got an unexpected keyword argument {each!r}")
        given: dict[str, Any] = dict(on)
        device: str | Device | MakeHome | None = given.pop("device", None)
        settings = Settings.given(**given)
        options.check_given(defaults)
        groups: Any = params if settings.overflow is None else given_groups(params)
        self._attach(device, settings, defaults, tensors_of(groups))
        if self.settings.overflow is None:
            super().__init__(groups, defaults)
            self.table.begin(self)
            return
        groups = given_groups(groups)  # drives may be those of the device
        ranks = self._meet(groups)
        with nullcontext() if ranks is None else ranks.together():
            opened, home = open_home(self.table, self.title, groups, ranks)
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
        opened.discard_source()

    def _meet(self, groups: Any) -> Ranks | None:
        """Compare with other ranks what they keep on drives, and decide whether to resume; None: no
        parameter is shared."""
        options, parameters, ranks = self.settings.overflow, tensors_of(groups), None
        assert options is not None, "there are drives"
        assert options.drives is not None, "there are drives"
        if any(map(is_dtensor, parameters)):
            self.settings.check_parameters(parameters)
            ranks = Ranks.meet(describe(self.title, [parameters]), self.computes, options)
        if options.resume == IF_ANY:
            options = replace(options, resume=has_step(options.drives, ranks or Ranks()))
            self.table.settings = replace(self.settings, overflow=options)
        return ranks

    def together(self) -> AbstractContextManager[None]:
        """An operation of all ranks, with drives: an error of this one ends it on all."""
        return nullcontext() if self._durable is None else self._durable.ranks.together()

    def _attach(
        self,
        device: str | Device | SharedDevice | MakeHome | None,
        settings: Settings,
        defaults: Mapping[str, Any],
        parameters: Sequence[Tensor] = (),
    ) -> None:
        rule = BoundRule(self.definition, self.layout, defaults, self._named, self._fixed)
        home: Any = HOST if device is None else device
        is_host = isinstance(home, str) and home.startswith(HOST)
        if callable(home) or (is_host and settings.overflow is None):
            self.table = self._stepper = HostTable(home, settings, rule)
        else:
            if is_host:
                home = host_device(home, settings, rule, parameters)
            self.table = StateTable(home, settings, rule)
            self._stepper = Stepper(self.table)
            # No argument may refer to a parameter: parameters may refer to the optimizer.
            weakref.finalize(self, self.table.placement.free)
        self.layout = self.table.layout
        self.around_update = nullcontext
        self._early = BackwardUpdates(self) if self.settings.in_backward else None
        self._report_inf: Tensor | None = None

    @property
    def device(self) -> KernelDevice:
        """The device that runs the steps."""
        return self.table.device

    @property
    def settings(self) -> Settings:
        """Arguments besides torch's options."""
        return self.table.settings

    @property
    def traffic(self) -> Traffic:
        """Counters of this optimizer's transfers and launches. Live: copy to keep a state."""
        return self.table.traffic

    @property
    def timeline(self) -> Timeline | None:
        """Start and end of each transfer and run of the last step, in device cycles; None before
        the first step, and on a device without a clock.

        The timeline keeps no array alive.
        """
        found = () if self._is_host else self.table.executor.timelines
        return Timeline.joined(found) if found else None

    @property
    def _is_host(self) -> bool:
        return isinstance(self.table, HostTable)

    @property
    def _durable(self) -> DurableHome[Any] | None:
        home = None if self._is_host else self.table.home
        return home if isinstance(home, DurableHome) else None

    @property
    def store(self) -> Store | None:
        """The drives that state is kept on, or None.

        Their generation is the last step. No other process may write to them. After an error they
        are opened again; while that fails, this is the closed store.
        """
        if self._durable is None:
            return None
        try:
            return self._durable.drives.store
        except StorageError:
            return self._durable.drives.last

    @eager
    def keep(self, name: str) -> None:
        """Commit parameters and state as a generation that the drives keep under a name.

        Its space is in use until `store.drop`. With sharded parameters all ranks call this.

        Raises
        ------
        ArgumentError : there are no drives, or the name is in use.
        InterruptedStepError, EarlyUpdateError, StorageError
        """
        if self._durable is None:
            raise ArgumentError("drives must be given for a generation to be kept")
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"name must be a text, not {name!r}")
        with torch.no_grad(), self.together():
            self._check_whole("keep a generation")
            if name in self._durable.drives.store.kept:
                raise ArgumentError(f"name must be a new one, not {name!r}: drop the other first")
            plan = StepPlan([], [], {}, Scaling(1.0, None))
            self._durable.step(self, plan, lambda _: True, name=name)

    @property
    def memory_peak(self) -> int | None:
        """With drives: most bytes of the device's memory that were in use at once since the
        optimizer was made, or since its last failed step; else None."""
        return None if self._durable is None else self._durable.peak

    @property
    def title(self) -> str:
        """Name of the optimizer on drives."""
        return type(self).__name__

    @property
    def computes(self) -> str:
        """Description of the arithmetic in a generation on drives."""
        formats = sorted(self.table.formats.state.items())
        parts = [digest(self.definition, self._source), *(f"{k}:{v}" for k, v in formats)]
        if self.table.formats.blocks is not None:
            parts.append(f"in {self.table.formats.blocks}")
        return " ".join(parts)

    @property
    def _source(self) -> str:
        """SHA-256 of the text of the rule's file; empty for a rule of nearstep."""
        return ""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` leaves the division by its scale to the step.

        Not with compression: elements are compared, and residuals added up, without the scale. Nor
        if the host computes with gradients between two runs.
        """
        if self._early is not None:
            self._early.refuse_scaler(self)
        if self.table.rule.has_two_runs:
            return False
        return self.settings.compression is None and self.table.scans

    @property
    def looks_for_inf(self) -> bool:
        """Whether a step can search for infinities and NaN on the device, and stop at the first.

        Not if a parameter is sharded: all processes would have to stop.
        """
        if self._is_host:
            return False  # torch searches on the host
        if self._durable is not None:
            return False  # updates begin before all gradients are on the device
        if self.device.backend.is_host_memory:
            return False  # torch searches, as without memory apart
        parameters = (p for group in self.param_groups for p in group["params"])
        return self._step_supports_amp_scaling and not any(map(is_sharded, parameters))

    @property
    def scales(self) -> bool:
        """Whether a scaler has set the scale of the gradients for the present step."""
        return self._report_inf is not None or getattr(self, "grad_scale", None) is not None

    @eager
    def report_inf_to(self, found: Tensor) -> None:
        """Make the next step search for infinities and NaN.

        If there is one, the step sets `found`, of one element, to 1, updates nothing and is not
        counted.
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
        later, its memory is partly old and partly new, and the optimizer refuses further use until
        a checkpoint is loaded. Parameters on the host change after the last run; large ones that
        the device updates in place (`golden:axdimm`) change with their run, so that an interrupted
        step leaves some of them new, or partly new.

        Parameters
        ----------
        closure : reevaluates the model with gradients enabled and returns the loss.

        Returns
        -------
        float | None : the closure's result.

        Raises
        ------
        ArgumentError, OutOfDeviceMemoryError : an option, a gradient, a parameter or its state is
            wrong (HyperparameterError, UnsupportedOptionError, GradientError, ParameterError,
            StateError), or a value computed from the options exceeds the scalar registers. Nothing
            has been updated.
        DeviceError : the device failed during the update.
        InterruptedStepError : the device failed in an earlier step.
        ClosedDeviceError
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                self.around_update(),
                self.together(),
            ):
                scaling = self._ready()
                only = None if self._early is None else self._early.left(self)
                if scaling is None or not self._stepper.step(self, scaling, only):
                    self.traffic.skipped += 1
                if self._early is not None:
                    self._early.begin(self)
        except BaseException:
            self._report_inf = None
            for name in ("grad_scale", "found_inf"):  # GradScaler deletes both after other steps
                vars(self).pop(name, None)
            raise
        self._report_inf = None
        return loss

    def _ready(self) -> Scaling | None:
        """Check that a step can run and return the scale of the gradients; None if a scaler has
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
    def update_early(self, parameters: Container[Tensor]) -> None:
        """Update some parameters before the next step, as that step would.

        With drives the updates are committed by that step, and rolled back by an error, `zero_grad`
        or `interrupt`.
        """
        with torch.inference_mode(False), torch.no_grad():
            scaling = self._ready()
            if scaling is not None:
                self._stepper.step(self, scaling, parameters, ends=False)

    @property
    def keeps_updates(self) -> bool:
        """Whether updates in backward are in force until the step that ends them; False: with
        drives, that there are none, since they were rolled back, or committed."""
        return self._durable is None or self._durable.is_open

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """With updates in backward: accumulate the gradients of backward in this `with` statement.

        Enter it around every backward of a step except the last, which updates each parameter with
        the sum, as it is without updates in backward.
        """
        with nullcontext() if self._early is None else self._early.accumulating():
            yield

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients as torch does; gradients on the device are fetched only to become
        zeros.

        With drives updates in backward since the last step are rolled back.

        Raises
        ------
        EarlyUpdateError : backward has updated parameters, without drives; no gradient was reset.
        """
        if self._durable is not None:
            self._durable.give_up(self.table)
        if self._early is not None:
            self._early.reset(self, set_to_none=set_to_none)
        for resident in self.table.parameters.values() if set_to_none else ():
            held = resident.held  # after Ctrl-C it may be marked by a step that was made
            if held is not None and not (held.applied and self.keeps_updates):
                resident.release_gradient()
        super().zero_grad(set_to_none)

    @eager
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and allocate its parameters that require a gradient.

        Raises
        ------
        UnsupportedOptionError, HyperparameterError, ParameterError, OutOfDeviceMemoryError
        ArgumentError : the kernel does not have the rule. After any error the group is not added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.table.check_group(group)
            parameters = group["params"]
            for index, parameter in enumerate(parameters):
                if unclaimed(parameter) is None:
                    name = label(group, len(self.param_groups) - 1, index)
                    check_parameter(name, parameter)
                    if not is_lazy(parameter):
                        self.table.rule.check_parameter(name, parameter)
            self.settings.check_parameters(parameters)
            wanted = [p for p in parameters if p.requires_grad]
            self.table.place(self, group, wanted)
            if self._early is not None:
                self._early.watch(self)
        except BaseException:
            self.param_groups.pop()
            raise

    @eager
    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot of the state under torch's keys, in fp32.

        The groups have `fused=True`, so that an optimizer of torch that loads the state continues
        with the same bits, under the conditions of `nearstep.optim`.
        """
        self._check_whole("make a checkpoint")
        packed = super().state_dict()
        packed["state"] = {
            key: export(value) if isinstance(value, ParameterState) else value
            for key, value in packed["state"].items()
        }
        chosen = {"fused": True, "foreach": None}
        packed["param_groups"] = [
            {**group, **{key: value for key, value in chosen.items() if key in group}}
            for group in packed["param_groups"]
        ]
        return packed

    @eager
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` of this class or of torch's.

        The state is sent to the device as fp32, each parameter with its next step. Options that
        select torch's implementation (foreach, capturable) are ignored.

        Raises
        ------
        UnsupportedOptionError, HyperparameterError, StateError, ValueError : nothing has been
            loaded.
        ParameterError, OutOfDeviceMemoryError : as these.
        DeviceError : the device has failed, and refuses steps until a checkpoint is loaded.
        """
        # Registered last, the hook runs after the user's.
        handle = self.register_load_state_dict_pre_hook(_prepare_to_load)
        try:
            with self.together():
                super().load_state_dict(state_dict)
        finally:
            handle.remove()

    @eager
    def __getstate__(self) -> dict[str, Any]:
        self._check_whole("copy or pickle the optimizer")
        if self._durable is not None:
            reason = "an optimizer with drives cannot be copied or pickled; use state_dict()"
            raise UnsupportedOptionError("drives", self._durable.drives.last, reason)
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
    @torch.inference_mode(False)
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state from pickle, a copy, or `load_state_dict`: all of it, or none."""
        before = dict(vars(self))
        try:
            self._set_state(dict(state))
        except BaseException:
            vars(self).update(before)
            raise
        self.table.interrupted = None
        if self._early is not None:
            self._early.begin(self)

    def _set_state(self, state: dict[str, Any]) -> None:
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

    def keep_apart(self) -> Callable[[], None]:
        """Without a device: keep parameters and state in memory of the processor's own, as on a
        device, from which parameters are fetched; updates have the same bits.

        Returns
        -------
        Callable[[], None] : undoes it, before the next step.

        Raises
        ------
        ArgumentError : the home is one of the user's.
        UnsupportedOptionError : parameters are of several dtypes, or the rule has formats of its
            own.
        """
        if not self._is_host:
            return lambda: None
        if not isinstance(self.table.source, str):
            raise ArgumentError(NO_DEVICE)
        parameters = (p for group in self.param_groups for p in group["params"])
        device = host_device(self.table.source, self.settings, self.table.rule, parameters)
        before = dict(vars(self))
        self.__setstate__({**self.__getstate__(), "device": device})

        def undo() -> None:
            self.table.placement.free()
            vars(self).update(before)

        return undo

    def _check_whole(self, action: str) -> None:
        """Raise unless the last step was complete, or can be rolled back now.

        Raises
        ------
        InterruptedStepError
        StorageError : the drives do not answer.
        """
        if self._durable is not None:
            self._durable.check_whole(self.table)
        self.table.check_whole(action)
        if self._early is not None and action != "step":
            self._early.check_between(self, action)

    def resident(self, parameter: Tensor) -> DeviceParameter:
        """Return the parameter on the device; allocate an extent if needed, without state for a
        parameter that has none.
        """
        found = self.place_of(parameter)
        return self.table.place_one(self, parameter) if found is None else found

    def place_of(self, parameter: Tensor) -> DeviceParameter | None:
        """Return the parameter on the device if it has state, or will have some as a member of a
        group that requires a gradient; else None.
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
        """Roll back the updates that backward has made, with drives; otherwise refuse further use
        until a checkpoint is loaded.

        Parameters
        ----------
        cause : name of an error's class.
        """
        if self._durable is None:
            self.table.interrupted = cause
        else:
            self._durable.give_up(self.table)

    def watch(self, recording: Watch | None) -> None:
        """With drives: record transfers and updates, or end it."""
        if self._durable is not None:
            self._durable.watch = recording

    def write_failed(self, error: Exception) -> None:
        """Recover from a failed write to the drives outside of a step.

        Writes since the last generation are lost: gradients that the device was to keep are freed.
        If anything else was written, the optimizer refuses steps until a checkpoint is loaded.

        Parameters
        ----------
        error : ignored unless it is an error of the drives.
        """
        if self._durable is not None:
            self._durable.write_failed(self.table, error)


class NamedOptimizer(DeviceOptimizer):
    """An optimizer made by `nearstep.optim.from_rule`."""

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
    """Prevent torch from casting moments to the format of 16-bit parameters.

    Raises
    ------
    StateError : `state_dict` is not the state of an optimizer.
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
