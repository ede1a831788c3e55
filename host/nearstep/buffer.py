"""Arrays in device memory, with explicit copies."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from numbers import Number
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nearstep.backends.base import Backend, Completion
from nearstep.backends.peer import PeerBackend
from nearstep.errors import (
    ArgumentError,
    DtypeError,
    FreedBufferError,
    MismatchError,
    OutOfBoundsError,
    ShapeError,
)
from nearstep.host_array import host_array
from nearstep.scalars import index


class BufferOwner(Protocol):
    """What a buffer uses of its device; see `nearstep.device.Device`."""

    url: str
    backend: Backend

    @property
    def closed(self) -> bool: ...
    def check_open(self, action: str) -> None: ...
    def reach(self, buffer: Buffer, action: str) -> AbstractContextManager[None]: ...
    def check_unused(self, buffer: Buffer, action: str, *, changes: bool) -> None: ...
    def release(self, buffer: Buffer) -> None: ...
    def under_way(self, buffer: Buffer, completion: Completion, *, changes: bool) -> Completion: ...
    def __hash__(self) -> int: ...


class Buffer:
    """An array of fixed shape and dtype in the memory of one device.

    Made by `nearstep.device.Device.alloc`. Its contents are undefined until written. A slice
    of a one-dimensional buffer, `buffer[start:stop]`, is a view: it shares the memory and the
    lifetime of the buffer it is cut from.

    Attributes
    ----------
    address : byte address in device memory.
    dtype : a `numpy.dtype`.
    size : elements.
    nbytes : bytes of the elements.
    """

    def __init__(
        self,
        device: BufferOwner,
        address: int,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        root: Buffer | None = None,
    ) -> None:
        self.device = device
        self.address = address
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.size = math.prod(shape)
        self.nbytes = self.size * self.dtype.itemsize
        self._root = root
        self._freed = False

    @property
    def freed(self) -> bool:
        """Whether the memory has been given back."""
        return self._freed if self._root is None else self._root.freed

    def write(self, array: Any) -> None:
        """Copy `array`, of the buffer's shape and dtype, to the device.

        On an error nothing is copied.

        Parameters
        ----------
        array : of numpy; a dense tensor of torch on the CPU, of bfloat16 for a buffer of uint16; or
            another that numpy converts.

        Raises
        ------
        ShapeError, DtypeError : `array` has another shape or dtype than the buffer.
        ModeError : this thread has put the buffer's channel into acceleration mode. If another
            thread has, `write` waits until that ends.
        BusyError : a run that has not ended uses the buffer.
        ResetNeededError : the device stopped at a fault before.
        FreedBufferError, ClosedDeviceError
        """
        self.check_usable("write")
        data = self._bytes_of(array)
        with self.device.reach(self, "write"):
            self.device.check_unused(self, "write", changes=True)
            if data.size:
                self.device.backend.write_memory(self.address, data)

    def lend(self, array: NDArray[Any], *, writes: bool = False, form: str | None = None) -> bool:
        """`write` without a copy, where the device can use memory of this process: until `end_loan`
        the kernel accesses the contiguous `array` instead of the buffer.

        Nobody else may change the array until then.

        Parameters
        ----------
        writes : whether the kernel writes the buffer; it then writes `array`.
        form : `fp16` or `bf16`: `array` has patterns of uint16 in the place of the buffer's
            float32; they are widened when read, and rounded once when written.

        Returns
        -------
        bool : whether the array is lent. If not, nothing was done, and the array has to be written.

        Raises
        ------
        ShapeError, DtypeError, ModeError, BusyError, ResetNeededError, FreedBufferError,
            ClosedDeviceError : as `write`.
        """
        self.check_usable("write")
        like = self if form is None else Buffer(self.device, self.address, self.shape, np.uint16)
        data, backend = like._bytes_of(array), self.device.backend
        with self.device.reach(self, "write"):
            self.device.check_unused(self, "write", changes=True)
            if not data.size:
                return False
            if form is not None:
                return backend.lend_patterns(self.address, data, form, writes=writes)
            return backend.lend_memory(self.address, data, writes=writes)

    def end_loan(self, start: int = 0) -> None:
        """End the loan, if any, that begins at element `start`; its contents are undefined then."""
        self.device.backend.end_loan(self.address + start * self.dtype.itemsize)

    def holds(self, array: NDArray[Any]) -> bool | None:
        """Whether the contents equal `array`, of the buffer's shape and dtype, bit for bit.

        None if only a `read` can tell.

        Raises
        ------
        ShapeError, DtypeError : `array` has another shape or dtype than the buffer.
        ModeError, BusyError, FreedBufferError, ClosedDeviceError : as `read`.
        """
        self.check_usable("read")
        data = self._bytes_of(array)
        with self.device.reach(self, "read"):
            self.device.check_unused(self, "read", changes=False)
            return self.device.backend.memory_holds(self.address, data)

    def read(self, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Copy the contents to `out`, or to a new array, and return it.

        Raises
        ------
        ShapeError, DtypeError : `out` has another shape or dtype than the buffer, or is not
            contiguous.
        ArgumentError : `out` cannot be written.
        ModeError : the buffer's channel is in acceleration mode.
        BusyError : a run that has not ended writes the buffer. Arrays that it reads may be read.
        FreedBufferError, ClosedDeviceError
        """
        self.check_usable("read")
        if out is None:
            out = np.empty(self.shape, self.dtype)
        else:
            self._check_out(out)
        with self.device.reach(self, "read"):
            self.device.check_unused(self, "read", changes=False)
            if self.nbytes:
                self.device.backend.read_memory(self.address, out.reshape(-1).view(np.uint8))
        return out

    def submit_write(self, array: Any) -> Completion:
        """Start a `write`; until its end `array` must not change, and the buffer must not be used
        otherwise.

        It takes device time: see `Backend.advance`.

        Raises
        ------
        ShapeError, DtypeError, ModeError, BusyError, ResetNeededError, FreedBufferError,
            ClosedDeviceError : as `write`; nothing was started.
        """
        self.check_usable("write")
        array = host_array(self, array, self.dtype)
        self._check_like(array)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with self.device.reach(self, "write"):
            self.device.check_unused(self, "write", changes=True)
            return self.device.under_way(
                self, self.device.backend.submit_write(self.address, data), changes=True
            )

    def submit_read(self, out: NDArray[Any]) -> Completion:
        """Start a `read` into `out`, which has the contents at the end.

        As `submit_write`.
        """
        self.check_usable("read")
        self._check_out(out)
        with self.device.reach(self, "read"):
            self.device.check_unused(self, "read", changes=False)
            into = out.reshape(-1).view(np.uint8)
            return self.device.under_way(
                self, self.device.backend.submit_read(self.address, into), changes=False
            )

    def submit_peer_write(self, array: NDArray[Any]) -> Completion:
        """Start a copy of `array`, of the buffer's shape and dtype, from the drive beside the
        memory; the host's link is not used.

        As `submit_write`.

        Raises
        ------
        MismatchError : there is no such drive.
        """
        self.check_usable("write")
        data = self._bytes_of(array)
        with self.device.reach(self, "write"):
            self.device.check_unused(self, "write", changes=True)
            completion = self._peer().submit_peer_write(self.address, data)
            return self.device.under_way(self, completion, changes=True)

    def submit_peer_read(self, out: NDArray[Any]) -> Completion:
        """Start a copy of the contents into `out`, at the drive beside the memory.

        As `submit_peer_write`.
        """
        self.check_usable("read")
        self._check_out(out)
        with self.device.reach(self, "read"):
            self.device.check_unused(self, "read", changes=False)
            into = out.reshape(-1).view(np.uint8)
            completion = self._peer().submit_peer_read(self.address, into)
            return self.device.under_way(self, completion, changes=False)

    def submit_dma_write(self, array: Any) -> Completion:
        """`submit_write` by a DMA engine of the host, which serves several cards at once.

        Raises
        ------
        MismatchError : the device has no cards with drives.
        """
        self.check_usable("write")
        data = self._bytes_of(array)
        with self.device.reach(self, "write"):
            self.device.check_unused(self, "write", changes=True)
            completion = self._peer().submit_host_write(self.address, data)
            return self.device.under_way(self, completion, changes=True)

    def submit_dma_read(self, out: NDArray[Any]) -> Completion:
        """`submit_read` by a DMA engine of the host. As `submit_dma_write`."""
        self.check_usable("read")
        self._check_out(out)
        with self.device.reach(self, "read"):
            self.device.check_unused(self, "read", changes=False)
            into = out.reshape(-1).view(np.uint8)
            completion = self._peer().submit_host_read(self.address, into)
            return self.device.under_way(self, completion, changes=False)

    def _peer(self) -> PeerBackend:
        """Return the backend; raise `MismatchError` unless there is a drive beside its memory."""
        backend = self.device.backend
        if not isinstance(backend, PeerBackend):
            raise MismatchError(
                f"device of {self!r}", "one with a drive beside its memory", self.device.url
            )
        return backend

    def copy_from(self, source: Buffer) -> None:
        """Copy the contents of `source`, of any device, through the host.

        On an error nothing is copied.

        Raises
        ------
        ShapeError, DtypeError : `source` has another shape or dtype.
        ModeError, BusyError, FreedBufferError, ClosedDeviceError
        """
        if not isinstance(source, Buffer):
            raise DtypeError(f"source of {self!r}", "Buffer", type(source).__name__)
        self.check_usable("write")
        if source.dtype != self.dtype:
            raise DtypeError(repr(self), self.dtype, source.dtype)
        if source.shape != self.shape:
            raise ShapeError(repr(self), self.shape, source.shape)
        with self.device.reach(self, "write"):
            self.device.check_unused(self, "write", changes=True)
        self.write(source.read())

    def fill(self, value: float) -> None:
        """Set every element to `value`, rounded to the dtype.

        Raises
        ------
        ArgumentError : `value` is no number, out of the range of the dtype, or not whole for a
            dtype of integers.
        ModeError, BusyError, ResetNeededError, FreedBufferError, ClosedDeviceError : as `write`.
        """
        try:
            self._check_number(value)
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                element = np.full((), value, self.dtype)
            self._check_element(value, element)
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"cannot fill {self!r} with {value!r}: {error}") from None
        self.check_usable("write")
        with self.device.reach(self, "write"):
            self.device.check_unused(self, "write", changes=True)
            if self.nbytes:
                pattern = element.reshape(1).view(np.uint8)
                self.device.backend.fill_memory(self.address, self.nbytes, pattern)

    def _check_number(self, value: Any) -> None:
        """Raise `ValueError` unless `value` is a number that the dtype can have."""
        number = isinstance(value, Number | np.generic | np.ndarray)
        if self.dtype.kind in "biuf" and (not number or np.iscomplexobj(value)):
            raise ValueError("it must be a real number")

    def _check_element(self, value: Any, element: NDArray[Any]) -> None:
        """Raise `ValueError` unless `element` is `value`, rounded."""
        kind = self.dtype.kind
        if kind == "f" and np.isinf(element) and not np.isinf(np.asarray(value, np.longdouble)):
            raise ValueError(f"it must be within the range of {self.dtype}")
        if kind in "biu" and element != value:
            raise ValueError(f"it must be a value of {self.dtype}")

    def free(self) -> None:
        """Free the memory.

        Raises
        ------
        FreedBufferError : the buffer was freed before, or is a view: free the whole buffer instead.
        BusyError : a run that has not ended uses the buffer, or a view of it.
        """
        self.check_usable("free")
        if self._root is not None:
            raise FreedBufferError(repr(self), "free a view:")
        self.device.check_unused(self, "free", changes=True)
        self.device.release(self)
        self._freed = True

    def __getitem__(self, part: slice) -> Buffer:
        """View of elements [start, stop) of a one-dimensional buffer.

        Raises
        ------
        ArgumentError : `part` is no slice of integers.
        ShapeError : the buffer has more dimensions, or `part` a step.
        OutOfBoundsError : the slice exceeds the buffer (no clipping, no negative indices).
        """
        if not isinstance(part, slice):
            raise ArgumentError(f"index of {self!r} must be a slice, not {part!r}")
        start, stop = part.start, part.stop
        if not (type(start) is int and type(stop) is int):
            start, stop = _bound(self, start, 0), _bound(self, stop, self.size)
        if len(self.shape) != 1 or part.step not in (None, 1):
            raise ShapeError(
                f"slice of {self!r}", "one-dimensional with step 1", (self.shape, part)
            )
        if not 0 <= start <= stop <= self.size:
            raise OutOfBoundsError(f"slice of {self!r}", start, stop, self.size)
        address = self.address + start * self.dtype.itemsize
        return Buffer(self.device, address, (stop - start,), self.dtype, root=self._root or self)

    def check_usable(self, action: str) -> None:
        """Raise unless the buffer is allocated and its device open; errors name the `action`."""
        if self.device.closed:
            self.device.check_open(f"{action} {self!r}")
        if self.freed:
            raise FreedBufferError(repr(self), action)

    def _check_out(self, out: NDArray[Any]) -> None:
        if not isinstance(out, np.ndarray):
            raise DtypeError(f"out of {self!r}", f"array of {self.dtype}", type(out).__name__)
        self._check_like(out)
        if not out.flags.writeable:
            raise ArgumentError(f"out of {self!r} must be writeable")
        if not out.flags.c_contiguous:
            raise ShapeError(f"out of {self!r}", "contiguous", f"strided {out.strides}")

    def _bytes_of(self, array: Any) -> NDArray[np.uint8]:
        """The bytes of an array like the buffer, without a copy if it is contiguous."""
        array = host_array(self, array, self.dtype)
        self._check_like(array)
        data: NDArray[np.uint8] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return data

    def _check_like(self, array: NDArray[Any]) -> None:
        if array.dtype != self.dtype:
            raise DtypeError(repr(self), self.dtype, array.dtype)
        if array.shape != self.shape:
            raise ShapeError(repr(self), self.shape, array.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Buffer({self.address:#x}, {self.shape}, {self.dtype})"


def _bound(buffer: Buffer, bound: Any, default: int) -> int:
    try:
        return default if bound is None else index(bound)
    except TypeError:
        raise ArgumentError(
            f"slice of {buffer!r}: bounds must be integers, not {bound!r}"
        ) from None
