"""What one step of an optimizer sends to its device and runs there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor

from nearstep.placement import Extent, Launch, Placement, Segment
from nearstep.run import Run
from nearstep.torch.clip_coefficient import gradient_factor, gradient_norm
from nearstep.torch.compression import Compressed
from nearstep.torch.device_gradient import DeviceGradient
from nearstep.torch.errors import GradientError
from nearstep.torch.flat_bucket import FlatBucket
from nearstep.torch.formats import copy_array
from nearstep.torch.pairs import PairList, PairSpace
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.settings import Settings
from nearstep.torch.sparse_gradient import SparseGradient
from nearstep.torch.state import ParameterState
from nearstep.torch.traffic import Traffic
from nearstep.torch.transfers import Inbox, Outbox
from nearstep.updater.device import KernelDevice
from nearstep.updater.rounding import Numbering
from nearstep.updater.run import ScanRun
from nearstep.work.clock import Clock
from nearstep.work.timeline import Timeline

Arrays = Mapping[str, Any]
"""Arguments of a run by array: buffers, and pairs in the place of a compressed gradient."""

GradientOptions = Mapping[str, Any]
"""How gradients come, and where a copy of the parameters goes: arguments of every rule. And indices
of the elements, `NUMBERING`."""

NUMBERING = "numbering"


class Key(NamedTuple):
    """What neighbours have in common that share a run.

    Attributes
    ----------
    group : index of the parameter group.
    phase : what else the rule needs to know.
    gradient_format
    copy_format : format of the copy of the parameters that the host fetches; None without one.
    times : runs: how often each is in its group.
    negate : the kernel is to negate the gradients.
    """

    group: int
    phase: Hashable
    gradient_format: str
    copy_format: str | None
    times: int
    negate: bool


class Given(NamedTuple):
    """A parameter to be updated.

    Attributes
    ----------
    group : index of the parameter group.
    position : of the parameter in it.
    parameter
    gradient : on the host, kept by the device, or compressed already.
    times : how often it is in the group.
    """

    group: int
    position: int
    parameter: Tensor
    gradient: Tensor | DeviceGradient | SparseGradient
    times: int

    def once_more(self) -> Given:
        """The same, found in the group again."""
        return self._replace(times=self.times + 1)


@dataclass(eq=False, slots=True)
class Update:
    """A parameter that a step updates, or a bundle of them.

    Attributes
    ----------
    key
    resident
    state : of the first in a bundle.
    arrays : arrays of the rule.
    compressed : the gradient, if it is compressed; others have been sent.
    """

    key: Key
    resident: DeviceParameter | FlatBucket
    state: ParameterState
    arrays: Mapping[str, float]
    compressed: Compressed | None


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


Start = Callable[[Arrays, Key, GradientOptions], Run]
"""Starts the rule of a group."""


class StepInputs(NamedTuple):
    """What a step is made of.

    Attributes
    ----------
    updates : what it updates, as often as a parameter is in its group.
    outbox : what goes to the device first.
    scaling
    start
    started : each run of a rule is added to it as it is started.
    fetches : what the rules leave goes to the host; if not, it stays where it is.
    """

    updates: Mapping[Extent, Update]
    outbox: Outbox
    scaling: Scaling
    start: Start
    started: list[Run]
    fetches: bool


class Steps(ABC):
    """Makes the steps of one optimizer, whose parameters have been prepared.

    Attributes
    ----------
    pair_spaces : room for compressed gradients.
    timeline : of the last step; None before the first, and on a device without a clock.
    clock : of the device, if others go by it, too.
    """

    def __init__(
        self, device: KernelDevice, placement: Placement, settings: Settings, traffic: Traffic
    ) -> None:
        self.pair_spaces: dict[Segment, PairSpace] = {}
        self.timeline: Timeline | None = None
        self.clock: Clock | None = None
        self._device = device
        self._placement = placement
        self._settings = settings
        self._traffic = traffic

    @property
    def cut(self) -> int | None:
        """Elements of the smallest piece that launches may be cut into; None if they are not."""
        return None

    @abstractmethod
    def outbox(self) -> Outbox:
        """Where the arrays of a step are sent."""

    @abstractmethod
    def make(self, step: StepInputs) -> Inbox | None:
        """Make a step: what is in the outbox goes to the device, is looked at if that is wanted,
        and the rules run.

        Returns
        -------
        Inbox | None : the results; None if the step is to be skipped: nothing has been updated.

        Raises
        ------
        GradientError : there is a bound, and the norm is not finite: nothing has been updated.
        DeviceError : no run goes on.
        """

    def _launches(self, updates: Mapping[Extent, Update]) -> list[Launch]:
        """Updates as runs."""
        keyed = ((extent, update.key) for extent, update in updates.items())
        return list(self._placement.launches(keyed))

    def _pair_lists(
        self, launch: Launch, updates: Mapping[Extent, Update], cuts: Sequence[Sequence[range]]
    ) -> list[PairList]:
        """Compressed gradients of a launch, counted as sent."""
        compressed = {
            extent: cast(Compressed, updates[extent].compressed) for extent in launch.extents
        }
        lists = list(self.pair_spaces[launch.segment].lists(launch, compressed, cuts))
        for each in lists:
            pairs = each.pairs
            self._traffic.gradients_down += pairs.index.nbytes + pairs.value.nbytes
            self._traffic.pairs += pairs.size
        return lists

    def _looks(self, scaling: Scaling) -> bool:
        """Whether gradients are looked at before the first update."""
        return self._settings.max_grad_norm is not None or scaling.found is not None

    def _factor(self, scans: Iterable[ScanRun], scaling: Scaling) -> float | None:
        """The factor that undoes the scale and bounds the norm; None if the step is to be skipped.

        Parameters
        ----------
        scans : that have ended: in the order of the launches, those of one in that of the channels.
            In this order their sums are added.

        Raises
        ------
        GradientError
        """
        not_finite, squares = False, 0.0
        for run in scans:
            not_finite |= run.found_inf
            squares += run.sum_of_squares
        if not_finite and scaling.found is not None:
            scaling.found.fill_(1.0)
            return None
        bound = self._settings.max_grad_norm
        norm = gradient_norm(squares, scaling.scale)
        if bound is not None and not math.isfinite(norm):
            raise GradientError("all parameters together", "of a finite norm", norm)
        return gradient_factor(norm, bound, scaling.scale)


def starter(
    start: Start, arrays: Arrays, key: Key, factor: float, numbering: Numbering
) -> Callable[[], Run]:
    """Start the rule on the arrays of one run, whose elements have these indices, and which
    multiplies its gradients by `factor`."""
    options: dict[str, Any] = {
        "gradient_format": key.gradient_format,
        "gradient_scale": -factor if key.negate else factor,
        NUMBERING: numbering,
    }
    if key.copy_format is not None:
        options["copy_out"] = arrays[copy_array(key.copy_format)]
        options["copy_out_format"] = key.copy_format
    return partial(start, arrays, key, options)
