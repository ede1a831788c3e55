"""A function of PCI that Linux's driver vfio-pci has, by the ioctls of VFIO."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import ExitStack
from enum import IntEnum
from pathlib import Path

from nearstep.errors import MismatchError

NODES = Path("/dev/vfio")
DRIVER = "vfio-pci"
VERSION = 0
TYPE1, NO_IOMMU = 3, 8
"""VFIO_TYPE1v2_IOMMU, VFIO_NOIOMMU_IOMMU."""

VIABLE, MAPPABLE = 1 << 0, 1 << 2
"""Flags of a group, and of a region."""

GROUP = struct.Struct("=II")
REGION = struct.Struct("=IIIIQQ")
EVENTS = struct.Struct("=IIIII")
"""`struct vfio_group_status`, `vfio_region_info` and `vfio_irq_set`; eventfds are behind it."""

CONFIG_REGION, MSIX = 7, 2
TRIGGERS_EVENT = 1 << 2 | 1 << 5
COMMAND, MEMORY_SPACE, BUS_MASTER = 0x04, 1 << 1, 1 << 2


class Call(IntEnum):
    """Requests of ioctl, by their names without VFIO."""

    GET_API_VERSION = 0x3B64
    SET_IOMMU = 0x3B66
    GROUP_GET_STATUS = 0x3B67
    GROUP_SET_CONTAINER = 0x3B68
    GROUP_GET_DEVICE_FD = 0x3B6A
    DEVICE_GET_REGION_INFO = 0x3B6C
    DEVICE_SET_IRQS = 0x3B6E
    DEVICE_RESET = 0x3B6F


class VfioFunction:
    """A function; its memory space and bus mastering are enabled.

    Without an IOMMU it is in a group that Linux has made up, if it was allowed to.

    Parameters
    ----------
    folder : of the function in /sys.

    Attributes
    ----------
    file : descriptor of the device, in which the regions are.

    Raises
    ------
    MismatchError : vfio-pci does not have the function, or not all of its group.
    OSError : Linux refuses; `filename` is the node or the request.
    """

    def __init__(self, folder: Path) -> None:
        group = folder / "iommu_group"
        if not group.exists():
            wanted = "one of an IOMMU, or of vfio's enable_unsafe_noiommu_mode"
            raise MismatchError(f"IOMMU group of {folder.name}", wanted, "none")
        number = group.resolve().name
        made_up = NODES / f"noiommu-{number}"
        path = made_up if made_up.exists() else NODES / number
        with ExitStack() as opened:
            container = self._opened(opened, NODES / "vfio")
            version = _call(container, Call.GET_API_VERSION)
            if version != VERSION:
                raise MismatchError("version of VFIO", VERSION, version)
            file = self._opened(opened, path)
            status = bytearray(GROUP.pack(GROUP.size, 0))
            _call(file, Call.GROUP_GET_STATUS, status)
            if not GROUP.unpack(status)[1] & VIABLE:
                others = f"{DRIVER}, or no driver, for all functions"
                raise MismatchError(f"drivers of IOMMU group {number}", others, "of a kernel's")
            _call(file, Call.GROUP_SET_CONTAINER, bytearray(struct.pack("=i", container)))
            _call(container, Call.SET_IOMMU, NO_IOMMU if path == made_up else TYPE1)
            name = bytearray(folder.name.encode() + b"\0")
            self.file = _call(file, Call.GROUP_GET_DEVICE_FD, name)
            opened.callback(os.close, self.file)
            _, at, _ = self.region(CONFIG_REGION)
            command = int.from_bytes(os.pread(self.file, 2, at + COMMAND), "little")
            command |= MEMORY_SPACE | BUS_MASTER
            os.pwrite(self.file, command.to_bytes(2, "little"), at + COMMAND)
            self._open = opened.pop_all()

    @staticmethod
    def _opened(opened: ExitStack, path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, file)
        return file

    def region(self, index: int) -> tuple[int, int, bool]:
        """Bytes of a region, where it begins in `file`, and whether it can be mapped."""
        info = bytearray(REGION.pack(REGION.size, 0, index, 0, 0, 0))
        _call(self.file, Call.DEVICE_GET_REGION_INFO, info)
        _, flags, _, _, nbytes, at = REGION.unpack(info)
        return nbytes, at, bool(flags & MAPPABLE)

    def listen(self, event: int) -> None:
        """Enable MSI-X, and let its vector 0 trigger an eventfd."""
        head = EVENTS.pack(EVENTS.size + 4, TRIGGERS_EVENT, MSIX, 0, 1)
        _call(self.file, Call.DEVICE_SET_IRQS, bytearray(head + struct.pack("=i", event)))

    def reset(self) -> None:
        """Reset the function; Linux restores its configuration space."""
        _call(self.file, Call.DEVICE_RESET)

    def close(self) -> None:
        """Close the descriptors; Linux disables the function behind the last one."""
        self._open.close()


def _call(file: int, request: Call, argument: bytearray | int = 0) -> int:
    try:
        return fcntl.ioctl(file, request, argument)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"VFIO_{request.name}") from None
