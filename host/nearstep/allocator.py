"""First-fit allocation of device memory, with a guard between pieces."""

from __future__ import annotations

from nearstep.errors import OutOfDeviceMemoryError

LINE_BYTES = 64
"""Line of a DIMM, the widest beat: allocations start on lines, with a guard line before each."""


class Allocator:
    """Allocates pieces of [base, base + capacity_bytes), on lines and at least a line apart.

    The first line is never allocated, so that no buffer has address 0 and there is an unused line
    before every buffer.
    """

    def __init__(self, capacity_bytes: int, base: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.base = base
        self._free = [(base + LINE_BYTES, base + capacity_bytes - capacity_bytes % LINE_BYTES)]

    @property
    def free_bytes(self) -> int:
        """Bytes in all free pieces, including the guards that allocations will need."""
        return sum(stop - start for start, stop in self._free)

    def allocate(self, nbytes: int, align: int = LINE_BYTES, offset: int = 0) -> int:
        """Allocate `nbytes`, `offset` bytes behind a multiple of `align`, and return the address.

        `align` and `offset` are multiples of a line.

        Raises
        ------
        OutOfDeviceMemoryError : no free piece is large enough.
        """
        size = self._footprint(nbytes)
        for index, (start, stop) in enumerate(self._free):
            first = -(-(start - offset) // align) * align + offset
            if stop - first >= size:
                pieces = [(start, first), (first + size, stop)]
                self._free[index : index + 1] = [piece for piece in pieces if piece[0] < piece[1]]
                return first
        largest = max((stop - start for start, stop in self._free), default=0)
        raise OutOfDeviceMemoryError(
            nbytes, max(0, largest - LINE_BYTES), self.free_bytes, self.capacity_bytes
        )

    def release(self, address: int, nbytes: int) -> None:
        """Free a piece that was allocated for `nbytes`."""
        pieces = sorted([*self._free, (address, address + self._footprint(nbytes))])
        merged = pieces[:1]
        for start, stop in pieces[1:]:
            if start == merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self._free = merged

    @staticmethod
    def _footprint(nbytes: int) -> int:
        """Bytes of the lines for `nbytes` and of a guard line."""
        return (-(-nbytes // LINE_BYTES) + 1) * LINE_BYTES
