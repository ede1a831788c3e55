"""Memory that a client and the service share, or each has a copy of."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import NearstepError

PAGE_BYTES = 4096
MAX_SEGMENT_BYTES = 1 << 36

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Of shared memory: an access behind the end of a file that became shorter kills the process."""


class SegmentError(NearstepError):
    """Memory that cannot be had, or is not what was said of it."""


class Segment:
    """Bytes that arrays go through.

    Parameters
    ----------
    size : bytes, at least; whole pages are mapped.
    descriptor : of memory that is shared already; it belongs to the segment from here on. None:
        new memory, with a descriptor.

    Attributes
    ----------
    data : NDArray[np.uint8]. Shape (size,).
    descriptor : to be sent to the other end.

    Raises
    ------
    SegmentError : no such memory, or the descriptor is of less, or of some that could shrink.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        pages = max(PAGE_BYTES, -(-size // PAGE_BYTES) * PAGE_BYTES)
        if descriptor is None:
            descriptor = os.memfd_create("nearstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            made = True
        else:
            made = False
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
            self._map = mmap.mmap(self.descriptor, pages)
        except (OSError, ValueError) as error:
            os.close(self.descriptor)
            raise SegmentError(f"no memory of {pages} bytes: {error}") from error
        except BaseException:
            os.close(self.descriptor)
            raise
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)[:size]

    def close(self) -> None:
        """Give it back; arrays in it stay as long as something holds them."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def half(elements: int) -> int:
    """Bytes of one half of the segment of an exchange: whole lines, so that both begin at one."""
    return -(-4 * elements // PAGE_BYTES) * PAGE_BYTES
