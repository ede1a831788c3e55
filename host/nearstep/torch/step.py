"""What one step of an optimizer sends to its device and runs there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from nearstep.placement import Extent
from nearstep.run import Run
from nearstep.torch.compression import Compressed
from nearstep.torch.device_gradient import DeviceGradient
from nearstep.torch.exchange import Sends
from nearstep.torch.flat_bucket import FlatBucket
from nearstep.torch.formats import copy_array
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.sparse_gradient import SparseGradient
from nearstep.torch.state import ParameterState
from nearstep.updater.rounding import Numbering

Arrays = Mapping[str, Any]
"""Arguments of a run by array: buffers, and pairs in the place of a compressed gradient."""

GradientOptions = Mapping[str, Any]
"""How gradients come, and where a copy of the parameters goes: arguments of every rule. And indices
of the elements, `NUMBERING`."""

NUMBERING = "numbering"


class RunKey(NamedTuple):
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

    key: RunKey
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


Start = Callable[[Arrays, RunKey, GradientOptions], Run]
"""Starts the rule of a group."""


class StepInputs(NamedTuple):
    """What a step is made of.

    Attributes
    ----------
    updates : what it updates, as often as a parameter is in its group.
    sends : arrays that are sent to the device first.
    scaling
    start
    started : each run of a rule is added to it as it is started.
    fetches : what the rules leave goes to the host; if not, it stays where it is.
    """

    updates: Mapping[Extent, Update]
    sends: Sends
    scaling: Scaling
    start: Start
    started: list[Run]
    fetches: bool


def starter(
    start: Start, arrays: Arrays, key: RunKey, factor: float, numbering: Numbering
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


def result_array(key: RunKey) -> str:
    """Array of a run that the host fetches."""
    return "p" if key.copy_format is None else copy_array(key.copy_format)
