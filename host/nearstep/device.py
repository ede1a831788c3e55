"""Devices, opened by name, with one interface for every backend."""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike

from nearstep.allocator import LINE_BYTES, Allocator
from nearstep.backends.base import Backend, Completion
from nearstep.backends.options import HOST, DeviceUrl
from nearstep.buffer import Buffer
from nearstep.errors import (
    ArgumentError,
    BusyError,
    ClosedDeviceError,
    ForkedDeviceError,
    MismatchError,
    OutOfDeviceMemoryError,
    UrlError,
)
from nearstep.registers import BlockRegisters, Registers
from nearstep.run import Run
from nearstep.scalars import index, is_whole
from nearstep.updater.processor import Processor
from nearstep_spec.blockwise import BlockLayout
from nearstep_spec.rule.optimizer import Optimizer

BACKENDS = "nearstep.backends"
"""Entry-point group of backends, by the first part of a device name."""

FAMILIES = {
    "axdimm": "nearstep.axdimm.device:AxdimmDevice",
    "coarse": "nearstep.coarse.device:CoarseDevice",
    "nvme": "nearstep.linux.nvme_device:NvmeDevice",
    "smartssd": "nearstep.smartssd.device:SmartssdDevice",
}
"""Driver of each family of devices."""

Driver = TypeVar("Driver", bound="Device")


class _Submitted(NamedTuple):
    """A transfer that was submitted; without its buffer, which refers to the device.

    Attributes
    ----------
    start, stop : device addresses.
    changes : whether the transfer writes device memory.
    """

    start: int
    stop: int
    changes: bool
    completion: Completion

    def __str__(self) -> str:
        return f"a transfer {'to' if self.changes else 'from'} [{self.start:#x}, {self.stop:#x})"


class Device:
    """One device: its memory; the class of its family adds registers and kernels.

    Close it, or use it as a context manager. Methods of a closed device raise `ClosedDeviceError`;
    in a child after `fork()` they raise `ForkedDeviceError`.

    Attributes
    ----------
    url : the device's name.
    backend : the transport, for tests and tools.
    ends_runs : whether the last elements of a run are rounded differently, as torch rounds those of
        a tensor: a run ends with each tensor that is followed by padding.
    regs : registers as objects: `dev.regs.adam0.status.busy`; none on a device of several nodes.
    """

    ends_runs = False

    def __init__(self, backend: Backend, url: str) -> None:
        self.url = url
        self.backend = backend
        self.regs = Registers(backend, {})
        self._allocators = [Allocator(nbytes, base) for base, nbytes in backend.regions]
        self._lock = threading.RLock()
        self._allocating = False
        self._released: deque[Buffer] = deque()
        self._transfers: list[_Submitted] = []
        self._closed = False
        self._process = os.getpid()
        for base, nbytes in backend.regions:
            backend.protect(base, nbytes)

    @property
    def closed(self) -> bool:
        """Whether the device was closed, or was opened by another process."""
        return self._closed or os.getpid() != self._process

    @property
    def capacity_bytes(self) -> int:
        """Size of the device memory."""
        return self.backend.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Free memory in bytes, over all pieces."""
        return sum(allocator.free_bytes for allocator in self._allocators)

    @property
    def stripe_bytes(self) -> int:
        """Bytes of a block of a striped array; blocks are on the channels in turn."""
        return LINE_BYTES

    @property
    def stripe_align(self) -> int:
        """Preferred alignment of arrays that are used together, in bytes."""
        return LINE_BYTES

    @property
    def stripe_skew(self) -> int:
        """Preferred offset in bytes: the k-th array in 8 bits, from 1, begins k * `stripe_skew`
        behind a multiple of `stripe_align`."""
        return 0

    @property
    def block_layout(self) -> BlockLayout | None:
        """Layout of arrays in 8 bits; None on a device without them."""
        return None

    @property
    def drive_places(self) -> Sequence[str]:
        """Drives behind the device, one a channel: files or block devices; mostly empty."""
        return ()

    @property
    def blocks(self) -> Mapping[str, BlockRegisters]:
        """The registers of every block, by name."""
        return {block.name: block for block in self.regs}

    @property
    def cycles(self) -> int | None:
        """Device cycle now; None on a device without a clock."""
        self.check_open("read cycles")
        return self.backend.cycles

    def update(self, optimizer: str | Optimizer, arrays: Mapping[str, Any], **options: Any) -> Run:
        """Start a step of an optimizer on a device with update kernels; see
        `nearstep.updater.updating.UpdatingDevice.update`.

        Raises
        ------
        ArgumentError : the device has none.
        """
        raise ArgumentError(f"cannot update: {self.url} has no update kernels")

    def alloc(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = np.float32,
        *,
        channel: int = 0,
        align: int = LINE_BYTES,
        offset: int = 0,
    ) -> Buffer:
        """Allocate an array. Its contents are undefined.

        Parameters
        ----------
        channel : memory channel, from 0; most devices have one.
        align, offset : the array starts `offset` bytes behind a multiple of `align`; both are
            multiples of a 64-byte line.

        Raises
        ------
        ArgumentError : a dimension is negative or no integer, the dtype is unknown or holds Python
            objects, or there is no such channel or alignment.
        OutOfDeviceMemoryError
        """
        self.check_open("alloc")
        dims = _dimensions(shape)
        try:
            kind = np.dtype(dtype)
        except (TypeError, ValueError):
            raise ArgumentError(f"dtype must be one of numpy's, not {dtype!r}") from None
        if kind.hasobject or kind.itemsize == 0:
            raise ArgumentError(f"dtype must be of plain numbers, not {kind}")
        nbytes = math.prod(dims) * kind.itemsize
        self.check_channel(channel)
        if not is_whole(align) or align < 1 or align % LINE_BYTES:
            raise ArgumentError(f"align must be a multiple of {LINE_BYTES}, not {align!r}")
        if not is_whole(offset) or not 0 <= offset < align or offset % LINE_BYTES:
            raise ArgumentError(
                f"offset must be a multiple of {LINE_BYTES} below align={align}, not {offset!r}"
            )
        with self._allocation():
            try:
                address = self._allocators[channel].allocate(nbytes, int(align), int(offset))
            except OutOfDeviceMemoryError as error:
                raise error.with_hint(self.backend.capacity_options) from None
            if nbytes:
                self.backend.claim(address, nbytes)
        return Buffer(self, address, dims, kind)

    @property
    def channel_count(self) -> int:
        """Number of memory channels."""
        return len(self._allocators)

    def channel_of(self, buffer: Buffer) -> int:
        """Memory channel of a buffer of this device."""
        return next(
            number
            for number, each in enumerate(self._allocators)
            if each.base <= buffer.address < each.base + each.capacity_bytes
        )

    def check_channel(self, channel: int) -> None:
        """Raise `ArgumentError` unless the device has this memory channel."""
        if not is_whole(channel):
            raise ArgumentError(f"channel must be an integer, not {channel!r}")
        if not 0 <= channel < self.channel_count:
            raise ArgumentError(
                f"channel must be from 0 to {self.channel_count - 1}, not {channel}"
            )

    @contextmanager
    def reach(self, buffer: Buffer, action: str) -> Iterator[None]:
        """Let the host access the memory of `buffer` in a `with` statement; wait while another
        thread has given the channel to the kernel.

        Raises
        ------
        ModeError : this thread has given the channel to the kernel.
        """
        yield

    def check_unused(self, buffer: Buffer, action: str, *, changes: bool) -> None:
        """Raise unless the host may use `buffer` now; errors name the `action`.

        Parameters
        ----------
        changes : whether the action changes the contents. Arrays that a run only reads may be read.

        Raises
        ------
        BusyError : a run or a transfer that has not ended uses memory of the buffer.
        """
        stop = buffer.address + buffer.nbytes
        for each in self._transfers:
            overlap = max(each.start, buffer.address) < min(each.stop, stop)
            if overlap and (changes or each.changes) and not each.completion.ended:
                raise BusyError(f"cannot {action} {buffer!r}: {each} has not ended")

    def under_way(self, buffer: Buffer, completion: Completion, *, changes: bool) -> Completion:
        """Record that a transfer uses a buffer; called by the buffer.

        Parameters
        ----------
        changes : whether the transfer writes the buffer.
        """
        with self._lock:
            self._transfers = [each for each in self._transfers if not each.completion.ended]
            if not completion.ended:
                stop = buffer.address + buffer.nbytes
                self._transfers.append(_Submitted(buffer.address, stop, changes, completion))
        return completion

    def check_no_transfer(self, channels: Iterable[int], action: str) -> None:
        """Raise `BusyError` if a transfer from or to one of these channels has not ended."""
        wanted = [self._allocators[channel] for channel in channels]
        for each in self._transfers:
            here = any(a.base <= each.start < a.base + a.capacity_bytes for a in wanted)
            if here and not each.completion.ended:
                raise BusyError(f"cannot {action}: {each} has not ended")

    def release(self, buffer: Buffer) -> None:
        """Free the memory of `buffer`; called by `nearstep.buffer.Buffer.free`."""
        self._released.append(buffer)
        with self._lock:
            if not self._allocating:  # a finaliser may be called while this thread allocates
                with self._allocation():
                    pass

    @contextmanager
    def _allocation(self) -> Iterator[None]:
        """Lock allocators and guards; free released buffers at the beginning and at the end."""
        with self._lock:
            self._allocating = True
            try:
                self._take_released()
                yield
                self._take_released()
            finally:
                self._allocating = False

    def _take_released(self) -> None:
        while self._released:
            buffer = self._released.popleft()
            channel = self.channel_of(buffer)
            self._allocators[channel].release(buffer.address, buffer.nbytes)
            if buffer.nbytes:
                self.backend.protect(buffer.address, buffer.nbytes)

    def reset(self) -> None:
        """Hard reset of the kernels and of their path to memory. Memory and buffers are kept."""
        self.check_open("reset")
        self.backend.reset()

    def close(self) -> None:
        """Close the device; its buffers become invalid. Closing twice does nothing."""
        if not self.closed:
            self._closed = True
            self._transfers.clear()
            self.backend.close()

    def check_open(self, action: str) -> None:
        """Raise `ClosedDeviceError`, which names the `action`, if the device is closed."""
        if os.getpid() != self._process:
            raise ForkedDeviceError(self.url, action, self._process)
        if self._closed:
            raise ClosedDeviceError(self.url, action)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}{' closed' if self.closed else ''}>"


def _dimensions(shape: int | Sequence[int]) -> tuple[int, ...]:
    each = shape if isinstance(shape, Iterable) else (shape,)
    try:
        dims = tuple(index(dim) for dim in each)
    except TypeError:
        raise ArgumentError(
            f"shape must be an integer or a sequence of integers, not {shape!r}"
        ) from None
    if any(dim < 0 for dim in dims):
        raise ArgumentError(f"shape must not be negative, not {dims}")
    return dims


@overload
def open_device(url: str) -> Device: ...
@overload
def open_device(url: str, driver: type[Driver]) -> Driver: ...
def open_device(url: str, driver: type[Device] = Device) -> Device:
    """Open the device named `url`, such as `sim:axdimm?lanes=16&memory=ideal`.

    The part before the colon names the backend, the part after it the family; options are the
    backend's own. Nothing is substituted for a name that cannot be opened.

    Parameters
    ----------
    driver : class of the device, such as `nearstep.coarse.CoarseDevice`. A name of another family
        is refused before a simulator is built.

    Raises
    ------
    UrlError : not a device name, no such backend, or the backend has no such family.
    OptionError : an option is unknown or has a bad value.
    MismatchError : the device is of another class than `driver`, or its registers are not those of
        its configuration.
    """
    backend = open_backend(url, driver)
    try:
        device = drive(backend, url)
        _check_driver(url, driver, type(device))
        return device
    except BaseException:
        backend.close()
        raise


def open_backend(url: str, driver: type[Device] = Device) -> Backend:
    """Open a device without its driver.

    Raises
    ------
    UrlError, OptionError
    MismatchError : `driver` is for another family.
    """
    name = _parsed(url)
    if name.backend == HOST:
        reason = (
            "the processor is no device: it has neither memory of its own nor registers; "
            "optimizers of nearstep.optim accept the name, and update tensors of the host"
        )
        raise UrlError(url, reason)
    if name.target in FAMILIES:
        _check_driver(url, driver, _driver(name.target))
    backend: Backend = _opened(name)
    return backend


def open_processor(url: str = f"{HOST}:") -> Processor:
    """This machine's processor, which runs update rules on arrays of the host; `nearstep devices`
    lists its options.

    Raises
    ------
    UrlError : no name of a processor, or the package that compiles rules is not installed.
    OptionError
    """
    name = _parsed(url)
    if name.backend != HOST:
        raise UrlError(url, "no name of a processor", [f"{HOST}:"])
    processor: Processor = _opened(name)
    return processor


def _parsed(url: str) -> DeviceUrl:
    if not isinstance(url, str):
        raise UrlError(str(url), f"a device name must be text, not {type(url).__name__}")
    return DeviceUrl.parse(url)


def _opened(name: DeviceUrl) -> Any:
    """Open the backend, or the processor, of a name."""
    return backend_of(name).load()(name.target, dict(name.options))


@cache
def backends() -> dict[str, EntryPoint]:
    """Return the installed backends by name, in order; cached, since a search takes 15 ms."""
    return {entry.name: entry for entry in sorted(entry_points(group=BACKENDS))}


def backend_of(name: DeviceUrl) -> EntryPoint:
    """Return the backend of a device name.

    Raises
    ------
    UrlError : there is none, even in packages installed since the last search.
    """
    if name.backend not in backends():
        backends.cache_clear()
    if name.backend not in backends():
        raise UrlError(name.url, f"there is no backend {name.backend!r}", list(backends()))
    return backends()[name.backend]


def drive(backend: Backend, url: str) -> Device:
    """Make the device of a backend, with the driver of its family.

    Raises
    ------
    UrlError : there is no driver for the family.
    MismatchError
    """
    if backend.family not in FAMILIES:
        raise UrlError(url, f"there is no driver for {backend.family!r}", sorted(FAMILIES))
    return _driver(backend.family)(backend, url)


def _driver(family: str) -> type[Device]:
    """Import the driver of a family."""
    module, _, attribute = FAMILIES[family].partition(":")
    driver: type[Device] = getattr(importlib.import_module(module), attribute)
    return driver


def _check_driver(url: str, expected: type[Device], actual: type[Device]) -> None:
    if not issubclass(actual, expected):
        raise MismatchError(url, f"driven by {expected.__name__}", actual.__name__)
