"""The controller of a card: a drive, its memory, its rules."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from nearstep.device import open_device
from nearstep.errors import ArgumentError, MismatchError
from nearstep.linux.nvme.admin import AdminCommands
from nearstep.linux.nvme.controller import NvmeController
from nearstep.linux.nvme.memory import MemoryNamespace
from nearstep.linux.nvme.namespace import DriveNamespace
from nearstep.linux.nvme.programs import ProgramNamespace
from nearstep.updater.updating import UpdatingDevice

DRIVE, MEMORY, PROGRAMS = 1, 2, 3
"""NSIDs."""

IN_PYTHON, CONTROLLERS = "python", "nearstep.controllers"
"""Where queues are by default; group of entry points of packages that have them elsewhere."""


def controller_kind(queues: str) -> type[NvmeController]:
    """Return the class of controllers whose queues are in Python, or where a package has them.

    Raises
    ------
    ArgumentError : no installed package has them there.
    """
    found = {entry.name: entry for entry in entry_points(group=CONTROLLERS)}
    if queues == IN_PYTHON:
        return NvmeController
    if queues not in found:
        raise ArgumentError(f"queues must be one of {', '.join([IN_PYTHON, *found])}, not {queues}")
    kind: type[NvmeController] = found[queues].load()
    return kind


def open_controller(
    url: str,
    drive: Path,
    memory_bytes: int,
    serial: str = "1",
    kind: type[NvmeController] = NvmeController,
) -> NvmeController:
    """Open a card, with a controller in front of it, which closes the card.

    Parameters
    ----------
    url : of a device with kernels, such as `golden:smartssd`; of one channel.
    drive : file of the NVM namespace, of whole blocks of 4 KiB.
    memory_bytes : of the card's memory that is the SLM namespace.
    serial : as of `NvmeController`.
    kind : of the controller.

    Raises
    ------
    MismatchError : the device has no kernel, or several channels.
    ArgumentError : a size or the serial number is invalid.
    OutOfDeviceMemoryError : the card has less memory.
    UrlError, OptionError : the name is invalid.
    OSError : the file cannot be opened.
    """
    card = open_device(url)
    drive_space = None
    try:
        if not isinstance(card, UpdatingDevice) or card.channel_count != 1:
            raise MismatchError("device", "with a kernel, and one channel", url)
        memory = MemoryNamespace(card, memory_bytes)
        drive_space = DriveNamespace(drive)
        namespaces = (drive_space, memory, ProgramNamespace(memory))
        memory.see(namespaces)
        return kind(namespaces, AdminCommands, serial)
    except BaseException:
        card.close()
        if drive_space is not None:
            drive_space.close()
        raise
