"""Where an optimizer has its parameters and their state on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from nearstep.placement import Extent, Segment
from nearstep.torch import convert
from nearstep.torch.errors import UnsupportedOptionError
from nearstep.torch.execution import StepExecutor
from nearstep.torch.formats import copy_array, gradient_array
from nearstep.torch.overflow.steps import OverflowSteps
from nearstep.torch.pairs import PairSpace
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.saved import SavedState
from nearstep.torch.state import ParameterState
from nearstep.torch.unclaimed import waiting


class PlacedOptimizer(OverflowSteps):
    """Gives parameters their memory, and makes, takes over and checks their state."""

    _steps: StepExecutor

    def resident(self, parameter: Tensor) -> DeviceParameter:
        """The place of a parameter on the device: that of its state if it has one, or else will
        have one, since it is in a group and requires a gradient; another one if not.

        Raises
        ------
        ParameterError, OutOfDeviceMemoryError
        """
        found = self.place_of(parameter)
        return self._lodge(parameter) if found is None else found

    def place_of(self, parameter: Tensor) -> DeviceParameter | None:
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

    def _lodge(self, parameter: Tensor) -> DeviceParameter:
        """A place for a parameter alone, without a gradient or state."""
        name = self._labels().get(parameter, "a parameter outside the optimizer")
        formats = self._formats
        formats.check(name, parameter)
        found = waiting(parameter)
        if found is not None and found.is_free(self.device):
            return found.adopt(self, self._placement, name, self.layout, self._traffic)
        line, size = formats.line(narrow=False), convert.size(parameter)
        (extent,) = self._placement.place(
            [size], {"p": 0.0}, line=line, dtypes=formats.dtypes, coded=formats.coded
        )
        return DeviceParameter(
            parameter, name, extent, self.layout, self._traffic, formats, narrow=False
        )

    def _place(self, group: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
        """Give memory to those that have none yet, next to each other in this order."""
        known = self._residents
        new = list(dict.fromkeys(p for p in parameters if p not in known and not is_lazy(p)))
        if not new:
            return
        compression, formats = self._settings.compression, self._formats
        labels = self._labels()
        for p in new:
            formats.check(labels[p], p)
        arrays = dict(self._states(group))
        narrow = any(formats.narrow(p.dtype) for p in new)
        line, dtypes = formats.line(narrow=narrow), formats.dtypes
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
            [convert.size(p) for p in new], arrays, line=line, dtypes=dtypes, coded=formats.coded
        )
        self._reserve_pairs(extents)
        for p, extent in zip(new, extents, strict=True):
            self._residents[p] = DeviceParameter(
                p, labels[p], extent, self.layout, self._traffic, self._formats, narrow=narrow
            )

    def _reserve_pairs(self, extents: Sequence[Extent]) -> None:
        """Have room for the pairs of all extents of a segment, if gradients are compressed."""
        compression, segment = self._settings.compression, extents[0].segment
        if compression is not None:
            space = PairSpace(segment, extents, compression, self._steps.home.cut)
            self._steps.pair_spaces[segment] = space

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
                    spaces[segment] = PairSpace(segment, extents, compression, self._steps.home.cut)
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

    def _keep(self, resident: DeviceParameter, state: ParameterState) -> None:
        """Show the state to the user, and to checkpoints, if there is any."""
        if state or resident.keeps_master:
            self.state[resident.parameter] = state

    def _restore(self, resident: DeviceParameter, saved: SavedState) -> ParameterState:
        """Send saved state to the device."""
        for key, value in saved.moments.items():
            resident.send(key, value)
        resident.load_master(saved.master)
        state = ParameterState.of(resident, saved.step, saved.moments)
        state.update(saved.others)
        return state

    def _ready_state(
        self,
        resident: DeviceParameter,
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

    def _checked_state(self, resident: DeviceParameter) -> ParameterState | SavedState | None:
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

    def _first_state(self, resident: DeviceParameter, group: Mapping[str, Any]) -> ParameterState:
        """State before the first step."""
        step = torch.zeros((), dtype=torch.float32, device="cpu") if self.layout.counts else None
        return ParameterState.of(resident, step, self._first_moments(group))
