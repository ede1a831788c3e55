"""An SDRAM chip alone, for tests of its rules: `bench.cpp`."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.models.sdram.chip import CSdramInjection, SdramChip
from nearstep_sim.verilate.abi import load, structure
from nearstep_sim.verilate.build import compile_library
from nearstep_sim.verilate.harness import FaultRecord

SOURCE = Path(__file__).with_name("bench.cpp")
ALL_BANKS = 1 << 10
"""Bit of an address: a precharge of every bank, or an access that closes its row."""

CPins = structure("models/sdram/sdram.hpp", "SdramPins")


class Command(IntEnum):
    """RAS, CAS and WE, as levels of the pins."""

    MODE = 0
    REFRESH = 1
    PRECHARGE = 2
    ACTIVE = 3
    WRITE = 4
    READ = 5
    STOP = 6
    NOP = 7


class SdramBench:
    """A chip at a clock.

    Parameters
    ----------
    tck : clock, in picoseconds.

    Attributes
    ----------
    words : contents.
    """

    def __init__(self, chip: SdramChip, tck: int) -> None:
        size = 1 << (chip.row_bits + chip.column_bits + chip.bank_bits)
        self.words: NDArray[np.uint16] = np.zeros(size, np.uint16)
        self.tck = tck
        self._lib = lib = load(compile_library("sdram", [SOURCE]), SOURCE)
        timing, shape = chip.timing(tck), chip.shape()
        self._chip = lib.sdram_open(
            ctypes.byref(timing), ctypes.byref(shape), self.words.ctypes.data
        )

    def edge(
        self,
        command: Command,
        *,
        bank: int = 0,
        address: int = 0,
        data: int | None = None,
        mask: int = 0,
        since: int | None = None,
    ) -> None:
        """Run a clock edge with a command.

        Parameters
        ----------
        data : driven by the controller; None: high impedance.
        mask : masked bytes.
        since : picoseconds for which inputs have been stable; None: half a clock.
        """
        pins = CPins(
            cke=1,
            cs_n=0,
            ras_n=command >> 2 & 1,
            cas_n=command >> 1 & 1,
            we_n=command & 1,
            ba=bank,
            dm=mask,
            driven=data is not None,
            a=address,
            dq=data or 0,
        )
        self._lib.sdram_edge(
            self._chip, ctypes.byref(pins), self.tck // 2 if since is None else since
        )

    def idle(self, edges: int) -> None:
        """Run clock edges without a command."""
        self._lib.sdram_idle(self._chip, edges)

    def shows(self, after: int) -> int | None:
        """Sample data at the pins, picoseconds after the last edge; None if not driven."""
        word = self._lib.sdram_shows(self._chip, after)
        return None if word < 0 else int(word)

    def inject(self, **wrong: int) -> None:
        """Inject a fault, see `SdramInjection`."""
        self._lib.sdram_inject(self._chip, ctypes.byref(CSdramInjection(**wrong)))

    @property
    def fault(self) -> FaultRecord | None:
        """The first rule that was broken."""
        found = FaultRecord()
        return found if self._lib.sdram_fault(self._chip, ctypes.byref(found)) else None

    def close(self) -> None:
        """Free the model."""
        self._lib.sdram_close(self._chip)
