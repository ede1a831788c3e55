"""``sim:axdimm``: the RTL of the kernel, Verilated, with an emulated memory, in this process."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import UrlError
from nearstep_sim.device.card import CardBackend
from nearstep_sim.device.design import library
from nearstep_sim.device.dimm import DimmBackend
from nearstep_sim.device.options import (
    SIM,
    DimmOptions,
    VerilatedCardOptions,
    VerilatedOptions,
    VerilatedPoolOptions,
)
from nearstep_sim.device.pool import PoolBackend
from nearstep_sim.device.shell import ShellBackend, ShellOptions

DEVICES = SIM
"""What this backend offers."""


def open_device(
    family: str, options: dict[str, str]
) -> VerilatedBackend | DimmBackend | CardBackend | PoolBackend:
    """Open ``sim:<family>``. The first time that a configuration is opened its library is built.

    Which options an AXDIMM has depends on ``memory``.

    Raises
    ------
    UrlError
        There is no RTL of the family.
    OptionError
    nearstep_sim.build.BuildError
    """
    if family not in DEVICES:
        raise UrlError(f"sim:{family}", f"there is no family {family!r}", sorted(DEVICES))
    parsed = DEVICES[family].parse(options)
    if isinstance(parsed, VerilatedCardOptions):
        return CardBackend(parsed)
    if isinstance(parsed, VerilatedPoolOptions):
        return PoolBackend(parsed)
    if isinstance(parsed, DimmOptions):
        return DimmBackend(parsed)
    assert isinstance(parsed, VerilatedOptions)
    return VerilatedBackend(parsed)


class VerilatedBackend(ShellBackend):
    """A kernel of an AXDIMM. Memory is copied behind its back, at once and in no device time.

    Parameters
    ----------
    options: VerilatedOptions
    """

    family = "axdimm"

    def __init__(self, options: VerilatedOptions) -> None:
        self.config = options.config()
        path = partial(library, self.config, trace=options.trace is not None)
        super().__init__(path, options, options.capacity_bytes)

    def _open(self, options: ShellOptions) -> int:
        self._lib.device_open.restype = ctypes.c_void_p
        return int(self._lib.device_open(ctypes.byref(options)))

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        self._memory.read(address, out)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self._memory.write(address, data)
