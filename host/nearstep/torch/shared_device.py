"""A device shared by optimizers."""

from __future__ import annotations

import weakref
from typing import Self

from nearstep.device import Device, open_device
from nearstep.errors import ArgumentError
from nearstep.updater.device import KernelDevice


class SharedDevice:
    """The right to use a device; one that was opened by its name is closed with the last lease.

    Attributes
    ----------
    device : the `KernelDevice`.
    """

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
