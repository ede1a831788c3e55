"""What a device must offer to be driven: the transport's primitives.

The same driver runs on every backend. Time is device time: a backend never looks at the wall clock
to decide whether a wait has failed.
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
"""Bytes of one write of `Backend.fill_memory`, at most."""


Floats = NDArray[np.float32]
TakeLargest = Callable[
    [Floats, Floats | None, Floats | None, float], tuple[NDArray[np.intp], Floats]
]
"""The elements of largest magnitude, taken from an array, as
`nearstep.torch.topk.take_largest` does."""


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
    """Something that a device was given, and perhaps still works on.

    Attributes
    ----------
    backend : whose time has to pass for it to end; None if it has ended, or there is no clock.
    is_background : without a clock, it is waited for when nothing else is under way.
    """

    backend: Backend | None = None
    is_background: bool = False

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether it has completed or failed. Looks at the device, does not wait."""

    @property
    @abstractmethod
    def error(self) -> Exception | None:
        """What it failed with, None while it has not."""

    @property
    def done(self) -> bool:
        """Whether it has completed without error. Looks at the device, does not wait."""
        return self.ended and self.error is None

    @property
    @abstractmethod
    def cycles(self) -> int | None:
        """Device cycles from its start to its end; None before that, or without a clock."""

    @property
    def polls(self) -> Sequence[Poll]:
        """One of these holds when it may have ended; empty where the backend sees it by itself."""
        return ()

    @property
    def bound(self) -> int | None:
        """Device cycles that are enough for it; None if the backend says so when it hangs."""
        return None

    @abstractmethod
    def wait(self, max_cycles: int | None = None) -> Self:
        """Let the device run until this has ended, and return self.

        Parameters
        ----------
        max_cycles : bound in device cycles (steps, on a device without a clock). None: `bound`.

        Raises
        ------
        ArgumentError : `max_cycles` is no integer, or negative.
        WaitTimeoutError : it did not end in time, and goes on.
        NearstepError : it failed: `error`.
        """

    def abort(self, max_cycles: int | None = None) -> None:
        """End it, whatever becomes of its results. What cannot be ended is waited for."""
        try:
            self.wait(max_cycles)
        except Exception:
            if not self.ended:
                raise


class Ended(Completion):
    """Something that had ended when the call that started it returned: without error, unless a
    kind of it says otherwise.

    Parameters
    ----------
    cycles : that it took.
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
    """What is done at the end of something that was begun, if that did not fail.

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
    32 bits wide. Memory is not checked here against buffers: that is the runtime's work.

    Attributes
    ----------
    family : device family, such as `axdimm`.
    config : configuration of the device behind this backend, as the driver of the family knows it.
    capacity_bytes : size of the device memory.
    capacity_options : options of the device's name that decide it, for errors; empty if none does.
    drive_places : files or block devices of the drives behind the device, one for each region.
    compares_memory : whether `memory_holds` can tell, as no device does that is outside this
        process.
    take_largest : code of a backend with compiled parts, which takes elements from arrays of the
        host faster than numpy does. The host uses it in the place of its own.
    """

    family: str
    config: object
    capacity_bytes: int
    capacity_options: str = ""
    drive_places: Sequence[str] = ()
    compares_memory: bool = False

    @property
    def take_largest(self) -> TakeLargest | None:
        return None

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
        """Write the bytes of `element` again and again to device memory: `nbytes`, a multiple
        of its size."""
        some = np.tile(element, max(1, min(nbytes, FILLED_BYTES) // element.size))
        for at in range(0, nbytes, some.size):
            self.write_memory(address + at, some[: nbytes - at])

    def memory_holds(self, address: int, data: NDArray[np.uint8]) -> bool | None:
        """Whether device memory at `address` is equal to the contiguous array `data`.

        None if that cannot be known now without reading it, as always without `compares_memory`.
        """
        return None

    def lend_memory(self, address: int, data: NDArray[np.uint8], *, writes: bool) -> bool:
        """Have the kernel read the contiguous array `data` in the place of device memory, as if it
        had been written there, until `end_loan`; if it `writes`, that goes to `data`, too.

        The owner does not change it until then. False: nothing was done, as on every device whose
        memory is no memory of this process; it has to be copied.
        """
        return False

    def end_loan(self, address: int) -> None:  # noqa: B027  nothing to do where nothing is lent
        """End a loan of `lend_memory`, if there is one.

        What the memory holds is undefined then.
        """

    @abstractmethod
    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        """Let the device run until any of `polls` holds.

        Raises
        ------
        WaitTimeoutError : None held within `max_cycles` device cycles (steps, on a backend without
            a clock).
        """

    def submit_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        """Begin `read_memory`; `out` must live, and nobody look at it, until it has ended.

        Transfers go on while device time passes, in the order in which they were submitted. A
        backend whose transfers take no device time has carried it out at the return.
        """
        self.read_memory(address, out)
        return Ended()

    def submit_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        """Begin `write_memory`; `data` must live, and not change, until it has ended."""
        self.write_memory(address, data)
        return Ended()

    def advance(self, max_cycles: int, polls: Sequence[Poll] = ()) -> None:
        """Let the device run until any of `polls` holds, a submitted transfer ends, or for
        `max_cycles` device cycles (steps, on a backend without a clock; fewer if no step would
        change anything)."""
        try:
            self.wait(polls, max_cycles)
        except WaitTimeoutError:
            return

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
