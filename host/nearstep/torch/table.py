"""The state table of an optimizer: its arrays as columns over one index space of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from nearstep.device import Device
from nearstep.placement import Extent, Placement, Segment
from nearstep.torch import convert
from nearstep.torch.checks import label
from nearstep.torch.errors import InterruptedStepError, UnsupportedOptionError
from nearstep.torch.exchange import SMALL_ELEMENTS
from nearstep.torch.execution import StepExecutor
from nearstep.torch.formats import Formats, copy_array, gradient_array
from nearstep.torch.homes.home import DeviceHome
from nearstep.torch.pair_space import PairSpace
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.rule import BoundRule, Phase
from nearstep.torch.settings import Settings, scans
from nearstep.torch.state import ParameterState, SavedState
from nearstep.torch.traffic import Traffic
from nearstep.torch.unclaimed import SharedDevice, unclaimed
from nearstep.updater.arguments import RuleArguments
from nearstep.updater.device import KernelDevice

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups of an optimizer of torch."""

States = MutableMapping[Tensor, Any]
"""`Optimizer.state`."""


class Owner(Protocol):
    """The optimizer whose columns a table has; `state` and `param_groups` are torch's."""

    table: StateTable
    state: Any
    param_groups: list[dict[str, Any]]

    @property
    def title(self) -> str:
        """Name of the optimizer on drives."""

    @property
    def computes(self) -> str:
        """Description of the arithmetic in a generation on drives."""


class StateTable:
    """Columns of an optimizer: parameters, gradients, moments and copies of all parameters.

    The index space has the parameters in the order of their allocation, each from a line on
    (`nearstep.placement`). Each column has a format, and a home that keeps its elements.

    Parameters
    ----------
    device : name of a device, an open device, or the device of another table.

    Attributes
    ----------
    settings : arguments besides torch's, completed for the device.
    formats : formats that the kernel has.
    layout : layout of a parameter's state on the device.
    interrupted : name of the error of a step that failed half way; further use is refused until a
        checkpoint is loaded.

    Raises
    ------
    UnsupportedOptionError, HyperparameterError : the device cannot do what the settings ask for.
    ArgumentError, UrlError, OptionError : the device cannot be opened, or has no kernel.
    """

    def __init__(
        self,
        device: str | Device | SharedDevice,
        settings: Settings,
        rule: BoundRule,
    ) -> None:
        self.lease = device if isinstance(device, SharedDevice) else SharedDevice.of(device)
        kernel = self.device.config
        self.settings = settings.on(self.device)
        self.settings.check(kernel)
        self.settings.check_optimizer(rule.definition)
        self.formats = Formats.of(kernel)
        if self.device.backend.is_host_memory:
            self.formats = replace(self.formats, masters=False)
        self.rule = rule
        self.layout = rule.lay_out(self.formats.state)
        self.placement = Placement(self.device)
        self.traffic = Traffic()
        self.parameters: dict[Tensor, DeviceParameter] = {}
        self.interrupted: str | None = None
        self.use(DeviceHome(self.device, self.formats, self.traffic))

    @property
    def device(self) -> KernelDevice:
        """The device that the steps run on."""
        return self.lease.device

    @property
    def source(self) -> Any:
        """Device argument for a copy of the optimizer in another process."""
        return self.device.url

    @property
    def scans(self) -> bool:
        """Whether the kernel can scan gradients before an update, and scale them."""
        return scans(self.device.config)

    def check_open(self, action: str) -> None:
        """Raise `ClosedDeviceError` if the device is closed."""
        self.device.check_open(action)

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Check that the device supports the options of a group."""
        self.settings.check_maximize(group.get("maximize"), self.device.config)
        self.rule.check(group)
        self.device.check_rule(self.rule.form(group).rule.name, self.rule.named)

    def arguments(self, group: Mapping[str, Any], phase: Phase) -> RuleArguments:
        """Return the arguments of the runs of a group, for parameters in one phase."""
        return self.device.arguments(self.rule.definition, **self.rule.given(group, phase))

    def begin(self, owner: Owner) -> None:
        """Make the states that torch's constructor makes."""
        for group in owner.param_groups if self.rule.definition.from_start else ():
            arrays = self.rule.arrays(group)
            for parameter in group["params"]:
                resident = self.parameters.get(parameter)
                if resident is not None:  # lazy and frozen parameters have none
                    self.ready_state(owner, resident, group, None, arrays)

    def reset(self) -> None:
        """Reset the device after a step that failed half way."""
        if self.interrupted is not None:
            self.device.reset()

    def use(self, home: DeviceHome) -> None:
        """Keep the columns in a home."""
        self.home = home
        self.executor = StepExecutor(self.device, self.placement, self.settings, self.traffic, home)

    def check_whole(self, action: str) -> None:
        """Raise `InterruptedStepError` after a step that failed half way."""
        if self.interrupted is not None:
            raise InterruptedStepError(action, self.interrupted)

    def interrupt(self, parameters: Iterable[Any], error: BaseException) -> None:
        """Record that a step of these parameters failed half way."""
        self.interrupted = type(error).__name__
        for each in parameters:
            each.interrupt(self.interrupted)

    def recover(self) -> None:
        """Record that the interrupted step has been rolled back."""
        self.interrupted = None
        for each in self.parameters.values():
            each.interrupted = None

    def place_one(self, owner: Owner, parameter: Tensor) -> DeviceParameter:
        """Allocate an extent for a parameter alone, without a gradient or state."""
        name = labels_of(owner.param_groups).get(parameter, "a parameter outside the optimizer")
        formats = self.formats
        formats.check(name, parameter)
        found = unclaimed(parameter)
        if found is not None and found.is_free(self.device):
            return found.adopt(owner, self.placement, name, self.layout, self.traffic)
        (extent,) = self.placement.place(
            [convert.size(parameter)],
            {"p": 0.0},
            line=formats.line(narrow=False),
            dtypes=formats.dtypes,
            quantized=formats.quantized,
        )
        return DeviceParameter(
            parameter, name, extent, self.layout, self.traffic, formats, narrow=False
        )

    def place(self, owner: Owner, group: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
        """Allocate adjacent extents for parameters of a group that have none."""
        groups, known = owner.param_groups, self.parameters
        new = list(dict.fromkeys(p for p in parameters if p not in known and not is_lazy(p)))
        if not new:
            return
        formats, labels = self.formats, labels_of(groups)
        for p in new:
            formats.check(labels[p], p)
        arrays = {name: v for name, v in self.rule.arrays(group).items() if name != "g"}
        narrow = any(formats.narrow(p.dtype) for p in new)
        for dtype in {p.dtype: None for p in new}:
            if self.settings.compression is None:
                arrays[gradient_array(formats.gradient_of(dtype))] = 0.0
            copied = formats.copy_of(dtype)
            if copied is not None:
                arrays[copy_array(copied)] = 0.0
        new = self._adopt(owner, new, labels, arrays, narrow=narrow)
        if not new:
            return
        for segment, unit in self.home.segments_of(groups, new, arrays, labels, narrow=narrow):
            counts = [convert.size(p) for p in unit]
            extents = self.placement.place_in(segment, counts, self.home.kept(arrays))
            self.executor.pair_spaces.update(self._pairs(extents))
            for k, (p, extent) in enumerate(zip(unit, extents, strict=True)):
                beside = [*counts[max(k - 1, 0) : k], *counts[k + 1 : k + 2], SMALL_ELEMENTS]
                self.parameters[p] = DeviceParameter(
                    p,
                    labels[p],
                    extent,
                    self.layout,
                    self.traffic,
                    formats,
                    narrow=narrow,
                    alone=min(beside) == SMALL_ELEMENTS and not self.home.is_durable,
                    moves=self.home.is_durable,
                    durable=self.home.keeps_masters,
                )
            self.home.add(segment, [self.parameters[p] for p in unit])

    def _pairs(self, extents: Sequence[Extent]) -> dict[Segment, PairSpace]:
        """Return memory for the pairs of a segment, if gradients are compressed."""
        compression, segment = self.settings.compression, extents[0].segment
        if compression is None:
            return {}
        return {segment: PairSpace(segment, extents, compression, self.home.cut)}

    def _adopt(
        self,
        owner: Owner,
        parameters: Sequence[Tensor],
        labels: Mapping[Tensor, str],
        arrays: Mapping[str, float],
        *,
        narrow: bool,
    ) -> list[Tensor]:
        """Adopt parameters that `nearstep.offload.init` has allocated; return the others."""
        places = {p: unclaimed(p) for p in parameters}
        if self.home.is_durable and any(each is not None for each in places.values()):
            reason = "parameters of nearstep.offload.init are on the device"
            raise UnsupportedOptionError("drives", "given", reason)
        here = {p: w for p, w in places.items() if w is not None and w.is_free(self.device)}
        spaces: dict[Segment, PairSpace] = {}
        try:
            for found in here.values():
                found.resident.extent.segment.reserve(arrays)
                spaces.update(self._pairs([found.resident.extent]))
        except BaseException:
            for found in here.values():
                found.resident.extent.segment.free_besides("p")
            raise
        self.executor.pair_spaces.update(spaces)
        for parameter, found in here.items():
            self.parameters[parameter] = found.adopt(
                owner, self.placement, labels[parameter], self.layout, self.traffic, narrow=narrow
            )
        return [p for p in parameters if p not in here]

    def keep(self, owner: Owner, resident: DeviceParameter, state: ParameterState) -> None:
        """Put a parameter's state into `owner.state`, unless it is empty."""
        if state or resident.keeps_master:
            owner.state[resident.parameter] = state

    def load(self, resident: DeviceParameter, saved: SavedState) -> ParameterState:
        """Send saved state to the device."""
        for key, value in saved.moments.items():
            resident.send(key, value)
        resident.load_master(saved.master)
        state = ParameterState.of(resident, saved.step, saved.moments)
        state.update(saved.others)
        return state

    def state_of(
        self, owner: Owner, resident: DeviceParameter
    ) -> ParameterState | SavedState | None:
        """Return a parameter's state, as kept or as the user assigned it; None without state."""
        state = owner.state.get(resident.parameter)
        if isinstance(state, ParameterState) and state.store is resident and state:
            state.check_keys()
            return state
        if state:
            return SavedState.of(self.layout, resident.label, resident.parameter, state)
        return None

    def ready_state(
        self,
        owner: Owner,
        resident: DeviceParameter,
        group: Mapping[str, Any],
        found: ParameterState | SavedState | None,
        arrays: Mapping[str, float],
    ) -> ParameterState:
        """Make, load or flush the state of a parameter before its update.

        Parameters
        ----------
        found : from `state_of`.
        arrays : arrays of the group's rule, with their first values.
        """
        resident.extent.segment.reserve(arrays, besides="g")
        if isinstance(found, ParameterState):
            found.flush()
            return found
        if found is not None:
            ready = self.load(resident, found)
        else:
            resident.reset_moments(self.rule.first_moments(group), arrays)
            ready = self.first_state(resident, group)
        self.keep(owner, resident, ready)
        return ready

    def first_state(self, resident: DeviceParameter, group: Mapping[str, Any]) -> ParameterState:
        """Return the state before the first step."""
        step = torch.zeros((), dtype=torch.float32, device="cpu") if self.layout.counts else None
        return ParameterState.of(resident, step, self.rule.first_moments(group))

    def load_all(self, owner: Owner, saved: Mapping[Tensor, SavedState]) -> None:
        """Load a checkpoint: send the state now, and every parameter with its next step."""
        for group in owner.param_groups:
            wanted = (p for p in group["params"] if p.requires_grad or p in saved)
            self.place(owner, group, wanted)
        for parameter, value in saved.items():
            arrays = {self.layout.moments[key]: 0.0 for key in value.moments}
            self.parameters[parameter].extent.segment.reserve(arrays)
        try:
            for resident in self.parameters.values():
                resident.load_master(None)
            for parameter, value in saved.items():
                resident = self.parameters[parameter]
                del owner.state[parameter]
                self.keep(owner, resident, self.load(resident, value))
        except BaseException as error:
            self.interrupt(self.parameters.values(), error)
            raise


def labels_of(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, str]:
    """Return the names of the parameters in errors."""
    return {
        parameter: label(group, index, position)
        for index, group in enumerate(groups)
        for position, parameter in enumerate(group["params"])
    }
