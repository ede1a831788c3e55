"""Small parameters that are neighbours on the device, updated as one.

The work of a step for each parameter takes longer than the update of a small parameter. So
parameters that a step has updated with equal keys are grouped in a bucket with a buffer for all.
The next step checks each parameter, then copies, compares and counts with one call for all. If
anything has changed, each parameter is prepared alone. The check raises nothing and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearstep.placement import Extent
from nearstep.torch import convert
from nearstep.torch.checks import is_plain
from nearstep.torch.exchange import (
    SMALL_ELEMENTS,
    Results,
    Sending,
    Sends,
    Target,
)
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.state import ParameterState
from nearstep.torch.traffic import Traffic

_FP32 = torch.float32


def fits(resident: DeviceParameter, state: ParameterState) -> bool:
    """Return whether a parameter may be in a bucket: fp32, with all of its state on the device."""
    left, layout = resident.last_seen, resident.layout
    return (
        resident.is_small
        and is_plain(resident.parameter)
        and isinstance(left, np.ndarray)
        and left.dtype == np.float32
        and 0 < left.size == resident.extent.count
        and not resident.keeps_master
        and resident.copy_format is None
        and state.store is resident
        and state.is_on_device
        and (not layout.counts or is_count(state.step))
    )


class FlatBucket:
    """Parameters of one group whose extents are neighbours; moves data as a `DeviceParameter` does.

    Parameters
    ----------
    positions : positions of the parameters in their group.
    residents, states : each `fits`, and its extent joins the one before.

    Attributes
    ----------
    extent : range from the first to the last parameter, with the padding between.
    steps : step counts, fp32 scalars; empty if the rule counts no steps.
    """

    def __init__(
        self,
        group: int,
        positions: Sequence[int],
        residents: Sequence[DeviceParameter],
        states: Sequence[ParameterState],
        traffic: Traffic,
    ) -> None:
        self.group = group
        self.positions = positions
        self._residents = residents
        self._states = states
        self._traffic = traffic
        first, last = residents[0].extent, residents[-1].extent
        span = last.start + last.count - first.start
        self.parameters = [each.parameter for each in residents]
        self.extent = Extent(first.segment, first.start, span)
        self.elements = sum(each.extent.count for each in residents)
        self.steps = [each.step for each in self._states] if residents[0].layout.counts else []
        self._keys = list(chain.from_iterable(map(dict.__iter__, self._states)))
        self._values = list(chain.from_iterable(map(dict.values, self._states)))
        self._held = states[0].held
        self._shapes = [each.shape for each in self.parameters]
        # The results of the last step, and a buffer to compare with them or to send; padding is 0.
        self._left, self._room = np.zeros(span, np.float32), np.zeros(span, np.float32)
        is_padding = np.ones(span, np.bool_)
        ranges = []
        for resident in residents:
            at = resident.extent.start - first.start
            ranges.append(slice(at, at + resident.extent.count))
            self._left[ranges[-1]] = resident.last_seen
            is_padding[ranges[-1]] = False
        self._padding = np.flatnonzero(is_padding)
        self._lefts = [self._left[each] for each in ranges]
        self._left_views = self._views_of(self._left, ranges)
        self._room_views = self._views_of(self._room, ranges)
        self._adopt()
        self._changed = False
        self._is_lent = False

    def _views_of(self, array: NDArray[np.float32], ranges: Iterable[slice]) -> list[Tensor]:
        with torch.inference_mode(mode=False):  # what is made in it cannot be written outside
            flat = torch.from_numpy(array)
            return [flat[at].view(shape) for at, shape in zip(ranges, self._shapes, strict=True)]

    def _adopt(self) -> None:
        for resident, left in zip(self._residents, self._lefts, strict=True):
            resident.last_seen = left

    @property
    def first(self) -> tuple[DeviceParameter, ParameterState]:
        """The first parameter and its state, which stand for all."""
        return self._residents[0], self._states[0]

    def gradients(self, states: Mapping[Tensor, Any]) -> list[Tensor] | None:
        """Return the gradients of the parameters; None if each parameter must be prepared alone.

        Only the values of parameters, gradients and step counts may differ from the last step; step
        counts must be equal.
        """
        gradients: list[Tensor] = []
        for parameter, shape in zip(self.parameters, self._shapes, strict=True):
            gradient = parameter.grad
            if (
                gradient is None
                or not is_plain(parameter)
                or not is_plain(gradient)
                or not parameter.shape == shape == gradient.shape
                or parameter.is_neg()
                or parameter.is_inference()  # numpy may write it, and torch may not
            ):
                return None
            gradients.append(gradient)
        held = map(is_, map(states.get, self.parameters), self._states)
        left = (each.last_seen for each in self._residents)
        keeps = all(held) and all(map(is_, left, self._lefts))
        return gradients if keeps and self._is_on_device and self._is_even else None

    @property
    def _is_on_device(self) -> bool:
        """Whether no state was fetched or replaced."""
        states = self._states
        return (
            sum(map(len, states)) == len(self._values)
            and all(map(is_, chain.from_iterable(map(dict.values, states)), self._values))
            and list(chain.from_iterable(map(dict.__iter__, states))) == self._keys
        )

    @property
    def _is_even(self) -> bool:
        """Whether all step counts are equal."""
        if not self.steps:
            return True
        if not all(map(is_count, self.steps)):
            return False
        counts = torch.stack(tuple(self.steps)).numpy()
        return bool((counts == counts[0]).all())

    def has(self, keys: Collection[str]) -> bool:
        """Return whether these moments are on the device."""
        return self._held.issuperset(keys)

    def send(self, gradients: list[Tensor], sends: Sends, *, negated: bool) -> None:
        """Send the gradients, negated if `negated`, and parameters that the host changed.

        As `DeviceParameter.send_master_if_changed` and `DeviceParameter.send_gradient`.
        """
        torch._foreach_copy_(self._room_views, self.parameters)
        if not np.array_equal(self._room.view(np.uint32), self._left.view(np.uint32)):
            self._changed = True
            for resident in self._residents:
                resident.send_master_if_changed(sends)
        torch._foreach_copy_(self._room_views, gradients)
        array = convert.negated(self._room) if negated else self._room
        if not self.is_small and self.extent.lend("g", array):
            self._is_lent = True
        else:
            sends.send(Sending(self.extent, "g", array))
        self._traffic.gradients_down += 4 * self.elements

    @property
    def is_small(self) -> bool:
        """Whether the bucket is copied together with its neighbours."""
        return self.extent.count < SMALL_ELEMENTS

    is_fetched = True
    """Whether a step fetches the parameters."""

    def target(self, *, direct: bool, fingerprints: bool) -> Target:
        """Return memory for the result of a step."""
        return Target(self._left if direct else np.empty(self.extent.count, np.float32))

    def take_result(self, results: Results) -> None:
        """Update the parameters from the result of a step."""
        results.take(self.extent, self._left)
        self._left[self._padding] = 0.0
        torch._foreach_copy_(self.parameters, self._left_views)
        if self._changed:
            self._adopt()
        self._traffic.parameters_up += 4 * self.elements

    def count_step(self) -> None:
        """Increment the step counts."""
        if self.steps:  # without alpha torch would make each its own tensor of 1
            torch._foreach_add_(self.steps, torch.ones((), device="cpu"), alpha=1)

    def end_loan(self) -> None:
        """End the loans of the step, as `DeviceParameter.end_loan`."""
        if self._is_lent:
            self._is_lent = False
            self.extent.end_loan("g")
        if self._changed:
            self._changed = False
            for resident in self._residents:
                resident.end_loan()

    def interrupt(self, name: str) -> None:
        """Record that the error called `name` interrupted a step of these parameters."""
        for resident in self._residents:
            resident.interrupt(name)


ReadyBucket = tuple[FlatBucket, list[Tensor]]
"""A bucket that a step can use, and the gradients."""


def is_count(step: Any) -> bool:
    """Return whether `step` is a step count as in states: an fp32 scalar tensor on the host, not
    made in inference mode."""
    is_scalar = type(step) is Tensor and step.dtype is _FP32 and not step.dim() and step.is_cpu
    return is_scalar and not step.is_inference()
