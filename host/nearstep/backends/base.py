"""The interface of a device for its driver: the transport's primitives.

The same driver runs on every backend. Time is device time: a backend never uses the wall clock to
decide whether a wait has failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import WaitTimeoutError

FILLED_BYTES = 1 << 20
"""Most bytes of one write of `Backend.fill_memory`."""


Floats = NDArray[np.float32]
TakeLargest = Callable[
    [Floats, Floats | None, Floats | None, float], tuple[NDArray[np.intp], Floats]
]
"""Takes the elements of largest magnitude from an array, like
`nearstep.torch.topk.take_largest`.
"""


@dataclass(frozen=True, kw_only=True)
class Poll:
    """A condition on one register: `read & mask == value`."""

    address: int
    mask: int
    value: int

    def holds(self, word: int) -> bool:
        """Whether a register that reads `word` meets the condition."""
        return (word & self.mask) == self.value


class Completion(ABC):
    """Work submitted to a device, finished or not.

    Attributes
    ----------
    backend : device whose time must pass for the work to end; None if it has ended, or there is no
        clock.
    is_background : whether, without a clock, the work is waited for only when nothing else is in
        flight.
    """

    backend: Backend | None = None
    is_background: bool = False

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the work has completed or failed; reads the device without a wait."""

    @property
    @abstractmethod
    def error(self) -> Exception | None:
        """The error if the work failed, else None."""

    @property
    def done(self) -> bool:
        """Whether the work has completed without error; reads the device without a wait."""
        return self.ended and self.error is None

    @property
    @abstractmethod
    def cycles(self) -> int | None:
        """Device cycles from start to end of the work; None before the end, or without a clock."""

    @property
    def polls(self) -> Sequence[Poll]:
        """Conditions of which one holds when the work may have ended; empty if the backend detects
        the end itself."""
        return ()

    @property
    def bound(self) -> int | None:
        """Sufficient device cycles for the work; None if the backend detects a hang itself."""
        return None

    @abstractmethod
    def wait(self, max_cycles: int | None = None) -> Self:
        """Wait in device time until the work has ended, and return self.

        Parameters
        ----------
        max_cycles : bound in device cycles (steps, on a device without a clock). None: `bound`.

        Raises
        ------
        ArgumentError : `max_cycles` is no integer, or negative.
        WaitTimeoutError : the work did not end in time, and continues.
        NearstepError : the work failed with `error`.
        """

    def abort(self, max_cycles: int | None = None) -> None:
        """Abort the work and discard its results; wait if the work cannot be aborted."""
        try:
            self.wait(max_cycles)
        except Exception:
            if not self.ended:
                raise


class Ended(Completion):
    """Work that had ended when the submitting call returned, without error unless a subclass has
    one.
    """

    def __init__(self, cycles: int | None = None) -> None:
        self._cycles = cycles

    @property
    def ended(self) -> bool:
        return True

    @property
    def error(self) -> Exception | None:
        return None

    @property
    def cycles(self) -> int | None:
        return self._cycles

    def wait(self, max_cycles: int | None = None) -> Self:
        return self


class ChainedCompletion(Completion):
    """A completion with an action after its successful end.

    Parameters
    ----------
    after : called once, by the wait.
    """

    def __init__(self, first: Completion, after: Callable[[], None]) -> None:
        self._first = first
        self._after: Callable[[], None] | None = after

    @property
    def backend(self) -> Backend | None:  # type: ignore[override]
        return self._first.backend

    @property
    def ended(self) -> bool:
        return self._first.ended

    @property
    def error(self) -> Exception | None:
        return self._first.error

    @property
    def cycles(self) -> int | None:
        return self._first.cycles

    @property
    def polls(self) -> Sequence[Poll]:
        return self._first.polls

    @property
    def bound(self) -> int | None:
        return self._first.bound

    def wait(self, max_cycles: int | None = None) -> Self:
        self._first.wait(max_cycles)
        after, self._after = self._after, None
        if after is not None:
            after()
        return self

    def abort(self, max_cycles: int | None = None) -> None:
        self._after = None
        self._first.abort(max_cycles)


class Backend(ABC):
    """One opened device: registers, memory and device time.

    Addresses of registers and of memory are in bytes; they may be one space or two. Registers are
    32 bits wide. The runtime, not the backend, checks accesses against buffers.

    Attributes
    ----------
    family : device family, such as `axdimm`.
    config : configuration of the device, for the driver of its family.
    capacity_bytes : size of the device memory.
    capacity_options : options of the device's name that determine the size, for errors; may be
        empty.
    drive_places : files or block devices of the drives behind the device, one for each region.
    compares_memory : whether `memory_holds` is supported; never outside of this process.
    is_host_memory : whether arrays are in memory of this process (`host_view`, `replace_memory`).
    take_largest : compiled function of a backend that selects elements of host arrays faster than
        numpy; used instead of the host's own.
    """

    family: str
    config: object
    capacity_bytes: int
    capacity_options: str = ""
    drive_places: Sequence[str] = ()
    compares_memory: bool = False
    is_host_memory: bool = False

    @property
    def take_largest(self) -> TakeLargest | None:
        return None

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        """Address and bytes of each memory region for arrays: one for each channel.

        No array spans two regions.
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
        BusError : the device answered with an error response.
        """

    @abstractmethod
    def write_register(self, address: int, value: int) -> None:
        """Write one 32-bit register.

        Raises
        ------
        BusError : the device answered with an error response (unmapped, read-only, refused while
            busy).
        """

    def write_registers(self, words: Iterable[tuple[int, int]]) -> None:
        """Write words at their addresses, in order; raises as `write_register`."""
        for address, value in words:
            self.write_register(address, value)

    @abstractmethod
    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        """Copy device memory from `address` into the contiguous array `out`."""

    @abstractmethod
    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy the contiguous array `data` to device memory at `address`."""

    def fill_memory(self, address: int, nbytes: int, element: NDArray[np.uint8]) -> None:
        """Fill `nbytes` of device memory, a multiple of the size of `element`, with its bytes."""
        some = np.tile(element, max(1, min(nbytes, FILLED_BYTES) // element.size))
        for at in range(0, nbytes, some.size):
            self.write_memory(address + at, some[: nbytes - at])

    def memory_holds(self, address: int, data: NDArray[np.uint8]) -> bool | None:
        """Whether device memory at `address` is equal to the contiguous array `data`.

        None if unknown without reading the memory, as always without `compares_memory`.
        """
        return None

    def lend_memory(self, address: int, data: NDArray[np.uint8], *, writes: bool) -> bool:
        """Let the kernel read, and if `writes` write, the contiguous array `data` instead of device
        memory until `end_loan`.

        The owner must not change the array until then. On every device whose memory is not memory
        of this process, the call does nothing and returns False; the array must then be copied.
        """
        return False

    def lend_patterns(
        self, address: int, data: NDArray[np.uint8], form: str, *, writes: bool
    ) -> bool:
        """`lend_memory` of patterns of 16 bits in the place of float32: widened when they are read,
        rounded to `form`, `fp16` or `bf16`, once when they are written."""
        return False

    def end_loan(self, address: int) -> None:  # noqa: B027  nothing to do where nothing is lent
        """End a loan of `lend_memory`, if any.

        Memory contents are undefined afterwards.
        """

    def claim(self, address: int, nbytes: int) -> None:  # noqa: B027  most need not know
        """Note that [address, address + nbytes) has been allocated for an array."""

    def protect(self, address: int, nbytes: int) -> None:  # noqa: B027  most need not know
        """Note that [address, address + nbytes) belongs to no array."""

    def host_view(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a part of an array, or of what was lent in its place, without a copy; only with
        `is_host_memory`."""
        raise NotImplementedError

    def replace_memory(self, address: int, data: NDArray[np.uint8]) -> bool:
        """Make `data` the memory of the array at `address` instead of a copy; return whether that
        was done: with `is_host_memory`."""
        return False

    @abstractmethod
    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        """Wait in device time until any of `polls` holds.

        Raises
        ------
        WaitTimeoutError : None held within `max_cycles` device cycles (steps, on a backend without
            a clock).
        """

    def submit_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        """Begin `read_memory`; `out` must live, and not be accessed, until the end.

        Transfers progress while device time passes, in the order of submission. If transfers take
        no device time, the call returns after the transfer.
        """
        self.read_memory(address, out)
        return Ended()

    def submit_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        """Begin `write_memory`; `data` must live, and not change, until the end."""
        self.write_memory(address, data)
        return Ended()

    def advance(self, max_cycles: int, polls: Sequence[Poll] = ()) -> None:
        """Run the device until any of `polls` holds, a submitted transfer ends, or for `max_cycles`
        device cycles (steps, on a backend without a clock; fewer if no step would change anything).
        """
        try:
            self.wait(polls, max_cycles)
        except WaitTimeoutError:
            return

    @abstractmethod
    def reset(self) -> None:
        """Hard reset of the kernel and of its path to memory.

        No access of an earlier run takes effect after the reset. Memory contents are kept.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the device. Closing twice does nothing."""

    def transactions(self) -> Sequence[str]:
        """The last bus transactions, oldest first, for error reports; may be empty."""
        return ()
