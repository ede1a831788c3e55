"""A device shared by optimizers, and parameters that are on it before they have one."""

from __future__ import annotations

import weakref
from typing import Any, Self

from torch import Tensor

from nearstep.device import Device, open_device
from nearstep.errors import ArgumentError
from nearstep.placement import Placement
from nearstep.torch.layout import Layout
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.traffic import Traffic
from nearstep.updater.device import KernelDevice


class SharedDevice:
    """The right to use a device; one that was opened by its name is closed with the last lease."""

    def __init__(self, device: Device) -> None:
        if not isinstance(device, KernelDevice):
            raise ArgumentError(
                f"device must be the name of a device with an update kernel, or one that is open, "
                f"not {device!r}"
            )
        self.device = device

    @classmethod
    def of(cls, device: str | Device) -> Self:
        """Open the device named `device`, or use an open one."""
        if not isinstance(device, str):
            return cls(device)
        opened = open_device(device)
        try:
            lease = cls(opened)
        except BaseException:
            opened.close()
            raise
        weakref.finalize(lease, opened.close)
        return lease


class UnclaimedParameter:
    """A parameter's place on a device, which an optimizer there may adopt.

    The memory goes back to the device with the `DeviceParameter`.

    Parameters
    ----------
    resident : alone in its segment, with the master and nothing else.
    lease : of the device, which stays open as long as the parameter has its place.
    """

    def __init__(self, resident: DeviceParameter, lease: SharedDevice) -> None:
        self.resident = resident
        self._lease = lease
        self._adopter: weakref.ref[Any] | None = None
        weakref.finalize(resident, _free, resident.extent.segment, lease)

    @property
    def device(self) -> Device:
        """Where it is."""
        return self._lease.device

    @property
    def is_adopted(self) -> bool:
        """Whether an optimizer has it."""
        return self._adopter is not None and self._adopter() is not None

    def is_free(self, device: Device) -> bool:
        """Whether an optimizer on a device may adopt it: it is there, and no other one has it."""
        return self.device is device and not self.is_adopted

    def adopt(
        self,
        optimizer: object,
        placement: Placement,
        label: str,
        layout: Layout,
        traffic: Traffic,
        *,
        narrow: bool = False,
    ) -> DeviceParameter:
        """Make it an optimizer's; its memory is part of a placement until that is freed."""
        extent = self.resident.extent
        placement.adopt(extent.segment, extent.end)
        self.resident.move_in(label, layout, traffic, narrow=narrow)
        self._adopter = weakref.ref(optimizer)
        weakref.finalize(optimizer, self.resident.move_out)
        return self.resident


def unclaimed(parameter: Tensor) -> UnclaimedParameter | None:
    """What is known of a parameter that `nearstep.offload.init` has sent, and that no engine looks
    after yet."""
    found: UnclaimedParameter | None = getattr(parameter, "_waiting", None)
    return found


def _free(segment: Any, _: SharedDevice) -> None:
    segment.free()
