"""What a device must offer to be driven: the transport's primitives.

The same driver runs on every backend. Time is device time: a backend never looks at the wall clock
to decide whether a wait has failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FILLED_BYTES = 1 << 20
"""Bytes of one write of :meth:`Backend.fill_memory`, at most."""


@dataclass(frozen=True, kw_only=True)
class Poll:
    """A condition on one register: ``read & mask == value``."""

    address: int
    mask: int
    value: int

    def holds(self, word: int) -> bool:
        """Whether a register that reads ``word`` meets the condition."""
        return (word & self.mask) == self.value


class Backend(ABC):
    """One opened device: registers, memory and device time.

    Addresses of registers and of memory are in bytes; they may be one space or two. Registers are
    32 bits wide. Memory is not checked here against buffers: that is the runtime's work.

    Attributes
    ----------
    family: str
        Device family, such as ``axdimm``.
    config: object
        Configuration of the device behind this backend, as the driver of the family knows it.
    capacity_bytes: int
        Size of the device memory.
    capacity_options: str
        Options of the device's name that decide it, for errors; empty if none does.
    compares_memory: bool
        Whether :meth:`memory_holds` can tell, as no device does that is outside this process.
    """

    family: str
    config: object
    capacity_bytes: int
    capacity_options: str = ""
    compares_memory: bool = False

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        """Address and bytes of each piece of memory that arrays can lie in: one for each channel.

        No array crosses from one to another.
        """
        return ((0, self.capacity_bytes),)

    @property
    @abstractmethod
    def cycles(self) -> int | None:
        """Device cycle now; None when the backend has no clock."""

    @abstractmethod
    def read_register(self, address: int) -> int:
        """Read one 32-bit register.

        Raises
        ------
        BusError
            The device answered with an error response.
        """

    @abstractmethod
    def write_register(self, address: int, value: int) -> None:
        """Write one 32-bit register.

        Raises
        ------
        BusError
            The device answered with an error response (unmapped, read-only, refused while busy).
        """

    @abstractmethod
    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        """Copy device memory from ``address`` into the contiguous array ``out``."""

    @abstractmethod
    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy the contiguous array ``data`` to device memory at ``address``."""

    def fill_memory(self, address: int, nbytes: int, element: NDArray[np.uint8]) -> None:
        """Write the bytes of ``element`` again and again to device memory: ``nbytes``, a multiple
        of its size."""
        some = np.tile(element, max(1, min(nbytes, FILLED_BYTES) // element.size))
        for at in range(0, nbytes, some.size):
            self.write_memory(address + at, some[: nbytes - at])

    def memory_holds(self, address: int, data: NDArray[np.uint8]) -> bool | None:
        """Whether device memory at ``address`` is equal to the contiguous array ``data``. None:
        it cannot be told now without reading it; never, unless ``compares_memory``."""
        return None

    def lend_memory(self, address: int, data: NDArray[np.uint8], *, writes: bool) -> bool:
        """Have the kernel read the contiguous array ``data`` in the place of device memory, as if
        it had been written there, until :meth:`end_loan`; if it ``writes``, that goes to ``data``,
        too. The owner does not change it until then. False: nothing was done, as on every device
        whose memory is no memory of this process; it has to be copied."""
        return False

    def end_loan(self, address: int) -> None:  # noqa: B027  nothing to do where nothing is lent
        """End a loan of :meth:`lend_memory`, if there is one. What the memory holds is undefined
        then."""

    @abstractmethod
    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        """Let the device run until any of ``polls`` holds.

        Raises
        ------
        WaitTimeoutError
            None held within ``max_cycles`` device cycles (steps, on a backend without a clock).
        """

    @abstractmethod
    def reset(self) -> None:
        """Hard reset of the kernel and of its path to memory.

        No access of a run from before the reset is seen after it. Memory keeps its contents.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the device back. Closing twice does nothing."""

    def transactions(self) -> Sequence[str]:
        """The last bus transactions, oldest first, for error reports; empty if none are kept."""
        return ()
