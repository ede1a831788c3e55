"""`sim:axdimm`: the RTL of the kernel, Verilated, with an emulated memory, in this process."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.axdimm.options import VerilatedOptions
from nearstep_sim.updater.library import library, whole_kernel_library
from nearstep_sim.updater.shell import ShellBackend, ShellOptions


class VerilatedBackend(ShellBackend):
    """A kernel of an AXDIMM. Memory is copied directly, without device time."""

    family = "axdimm"
    source = "updater/kernel.cpp"

    def __init__(self, options: VerilatedOptions) -> None:
        self.config = options.config()
        path = (
            partial(whole_kernel_library, self.config)
            if options.top == "whole"
            else partial(library, self.config, trace=options.trace is not None)
        )
        super().__init__(path, options, options.capacity_bytes)

    def _open(self, options: ShellOptions) -> int:
        return int(self._lib.device_open(ctypes.byref(options)))

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        self._memory.read(address, out)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self._memory.write(address, data)
