"""Brings LiteDRAM's memory controllers up."""

from __future__ import annotations

import numpy as np

from nearstep.serial.controllers import BoardAccess
from nearstep.serial.errors import MemoryNotReadyError

TESTED_BYTES = 64
"""At each end of memory, and at every power of two between."""

SEED = 20


def initialise_sdr(board: BoardAccess) -> None:
    """Do what the manifest says that an SDRAM needs, and see that it holds what is written.

    Raises
    ------
    MemoryNotReadyError : it does not. With the first address, and what is there.
    """
    for step in board.manifest.controller_steps:
        board.controller.write_register(step.address, step.value)
        if step.cycles:
            board.backend.advance(step.cycles)
    check_memory(board)


def check_memory(board: BoardAccess) -> None:
    """Write parts of memory, each of them other bytes, and then read them all.

    They lie where a wrong bit of an address, or of a row, makes one overwrite another.

    Raises
    ------
    MemoryNotReadyError : with the first address that reads otherwise, and what is there.
    """
    limit = board.manifest.memory_bytes
    places = [0, *(1 << bit for bit in range(TESTED_BYTES.bit_length(), limit.bit_length() - 1))]
    places.append(limit - TESTED_BYTES)
    random = np.random.default_rng(SEED)
    written = [random.integers(0, 256, TESTED_BYTES, np.uint8) for _ in places]
    for place, data in zip(places, written, strict=True):
        board.backend.write_memory(place, data)
    read = np.empty(TESTED_BYTES, np.uint8)
    for place, data in zip(places, written, strict=True):
        board.backend.read_memory(place, read)
        for at in np.flatnonzero(read != data)[:1]:
            raise MemoryNotReadyError(
                f"memory of {board.manifest.board} does not hold what is written to it: at "
                f"{place + int(at):#x} there must be {data[at]:#x}, not {read[at]:#x}"
            )
