"""Memory that a client and the service share, or of which each has a copy."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import NearstepError

PAGE_BYTES = 4096
MAX_SEGMENT_BYTES = 1 << 36

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of shared memory: an access beyond the end of a truncated file kills the process."""


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAILED = ctypes.c_void_p(-1).value


class SharedMemoryError(NearstepError):
    """Memory cannot be allocated or mapped, or is not as described."""


class SharedMemory:
    """Memory for the arrays of messages, shared by descriptor or private.

    The memory is unmapped when no array uses it. A mapped segment needs no descriptor.

    Parameters
    ----------
    size : bytes; the mapping has whole pages.
    descriptor : descriptor of existing shared memory, owned and closed by the segment. None: new
        memory is allocated, with a descriptor to send to the other end before `close`.

    Attributes
    ----------
    data : NDArray[np.uint8]. Shape (size,).
    descriptor : of new memory, until `close`; otherwise -1.

    Raises
    ------
    SharedMemoryError : no memory, an invalid size, or a descriptor of too few bytes or without a
        seal against shrinking.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        pages = max(PAGE_BYTES, -(-size // PAGE_BYTES) * PAGE_BYTES)
        made = descriptor is None
        if descriptor is None:
            descriptor = os.memfd_create("nearstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.descriptor = descriptor
        try:
            if not 0 <= size <= MAX_SEGMENT_BYTES:
                raise SharedMemoryError(
                    f"a segment must have at most {MAX_SEGMENT_BYTES} bytes, not {size}"
                )
            if made:
                os.truncate(self.descriptor, pages)
                fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            if not fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise SharedMemoryError("shared memory must be sealed against shrinking")
            found = os.fstat(self.descriptor).st_size
            if found < pages:
                raise SharedMemoryError(f"shared memory must have {pages} bytes, not {found}")
            self.data: NDArray[np.uint8] = _mapped(self.descriptor, pages)[:size]
        except (OSError, ValueError) as error:
            self.close()
            raise SharedMemoryError(f"no memory of {pages} bytes: {error}") from error
        except BaseException:
            self.close()
            raise
        if not made:
            self.close()

    def close(self) -> None:
        """Close the descriptor; the memory exists as long as an array uses it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _mapped(descriptor: int, nbytes: int) -> NDArray[np.uint8]:
    """Map a descriptor's memory; `mmap.mmap` would keep a descriptor open until Python 3.13."""
    place = LIBC.mmap(
        None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0
    )
    if place == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    room = (ctypes.c_ubyte * nbytes).from_address(place)
    weakref.finalize(room, LIBC.munmap, place, nbytes).atexit = False  # threads may still use it
    return np.frombuffer(memoryview(room), np.uint8)
