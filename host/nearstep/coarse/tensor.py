"""A tensor of a pool: an array of one shape on each device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion
from nearstep.buffer import Buffer
from nearstep.coarse.rings import Pending, Rings
from nearstep.errors import ArgumentError, BusyError, DtypeError, FreedBufferError, ShapeError
from nearstep.scalars import is_whole


class PoolTensor:
    """A float32 array on each device of a pool, made by `CoarsePool.tensor`.

    A reduced tensor has two buffers on each device. A job reads the front buffer and writes the
    back buffer; the two are swapped when the job has succeeded on every device. Until then, or if
    the job fails, all devices keep the values from before it. A tensor without `reduced` has one
    buffer and is only stored.

    Attributes
    ----------
    rings : rings of the tensor's pool.
    size : number of elements on each device.
    reduced : whether jobs can reduce the tensor.
    """

    def __init__(self, rings: Rings, shape: tuple[int, ...], *, reduced: bool = True) -> None:
        self.rings = rings
        self.shape = shape
        self.reduced = reduced
        self.size = math.prod(shape)
        self._event: Pending | None = None
        self._transfers: list[Completion] = []
        self.freed = False
        self._abandoned = False
        self._buffers: list[list[Buffer]] = []
        self._front = 0
        try:
            for _ in range(1 + reduced):
                self._buffers.append([])
                for device in range(rings.devices):
                    self._buffers[-1].append(rings.device.alloc(self.size, channel=device))
        except BaseException:
            self._release()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the array of one device."""
        return 4 * self.size

    @property
    def event(self) -> Pending | None:
        """The job that is running or queued, or None."""
        if self._event is not None and self._event.ended:
            return None
        return self._event

    def write(self, device: int, array: Any) -> None:
        """Copy a float32 array to a device.

        Parameters
        ----------
        array : of the tensor's shape; of numpy, or readable by numpy without a copy, such as a
            tensor of torch.
        """
        self.check_idle("write")
        values = self._source(device, array)
        with self.rings.lock:  # no job may be submitted meanwhile
            self.check_idle("write")
            self.front(device).write(values)

    def read(self, device: int, out: Any = None) -> NDArray[np.float32]:
        """Copy the array of a device to `out`, or to a new array, and return it.

        While a job is running, these are the values from before it.
        """
        self.check_usable("read")
        values = self._destination(device, out)
        with self.rings.lock:  # the buffers are not swapped meanwhile
            self.check_usable("read")
            self.front(device).read(values.reshape(-1))
        return values

    def submit_write(self, device: int, array: Any) -> Completion:
        """Begin `write`: a client's push to its device.

        `array` must exist unchanged, and the tensor must not be reduced, until the transfer has
        ended.
        """
        self.check_usable("write")
        values = self._source(device, array)
        with self.rings.lock:
            self._check_no_job("write")
            return self._under_way(self.front(device).submit_write(values))

    def submit_read(self, device: int, out: Any) -> Completion:
        """Begin `read` into `out`: a client's pull from its device.

        The tensor must be neither reduced nor written until the transfer has ended.
        """
        self.check_usable("read")
        values = self._destination(device, out).reshape(-1)
        with self.rings.lock:
            self._check_no_job("read")
            return self._under_way(self.front(device).submit_read(values))

    def _under_way(self, transfer: Completion) -> Completion:
        self._transfers = [each for each in self._transfers if not each.ended]
        if not transfer.ended:
            self._transfers.append(transfer)
        return transfer

    def _source(self, device: int, array: Any) -> NDArray[np.float32]:
        """Return `array` for numpy, contiguous and checked so that it can be written to
        `device`."""
        self.rings.check_device(device)
        return np.ascontiguousarray(as_floats(repr(self), array, self.shape)).reshape(-1)

    def _destination(self, device: int, out: Any) -> NDArray[np.float32]:
        """Return `out`, checked, or a new array, as the destination of a read."""
        self.rings.check_device(device)
        out = np.empty(self.shape, np.float32) if out is None else out
        values = as_floats(f"out of {self!r}", out, self.shape)
        if not values.flags.c_contiguous:
            raise ShapeError(f"out of {self!r}", "contiguous", f"strided {values.strides}")
        if not values.flags.writeable:
            raise ArgumentError(f"out of {self!r} must be writable, not read-only")
        return values

    def free(self) -> None:
        """Free the memory on all devices."""
        with self.rings.lock:
            self.check_idle("free")
            self._release()

    def abandon(self) -> None:
        """Abort transfers; free the memory at once, or when the current job has ended."""
        with self.rings.lock:
            self._abandoned = True
            for each in self._transfers:
                each.abort()
            if not self.freed and self.event is None:
                self._release()

    def front(self, device: int) -> Buffer:
        """Return the buffer with the current values on a device."""
        return self._buffers[self._front][device]

    def back(self, device: int) -> Buffer:
        """Return the buffer for the next result on a device."""
        return self._buffers[1 - self._front][device]

    def begin(self, event: Pending) -> None:
        """Record the job that uses the tensor; called by the pool."""
        self._event = event

    def end(self, *, succeeded: bool) -> None:
        """Swap the buffers if the job succeeded on every device; called by the pool."""
        self._event = None
        if succeeded:
            self._front = 1 - self._front
        if self._abandoned and not self.freed:
            self._release()

    def check_usable(self, action: str) -> None:
        """Raise, naming `action`, if the tensor was freed or the pool is closed."""
        self.rings.device.check_open(f"{action} {self!r}")
        if self.freed:
            raise FreedBufferError(repr(self), action)

    def check_idle(self, action: str) -> None:
        """Raise as `check_usable`, or `BusyError` if a job or a transfer uses the tensor."""
        self._check_no_job(action)
        if not all(each.ended for each in self._transfers):
            raise BusyError(f"cannot {action} {self!r}: a transfer that has not ended uses it")

    def _check_no_job(self, action: str) -> None:
        self.check_usable(action)
        if self.event is not None:
            raise BusyError(f"cannot {action} {self!r}: a job that has not ended uses it")

    def _release(self) -> None:
        for buffers in self._buffers:
            for buffer in buffers:
                buffer.free()
        self.freed = True

    def __repr__(self) -> str:
        return f"PoolTensor({self.shape} on {self.rings.devices} devices)"


def as_array(value: Any) -> NDArray[Any]:
    """Return `value` as an array of numpy, without a copy.

    Raises
    ------
    ArgumentError : numpy needs a copy.
    """
    if isinstance(value, np.ndarray):
        return value
    try:
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        return np.asarray(value, copy=False)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ArgumentError(
            f"numpy must take an array without a copy, not {type(value).__name__}: {error}"
        ) from None


def as_floats(what: str, value: Any, shape: tuple[int, ...] | None = None) -> NDArray[np.float32]:
    """Return `value` as `as_array` does; raise unless it is float32, and of a shape if one is
    given."""
    array = as_array(value)
    if array.dtype != np.float32:
        raise DtypeError(what, "float32", array.dtype)
    if shape is not None and array.shape != shape:
        raise ShapeError(what, shape, array.shape)
    return array


def is_shape(value: Any) -> bool:
    """Return whether `value` is a shape, and not arrays."""
    if is_whole(value):
        return True
    if not isinstance(value, Sequence) or not (value or isinstance(value, tuple)):
        return False
    return all(map(is_whole, value))
