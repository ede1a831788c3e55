"""What one step has to do, checked, and its parts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nearstep.placement import Segment
from nearstep.torch.device_gradient import DeviceGradient
from nearstep.torch.flat_bucket import ReadyBucket
from nearstep.torch.formats import copy_array, gradient_array
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.saved import SavedState
from nearstep.torch.sparse_gradient import SparseGradient
from nearstep.torch.state import ParameterState
from nearstep.torch.step import Given, Scaling

if TYPE_CHECKING:
    from nearstep.torch.overflow.segment import OverflowSegment

Checked = tuple[DeviceParameter, Hashable, ParameterState | SavedState | None]
"""A parameter to be updated, its phase, and its state as it is, if it has one."""


@dataclass(frozen=True)
class Work:
    """Updates of a step.

    Attributes
    ----------
    gradients, checked : of each parameter.
    bundled, phases : of each bundle.
    arrays : of the rule of each group.
    scaling
    """

    gradients: Sequence[Given]
    checked: Sequence[Checked]
    bundled: Sequence[ReadyBucket]
    phases: Sequence[Hashable]
    arrays: Sequence[Mapping[str, float]]
    scaling: Scaling

    def units(self, segments: Sequence[OverflowSegment]) -> Iterator[UnitWork]:
        """The updates of parameters in each segment that has some, in the order of segments."""
        found: dict[Segment, list[int]] = {}
        for index, (resident, _, _) in enumerate(self.checked):
            found.setdefault(resident.extent.segment, []).append(index)
        for segment in segments:
            own = found.get(segment)
            if own is not None:
                part = replace(
                    self,
                    gradients=[self.gradients[each] for each in own],
                    checked=[self.checked[each] for each in own],
                )
                yield UnitWork(**vars(part), segment=segment)


@dataclass(frozen=True)
class UnitWork(Work):
    """Updates of parameters that are together in memory.

    Attributes
    ----------
    segment
    """

    segment: OverflowSegment

    def needed(self) -> dict[str, float]:
        """Arrays of the segment that the updates need, with their values at first."""
        needed: dict[str, float] = {}
        for given, (resident, _, _) in zip(self.gradients, self.checked, strict=True):
            for name, value in self.arrays[given.group].items():
                if name != "g":
                    needed[name] = value
            gradient = given.gradient
            if isinstance(gradient, DeviceGradient):
                needed[gradient_array(gradient.form)] = 0.0
            elif not isinstance(gradient, SparseGradient):
                needed[gradient_array(resident.gradient_format(gradient))] = 0.0
            if resident.copy_format is not None:
                needed[copy_array(resident.copy_format)] = 0.0
        return needed
