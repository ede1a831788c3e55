"""What a step updates: items, and what its runs have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from nearstep.placement import Segment
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
    """What neighbours have in common that share a run.

    Attributes
    ----------
    group : index of the parameter group.
    copy_format : format of the copy of the parameters that the host fetches; None without one.
    times : runs: how often each is in its group.
    negate : the kernel is to negate the gradients.
    """

    group: int
    phase: Phase
    gradient_format: str
    copy_format: str | None
    times: int
    negate: bool

    @property
    def result(self) -> str:
        """Array that the host fetches."""
        return "p" if self.copy_format is None else copy_array(self.copy_format)


@dataclass(eq=False, slots=True)
class StepItem:
    """A parameter that a step updates, or a bucket of small ones.

    Attributes
    ----------
    group : index of the parameter group.
    gradient : of a bucket: that of each parameter.
    times : how often the parameter is in the group.
    parameter : None of a bucket.
    resident : the parameter, or the bucket, on the device.
    found : state as it is before the step.
    key, state, compressed : of an item that is ready: what was sent of it.
    """

    group: int
    position: int
    gradient: Gradient | list[Tensor]
    times: int = 1
    parameter: Tensor | None = None
    resident: DeviceParameter | FlatBucket = field(init=False)
    found: ParameterState | SavedState | None = None
    phase: Phase = field(init=False)
    key: RunKey = field(init=False)
    state: ParameterState = field(init=False)
    compressed: Compressed | None = None

    @property
    def single(self) -> DeviceParameter:
        """The parameter on the device; the item is no bucket."""
        assert isinstance(self.resident, DeviceParameter), "an item of one parameter"
        return self.resident


class Scaling(NamedTuple):
    """What is to be known of the gradients' scale.

    Attributes
    ----------
    scale : what the gradients were multiplied by.
    found : if given, the device looks for infinities and NaN, and `found` is set to 1 if it finds
        one.
    """

    scale: float
    found: Tensor | None


@dataclass
class StepPlan:
    """A step, or a part of one; everything has been checked.

    Attributes
    ----------
    arrays : of the rule of each group, with their first values.
    arguments : of runs, by group and phase.
    """

    items: Sequence[StepItem]
    arrays: Sequence[Mapping[str, float]]
    arguments: Mapping[tuple[int, Phase], RuleArguments]
    scaling: Scaling

    def singles(self) -> Sequence[DeviceParameter]:
        """Parameters that are updated by themselves."""
        return [i.resident for i in self.items if isinstance(i.resident, DeviceParameter)]

    def of(self, segments: Sequence[Segment]) -> Sequence[tuple[Segment, StepPlan]]:
        """The parts of the plan for each segment that has items, in the order of segments."""
        found: dict[Segment, list[StepItem]] = {}
        for item in self.items:
            found.setdefault(item.resident.extent.segment, []).append(item)
        return [(each, replace(self, items=found[each])) for each in segments if each in found]

    def needed(self) -> dict[str, float]:
        """Arrays of the segment that the items need, with their first values."""
        needed: dict[str, float] = {}
        for item in self.items:
            for name, value in self.arrays[item.group].items():
                if name != "g":
                    needed[name] = value
            gradient, resident = item.gradient, item.single
            if isinstance(gradient, DeviceGradient):
                needed[gradient_array(gradient.form)] = 0.0
            elif isinstance(gradient, Tensor):
                needed[gradient_array(resident.gradient_format(gradient))] = 0.0
            if resident.copy_format is not None:
                needed[copy_array(resident.copy_format)] = 0.0
        return needed
