"""What brings the memory controller of a board up, before its memory can be used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from nearstep.backends.base import Backend
from nearstep.registers import RegisterBus
from nearstep.serial.errors import FirmwareError
from nearstep_spec.serial.manifest import Manifest


class BoardAccess(Protocol):
    """What the initialisation of a memory controller has of a board.

    Attributes
    ----------
    controller : registers of `Space.CONTROLLER`.
    backend : memory, and device cycles.
    """

    @property
    def manifest(self) -> Manifest: ...

    @property
    def controller(self) -> RegisterBus: ...

    @property
    def backend(self) -> Backend: ...


Initialise = Callable[[BoardAccess], None]
"""Brings a controller up; raises `MemoryNotReadyError` if it cannot. The board is told afterwards,
by `memory.ready`."""

NONE = "none"

CONTROLLERS: Mapping[str, str] = MappingProxyType(
    {
        "litedram-sdr": "nearstep.serial.litedram:initialise_sdr",
        "litedram-ddr3": "nearstep.serial.litedram:initialise_ddr3",
    }
)
"""`module:function`, an `Initialise`, of each controller by its name in the manifest. Nothing is to
be done for `NONE`."""


def initialiser(name: str, made_by: str) -> Initialise | None:
    """What brings the controller `name` up; None if nothing has to be done.

    Raises
    ------
    FirmwareError : this version of nearstep does not know it.
    """
    if name == NONE:
        return None
    if name not in CONTROLLERS:
        known = f"one of {', '.join((NONE, *CONTROLLERS))}"
        raise FirmwareError(f"memory controller of {made_by}", known, repr(name))
    module, _, function = CONTROLLERS[name].partition(":")
    found: Initialise = getattr(importlib.import_module(module), function)
    return found
