"""The plan of a step: items to update, and the keys of their runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from nearstep.placement import Segment
from nearstep.torch import convert
from nearstep.torch.compression import Compressed
from nearstep.torch.device_gradient import DeviceGradient, SparseGradient
from nearstep.torch.flat_bucket import FlatBucket
from nearstep.torch.formats import copy_array, gradient_array
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.state import ParameterState, SavedState
from nearstep.updater.arguments import RuleArguments

if TYPE_CHECKING:
    from nearstep.torch.rule import Phase

Gradient = Tensor | DeviceGradient | SparseGradient
"""A gradient on the host, kept by the device, or compressed already."""


class RunKey(NamedTuple):
    """Properties that neighbours must share to be updated by one run.

    Attributes
    ----------
    group : index of the parameter group.
    copy_format : format of the copy of the parameters that the host fetches; None without one.
    times : number of runs: how often each parameter is in its group.
    negate : the kernel negates the gradients.
    """

    group: int
    phase: Phase
    gradient_format: str
    copy_format: str | None
    times: int
    negate: bool

    @property
    def result(self) -> str:
        """Array to fetch."""
        return "p" if self.copy_format is None else copy_array(self.copy_format)


@dataclass(eq=False, slots=True)
class StepItem:
    """A parameter that a step updates, or a bucket of small ones.

    Attributes
    ----------
    group : index of the parameter group.
    gradient : of a bucket: the gradients of its parameters.
    times : how often the parameter is in the group.
    parameter : None for a bucket.
    resident : the parameter, or the bucket, on the device.
    found : state before the step.
    second : phase in the second run; None without one.
    key, state, compressed : set when the item's data has been sent.
    """

    group: int
    position: int
    gradient: Gradient | list[Tensor]
    times: int = 1
    parameter: Tensor | None = None
    resident: DeviceParameter | FlatBucket = field(init=False)
    found: ParameterState | SavedState | None = None
    phase: Phase = field(init=False)
    second: Phase | None = None
    key: RunKey = field(init=False)
    state: ParameterState = field(init=False)
    compressed: Compressed | None = None

    @property
    def single(self) -> DeviceParameter:
        """The parameter on the device, of an item that is no bucket."""
        assert isinstance(self.resident, DeviceParameter), "an item of one parameter"
        return self.resident


class Scaling(NamedTuple):
    """The scale of the gradients.

    Attributes
    ----------
    scale : factor of the gradients.
    found : None, or a tensor of one element that is set to 1 if the device finds an infinity or
        NaN.
    """

    scale: float
    found: Tensor | None


@dataclass
class StepPlan:
    """A step, or a part of one; everything has been checked.

    Attributes
    ----------
    arrays : for each group the arrays of its rule, with their first values.
    arguments : arguments of runs, by group and phase.
    fetches : parameters are fetched after the run; else another run follows.
    """

    items: Sequence[StepItem]
    arrays: Sequence[Mapping[str, float]]
    arguments: Mapping[tuple[int, Phase], RuleArguments]
    scaling: Scaling
    fetches: bool = True

    def singles(self) -> Sequence[DeviceParameter]:
        """Return the parameters that are in no bucket."""
        return [i.resident for i in self.items if isinstance(i.resident, DeviceParameter)]

    def of(self, segments: Sequence[Segment]) -> Sequence[tuple[Segment, StepPlan]]:
        """Split the plan by segment, in the order of `segments`."""
        found: dict[Segment, list[StepItem]] = {}
        for item in self.items:
            found.setdefault(item.resident.extent.segment, []).append(item)
        return [(each, replace(self, items=found[each])) for each in segments if each in found]

    def needed(self) -> dict[str, float]:
        """Return the arrays that the items need in their segment, with their first values."""
        needed: dict[str, float] = {}
        for item in self.items:
            for name, value in self.arrays[item.group].items():
                if name != "g":
                    needed[name] = value
            gradient, resident = item.gradient, item.single
            if isinstance(gradient, DeviceGradient):
                needed[gradient_array(gradient.form)] = 0.0
            elif isinstance(gradient, Tensor):
                needed[gradient_array(resident.gradient_format(gradient.dtype))] = 0.0
            if item.second is not None and isinstance(gradient, Tensor | DeviceGradient):
                dtype = convert.second_dtype(gradient.dtype)
                needed[gradient_array(resident.gradient_format(dtype))] = 0.0
            if resident.copy_format is not None:
                needed[copy_array(resident.copy_format)] = 0.0
        return needed
