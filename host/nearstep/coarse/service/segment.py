"""Memory that a client and the service share, or each has a copy of."""

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
"""Of shared memory: an access behind the end of a file that became shorter kills the process."""


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAILED = ctypes.c_void_p(-1).value


class SegmentError(NearstepError):
    """Memory that cannot be had, or is not what was said of it."""


class Segment:
    """Bytes that arrays go through.

    They are unmapped when nothing holds an array in them. A segment that is mapped holds no
    descriptor.

    Parameters
    ----------
    size : bytes, at least; whole pages are mapped.
    descriptor : of memory that is shared already; it belongs to the segment from here on. None:
        new memory, with a descriptor to be sent to the other end, and closed then.

    Attributes
    ----------
    data : NDArray[np.uint8]. Shape (size,).
    descriptor : of new memory, until `close`; otherwise -1.

    Raises
    ------
    SegmentError : no such memory, or the descriptor is of less, or of some that could shrink.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        pages = max(PAGE_BYTES, -(-size // PAGE_BYTES) * PAGE_BYTES)
        made = descriptor is None
        if descriptor is None:
            descriptor = os.memfd_create("nearstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.descriptor = descriptor
        try:
            if not 0 <= size <= MAX_SEGMENT_BYTES:
                raise SegmentError(
                    f"a segment must have at most {MAX_SEGMENT_BYTES} bytes, not {size}"
                )
            if made:
                os.truncate(self.descriptor, pages)
                fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            if not fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise SegmentError("shared memory must be sealed against shrinking, and is not")
            found = os.fstat(self.descriptor).st_size
            if found < pages:
                raise SegmentError(f"shared memory must have {pages} bytes, not {found}")
            self.data: NDArray[np.uint8] = _mapped(self.descriptor, pages)[:size]
        except (OSError, ValueError) as error:
            self.close()
            raise SegmentError(f"no memory of {pages} bytes: {error}") from error
        except BaseException:
            self.close()
            raise
        if not made:
            self.close()

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as something holds an array in it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _mapped(descriptor: int, nbytes: int) -> NDArray[np.uint8]:
    """Memory of a descriptor. `mmap.mmap` would hold a descriptor for each (until Python 3.13)."""
    place = LIBC.mmap(
        None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0
    )
    if place == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    room = (ctypes.c_ubyte * nbytes).from_address(place)
    weakref.finalize(room, LIBC.munmap, place, nbytes).atexit = False  # threads may still use it
    return np.frombuffer(memoryview(room), np.uint8)
