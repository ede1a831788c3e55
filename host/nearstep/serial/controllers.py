"""Initialisation of the memory controllers of boards."""

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
    """A board during the initialisation of its memory controller.

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
"""Initialises a controller; raises `MemoryNotReadyError` if that fails. Afterwards `memory.ready`
is set on the board."""

NONE = "none"

CONTROLLERS: Mapping[str, str] = MappingProxyType(
    {
        "litedram-sdr": "nearstep.serial.litedram:initialise_sdr",
        "litedram-ddr3": "nearstep.serial.litedram:initialise_ddr3",
    }
)
"""`module:function`, an `Initialise`, of each controller by its name in the manifest; there is none
for `NONE`."""


def initialiser(name: str, made_by: str) -> Initialise | None:
    """Find the initialisation of the controller `name`; None if it needs none.

    Raises
    ------
    FirmwareError : this version of nearstep does not know the controller.
    """
    if name == NONE:
        return None
    if name not in CONTROLLERS:
        known = f"one of {', '.join((NONE, *CONTROLLERS))}"
        raise FirmwareError(f"memory controller of {made_by}", known, repr(name))
    module, _, function = CONTROLLERS[name].partition(":")
    found: Initialise = getattr(importlib.import_module(module), function)
    return found
