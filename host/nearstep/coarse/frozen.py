"""Snapshots of tensors, taken while reductions continue."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearstep.buffer import Buffer
from nearstep.coarse.errors import SnapshotError, SnapshotSpaceError
from nearstep.coarse.rings import Rings
from nearstep.coarse.tensor import PoolTensor
from nearstep.errors import ArgumentError, OutOfDeviceMemoryError, WaitTimeoutError
from nearstep.scalars import is_whole
from nearstep_spec.coarse.config import PAGE_BYTES, PAGE_COUNT_BITS

OPEN_CYCLES = 1 << 18
"""Maximum cycles to open or close a snapshot: running writes, and one cycle per 32 pages."""

COPIED_BITS = 32
"""Pages that one read of `snapshot_copied` covers."""

PAGE_COUNT = 1 << PAGE_COUNT_BITS


@dataclass(frozen=True)
class FrozenRange:
    """The frozen pages of a device, at local addresses, and the area of their copies."""

    base: int
    pages: int
    area: Buffer


class Frozen:
    """A snapshot of tensors, made by `CoarsePool.freeze`.

    A page is copied to an area before its first change; unchanged pages are read in place.

    Attributes
    ----------
    shapes : tuple[tuple[int, ...], ...]. Of the tensors.
    devices : number of devices.
    pages : number of frozen pages, over all devices.

    Ref: COARSE paper, section IV-A (copies of a version before writes).
    """

    def __init__(self, rings: Rings, tensors: Sequence[PoolTensor]) -> None:
        self._rings = rings
        self._device = rings.device
        self.devices = rings.devices
        self.shapes = tuple(tensor.shape for tensor in tensors)
        self._ranges: list[FrozenRange] = []
        self._opened: list[int] = []
        self._closed = False
        self._reading = threading.Lock()
        # The front buffers must be of one version on all devices: no job may be submitted between.
        with rings.lock:
            rings.look()
            self._places = [
                [rings.device.local_address(tensor.front(d).address, d) for tensor in tensors]
                for d in range(self.devices)
            ]
            self._sizes = [tensor.nbytes for tensor in tensors]
            try:
                self._reserve()
                for device in range(self.devices):
                    self._open(device)
            except BaseException:
                self.close()
                raise

    @property
    def areas(self) -> tuple[Buffer, ...]:
        """Buffers of the copied pages, by device."""
        return tuple(each.area for each in self._ranges)

    @property
    def pages(self) -> int:
        return sum(each.pages for each in self._ranges)

    def read(self, tensor: int, device: int) -> NDArray[np.float32]:
        """Return the frozen values of a tensor, by number, on a device.

        Raises
        ------
        ArgumentError : there is no such tensor or device.
        SnapshotError : the snapshot is closed, by host or device, or a page could not be copied.
        """
        if self._closed:
            raise SnapshotError("the snapshot is closed")
        self._device.check_open("read a snapshot")
        for what, number, limit in (
            ("tensor", tensor, len(self.shapes)),
            ("device", device, self.devices),
        ):
            if not is_whole(number) or not 0 <= number < limit:
                raise ArgumentError(f"{what} must be from 0 to {limit - 1}, not {number!r}")
        where, start = self._ranges[device], self._places[device][tensor]
        stop = start + self._sizes[tensor]
        first = (start - where.base) // PAGE_BYTES // COPIED_BITS * COPIED_BITS
        pieces = [
            self._read_pages(device, page)
            for page in range(first, -(-(stop - where.base) // PAGE_BYTES), COPIED_BITS)
        ]
        begin = start - where.base - first * PAGE_BYTES
        whole = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
        return whole[begin:][: stop - start].view(np.float32).reshape(self.shapes[tensor])

    def close(self) -> None:
        """Close the snapshot: no more pages are copied. Further calls do nothing.

        Raises
        ------
        SnapshotError : a copy did not end. The space for copies is not freed.
        """
        self._closed = True
        if self._device.closed:
            return
        opened = [self._device.nodes[device].pool for device in self._opened]
        self._opened.clear()
        for pool in opened:
            pool.snapshot_control.close = 1
        for pool in opened:  # until then a page may be in flight to the area
            try:
                self._rings.wait_any([pool.snapshot.poll(open=0)], OPEN_CYCLES)
            except WaitTimeoutError as error:
                raise SnapshotError(f"a snapshot did not close: {error}") from error
        for each in self._ranges:
            if not each.area.freed:
                each.area.free()

    def _reserve(self) -> None:
        """Determine the pages to freeze on every device, and allocate space for their copies."""
        most = self._device.config.snapshot_pages
        for device in range(self.devices):
            places = [*zip(self._places[device], self._sizes, strict=True)]
            base = min(start for start, _ in places) // PAGE_BYTES * PAGE_BYTES
            limit = max(start + size for start, size in places)
            pages = max(1, -(-(limit - base) // PAGE_BYTES))
            if pages > most:
                raise SnapshotSpaceError(
                    f"a snapshot must be of at most {most} pages of {PAGE_BYTES} bytes on each "
                    f"device, from the first tensor to the last, not {pages}"
                )
            try:
                area = self._device.alloc(
                    pages * PAGE_BYTES, np.uint8, channel=device, align=PAGE_BYTES
                )
            except OutOfDeviceMemoryError as error:
                raise SnapshotSpaceError(
                    f"no space for the copies of {pages} pages on device {device}: {error}"
                ) from error
            self._ranges.append(FrozenRange(base, pages, area))

    def _open(self, device: int) -> None:
        pool, where = self._device.nodes[device].pool, self._ranges[device]
        if pool.snapshot.open:
            raise SnapshotError(f"a snapshot is open on device {device}: close it first")
        pool.snapshot_base.value = where.base
        pool.snapshot_area.value = self._device.local_address(where.area.address, device)
        pool.snapshot_pages.value = where.pages
        pool.start.go = 1
        self._opened.append(device)
        try:
            self._rings.wait_any([pool.snapshot.poll(open=1)], OPEN_CYCLES)
        except WaitTimeoutError as error:
            raise SnapshotError(f"device {device} did not open the snapshot: {error}") from error

    def _read_pages(self, device: int, first: int) -> NDArray[np.uint8]:
        """Return up to 32 frozen pages, from `first`, a multiple of 32."""
        where, pool = self._ranges[device], self._device.nodes[device].pool
        origin = self._device.backend.regions[device][0]
        count = min(COPIED_BITS, where.pages - first)
        pages = np.empty((count, PAGE_BYTES), np.uint8)
        read = self._device.backend.read_memory
        read(origin + where.base + first * PAGE_BYTES, pages.reshape(-1))
        # After the read: a page copied before the read is marked, one copied later was read intact.
        with self._reading:  # no other thread changes `page` between the write and the read
            pool.page.number = first // COPIED_BITS
            copied = pool.snapshot_copied.value
        state = self._written(device)
        if not state["open"]:
            raise SnapshotError(f"device {device} has closed the snapshot")
        if state["failed"]:
            raise SnapshotError(f"device {device} could not copy a page before it changed")
        for page in range(count):
            if copied >> page & 1:
                read(where.area.address + (first + page) * PAGE_BYTES, pages[page])
        return pages.reshape(-1)

    def _written(self, device: int) -> dict[str, int]:
        """Return the snapshot's state once all pages marked so far are written to the area; the
        last two writes can be running."""
        register = self._device.nodes[device].pool.snapshot
        state = register.get()
        marked = state["taken"]
        while (state["written"] - marked) % PAGE_COUNT >= PAGE_COUNT // 2:
            state = register.get()
        return state
