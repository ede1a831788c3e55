"""The runtime of the paper: its functions by their names, over a device and drives of nearstep.

X and Y of `MallocX`, `FreeX` and `MemcpyX2Y` are the place of a pointer: the host, the AXDIMM, a
GPU, or an NVMe SSD.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import nearstep.device
from nearstep.axdimm.device import AxdimmDevice
from nearstep.buffer import Buffer
from nearstep.errors import (
    ArgumentError,
    ClosedDeviceError,
    MismatchError,
    OutOfBoundsError,
    OverlapError,
)
from nearstep.scalars import is_whole
from nearstep.storage.aligned import aligned_bytes, flat_bytes
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive import QUEUE_DEPTH
from nearstep.storage.drive_errors import DriveFullError
from nearstep.storage.store import Store
from nearstep.updater.run import UpdateRun

OWNER = "AXDIMM runtime"
"""Owner's name of the drives."""

CHUNK_BYTES = 1 << 22
"""Bytes of one copy through the host, between places without a direct path."""


class Place(StrEnum):
    """Places X and Y.

    `GPU` is page-aligned memory of this process, which represents a GPU's, on machines with and
    without one: CUDA is not used. Drives read into it and write from it without a copy.
    """

    CPU = "CPU"
    AXDIMM = "AXDIMM"
    GPU = "GPU"
    NVME = "NVMe"


@dataclass(eq=False)
class _Allocation:
    """Memory or blocks allocated by `MallocX`.

    Attributes
    ----------
    array : memory of the host, which also stands for a GPU's.
    runtime : which made it; None: memory of the host.
    buffer : on the AXDIMM.
    ssd, name : on a drive: its number, and the tensor.
    """

    place: Place
    nbytes: int
    runtime: Axdimm | None = None
    array: NDArray[np.uint8] | None = None
    buffer: Buffer | None = None
    ssd: int = 0
    name: str = ""
    freed: bool = False


@dataclass(frozen=True)
class Pointer:
    """An address: `pointer + n` is n bytes further.

    Attributes
    ----------
    allocation : from `MallocX`.
    offset : in the allocation, in bytes.
    """

    allocation: _Allocation
    offset: int = 0

    @property
    def place(self) -> Place:
        return self.allocation.place

    def __add__(self, nbytes: int) -> Pointer:
        return replace(self, offset=self.offset + nbytes)

    def __repr__(self) -> str:
        return f"Pointer({self.place.value}, {self.offset} of {self.allocation.nbytes} bytes)"


class Axdimm:
    """The runtime: `Axdimm(device)` of Table 2.

    Page-aligned memory of the host stands for the GPU's, so that drives read into it and write from
    it without a copy, as with GPUDirect Storage. Contents of a registered drive are discarded when
    the runtime is closed, as in the paper, whose drives have no files; `nearstep.storage.store`
    keeps generations.

    Parameters
    ----------
    device : an AXDIMM, or the name of one, which is closed with the runtime.

    Attributes
    ----------
    copied : bytes by source and destination.

    Raises
    ------
    MismatchError : the device is no AXDIMM.

    Ref: AXDIMM, section 4.2 and Table 2.
    """

    def __init__(self, device: str | AxdimmDevice) -> None:
        dimm = nearstep.device.open_device(device) if isinstance(device, str) else device
        if not isinstance(dimm, AxdimmDevice):
            if isinstance(device, str):
                dimm.close()
            raise MismatchError("device", "an AXDIMM", type(dimm).__name__)
        self.dimm: AxdimmDevice = dimm
        self._owns = isinstance(device, str)
        self._stores: list[Store] = []
        self._promised: list[int] = []  # blocks of each drive
        self._names = 0
        self._closed = False
        self._copied: Counter[tuple[Place, Place]] = Counter()

    @property
    def copied(self) -> Mapping[tuple[Place, Place], int]:
        return dict(self._copied)

    @property
    def storages(self) -> tuple[Store, ...]:
        """Registered drives, in order."""
        return tuple(self._stores)

    def RegisterStorage(
        self,
        device: str | Path,
        nbytes: int | None = None,
        *,
        direct: bool = True,
        overwrite: bool = False,
        queue_depth: int = QUEUE_DEPTH,
    ) -> int:
        """Register an NVMe SSD, a block device or a file, and return its number.

        Parameters
        ----------
        nbytes : create a drive of this size. None: the drive exists.
        direct, overwrite, queue_depth : as for `Store.create`.

        Raises
        ------
        ArgumentError : the size is invalid.
        StorageError : as `Store.create` and `Store.open`.
        ClosedDeviceError

        Ref: AXDIMM, Table 2.
        """
        self._check_open("register storage")
        if nbytes is None:
            store = Store.open([device], owner=OWNER, direct=direct, queue_depth=queue_depth)
        else:
            store = Store.create(
                [device],
                drive_bytes=nbytes,
                owner=OWNER,
                direct=direct,
                overwrite=overwrite,
                queue_depth=queue_depth,
            )
        self._stores.append(store)
        self._promised.append(0)
        return len(self._stores) - 1

    def MallocX(
        self, nbytes: int, channel: int | None = None, *, on: Place = Place.AXDIMM
    ) -> Pointer:
        """Allocate `nbytes` on the device X. Contents are undefined, on a drive zeros.

        Parameters
        ----------
        channel : of the AXDIMM, default 0; or the number of an NVMe SSD, default the one with most
            free space. Other places have none.
        on : the device X.

        Raises
        ------
        ArgumentError : there is no such channel or drive, or the size is invalid.
        OutOfDeviceMemoryError : the AXDIMM's channel has too little free memory.
        DriveFullError : the drive has too little free space.
        ClosedDeviceError

        Ref: AXDIMM, Table 2.
        """
        self._check_open("allocate")
        if on not in list(Place):
            names = ", ".join(place.name for place in Place)
            raise ArgumentError(f"on must be a place ({names}), not {on!r}")
        place = Place(on)
        if not is_whole(nbytes) or nbytes < 1:
            raise ArgumentError(f"nbytes must be at least 1, not {nbytes!r}")
        if place is Place.AXDIMM:
            align = self.dimm.stripe_align
            buffer = self.dimm.alloc(nbytes, np.uint8, channel=channel or 0, align=align)
            return Pointer(_Allocation(place, nbytes, self, buffer=buffer))
        if place is Place.NVME:
            return Pointer(self._on_drive(nbytes, channel))
        if channel is not None:
            raise ArgumentError(f"the {place.value} has no channels, not {channel!r}")
        return Pointer(_Allocation(place, nbytes, array=aligned_bytes(nbytes)))

    def FreeX(self, ptr: Pointer) -> None:
        """Free an allocation by the pointer to its first byte.

        Raises
        ------
        ArgumentError : the pointer is no first byte, or the allocation was freed.
        BusyError : a run uses it.
        ClosedDeviceError

        Ref: AXDIMM, Table 2.
        """
        self._check_open("free")
        given = self._given("ptr", ptr)
        if ptr.offset:
            raise ArgumentError(f"{ptr!r} must point to the first byte of an allocation")
        if given.buffer is not None:
            given.buffer.free()
        elif given.place is Place.NVME:
            self._stores[given.ssd].remove(given.name)
            self._promised[given.ssd] -= -(-given.nbytes // BLOCK_BYTES)
        given.array, given.freed = None, True

    def MemcpyX2Y(
        self, dst: Pointer | NDArray[Any], src: Pointer | NDArray[Any], nbytes: int
    ) -> None:
        """Copy `nbytes` from `src` to `dst`, on any two devices, and return when the copy is
        complete.

        An array is accepted as a pointer to memory of the host.

        Raises
        ------
        OutOfBoundsError : an allocation is shorter. Nothing was copied.
        OverlapError : source and destination share bytes. Nothing was copied.
        ArgumentError : `dst` or `src` is no pointer or was freed, or `dst` cannot be written.
        ModeError : a channel of the AXDIMM is in acceleration mode.
        BusyError : a run uses the memory.
        StorageError : a drive failed.
        ClosedDeviceError

        Ref: AXDIMM, Table 2.
        """
        self._check_open("copy")
        if not is_whole(nbytes) or nbytes < 0:
            raise ArgumentError(f"nbytes must not be negative, not {nbytes!r}")
        to, source = self._pointer("dst", dst), self._pointer("src", src)
        for what, each in (("dst", to), ("src", source)):
            if not 0 <= each.offset <= each.offset + nbytes <= each.allocation.nbytes:
                limit = each.allocation.nbytes
                raise OutOfBoundsError(what, each.offset, each.offset + nbytes, limit)
        array = to.allocation.array
        if array is not None and not array.flags.writeable:
            raise ArgumentError("dst must be writeable")
        if _overlap(to, source, nbytes):
            raise OverlapError("dst", "src", to.offset)
        if nbytes:
            self._copy(to, source, nbytes)
            self._copied[source.place, to.place] += nbytes

    def CopyNVMeToGPU(self, dst: Pointer, src: Pointer, nbytes: int) -> None:
        """Copy from an NVMe SSD to the GPU, bypassing the memory of the host.

        Raises
        ------
        ArgumentError : `dst` is not on the GPU, or `src` on no SSD; or as `MemcpyX2Y`.
        StorageError : the drive failed.
        ClosedDeviceError

        Ref: AXDIMM, section 4.4.
        """
        self._check_places(dst, Place.GPU, src, Place.NVME)
        self.MemcpyX2Y(dst, src, nbytes)

    def CopyGPUToNVMe(self, dst: Pointer, src: Pointer, nbytes: int) -> None:
        """Copy from the GPU to an NVMe SSD, bypassing the memory of the host.

        Raises
        ------
        ArgumentError : `dst` is on no SSD, or `src` not on the GPU; or as `MemcpyX2Y`.
        StorageError : the drive failed.
        ClosedDeviceError

        Ref: AXDIMM, section 4.4.
        """
        self._check_places(dst, Place.NVME, src, Place.GPU)
        self.MemcpyX2Y(dst, src, nbytes)

    def SetArbiterAcc(self, channel: int) -> AbstractContextManager[None]:
        """Enter acceleration mode of a channel for the body of a `with` statement.

        Raises
        ------
        ArgumentError, ModeError, WaitTimeoutError, KernelError, ClosedDeviceError : as
            `AxdimmDevice.acceleration`.

        Ref: AXDIMM, Table 2.
        """
        return self.dimm.acceleration(channel)

    def RunAdamOnAxdimmAsync(
        self,
        p: Pointer,
        m: Pointer,
        v: Pointer,
        g: Pointer,
        nparams: int,
        *,
        t: int,
        channel: int = 0,
        **hyper: Any,
    ) -> UpdateRun:
        """Start an Adam step of `nparams` elements, float32, and return at once.

        Parameters
        ----------
        p, m, v, g : pointers to memory of the channel.
        t : the step, from 1.
        **hyper : as `AxdimmDevice.update`: `lr`, `betas`, `eps`, `weight_decay`.

        Raises
        ------
        OutOfBoundsError : an array is shorter.
        ArgumentError : an array is not on the channel, or as `AxdimmDevice.update`.
        ModeError, BusyError, ClosedDeviceError

        Ref: AXDIMM, Table 2.
        """
        self._check_open("run Adam")
        if not is_whole(nparams) or nparams < 1:
            raise ArgumentError(f"nparams must be at least 1, not {nparams!r}")
        self.dimm.check_channel(channel)
        arrays = {}
        for name, pointer in {"p": p, "g": g, "m": m, "v": v}.items():
            arrays[name] = self._floats(name, pointer, nparams, channel)
        return self.dimm.update("adam", arrays, step=t, **hyper)

    def close(self) -> None:
        """Close the drives, and the device if it was opened by name.

        Closing twice does nothing.
        """
        self._closed = True
        for store in self._stores:
            store.close()
        if self._owns:
            self.dimm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self, action: str) -> None:
        if self._closed:
            raise ClosedDeviceError(self.dimm.url, action)

    def _given(self, what: str, pointer: object) -> _Allocation:
        if not isinstance(pointer, Pointer):
            raise ArgumentError(f"{what} must be a pointer, not {type(pointer).__name__}")
        if pointer.allocation.freed:
            raise ArgumentError(f"{what} must not have been freed: {pointer!r}")
        if pointer.allocation.runtime not in (None, self):
            raise ArgumentError(f"{what} must be of this runtime, not of another: {pointer!r}")
        return pointer.allocation

    def _pointer(self, what: str, given: Pointer | NDArray[Any]) -> Pointer:
        if isinstance(given, np.ndarray):
            flat = flat_bytes(what, given)
            return Pointer(_Allocation(Place.CPU, flat.nbytes, array=flat))
        self._given(what, given)
        return given

    def _check_places(self, dst: Pointer, to: Place, src: Pointer, source: Place) -> None:
        for what, pointer, place in (("dst", dst, to), ("src", src, source)):
            found = self._given(what, pointer).place
            if found is not place:
                raise ArgumentError(f"{what} must be on {place.value}, not on {found.value}")

    def _on_drive(self, nbytes: int, ssd: int | None) -> _Allocation:
        if not self._stores:
            raise ArgumentError("there is no NVMe SSD: call RegisterStorage(device) first")
        room = [
            store.capacity_bytes // BLOCK_BYTES - 1 - promised  # one has the empty index
            for store, promised in zip(self._stores, self._promised, strict=True)
        ]
        number = room.index(max(room)) if ssd is None else ssd
        if not is_whole(number) or not 0 <= number < len(self._stores):
            raise ArgumentError(f"channel must be an SSD, 0 to {len(room) - 1}, not {ssd!r}")
        blocks = -(-nbytes // BLOCK_BYTES)
        if blocks > room[number]:
            raise DriveFullError(nbytes, room[number] * BLOCK_BYTES, f" on SSD {number}")
        name = f"{self._names}"
        self._stores[number].add(name, nbytes)
        self._names += 1
        self._promised[number] += blocks
        return _Allocation(Place.NVME, nbytes, self, ssd=number, name=name)

    def _floats(self, name: str, pointer: Pointer, count: int, channel: int) -> Buffer:
        given = self._given(name, pointer)
        if given.buffer is None:
            raise ArgumentError(f"{name} must be on AXDIMM, not on {given.place.value}")
        stop = pointer.offset + 4 * count
        if not 0 <= pointer.offset <= stop <= given.nbytes:
            raise OutOfBoundsError(name, pointer.offset, stop, given.nbytes)
        address = given.buffer.address + pointer.offset
        buffer = Buffer(self.dimm, address, (count,), np.float32, root=given.buffer)
        if self.dimm.channel_of(buffer) != channel:
            raise ArgumentError(f"{name} must be on channel {channel}")
        return buffer

    def _copy(self, dst: Pointer, src: Pointer, nbytes: int) -> None:
        """Copy directly if one side is memory of this process, else through a host buffer."""
        into, source = _memory(dst, nbytes), _memory(src, nbytes)
        if source is not None:
            self._store(dst, source)
        elif into is not None:
            self._load(src, into)
        else:
            held = aligned_bytes(min(nbytes, CHUNK_BYTES))
            for at in range(0, nbytes, CHUNK_BYTES):
                part = held[: min(CHUNK_BYTES, nbytes - at)]
                self._load(src + at, part)
                self._store(dst + at, part)

    def _store(self, dst: Pointer, data: NDArray[np.uint8]) -> None:
        given = dst.allocation
        if given.array is not None:
            given.array[dst.offset : dst.offset + data.nbytes] = data
        elif given.buffer is not None:
            given.buffer[dst.offset : dst.offset + data.nbytes].write(data)
        else:
            self._stores[given.ssd].write(given.name, data, dst.offset)

    def _load(self, src: Pointer, out: NDArray[np.uint8]) -> None:
        given = src.allocation
        if given.buffer is not None:
            given.buffer[src.offset : src.offset + out.nbytes].read(out)
        else:
            self._stores[given.ssd].read(given.name, out, src.offset)


def _memory(pointer: Pointer, nbytes: int) -> NDArray[np.uint8] | None:
    """Return the bytes as an array, if they are memory of this process."""
    array = pointer.allocation.array
    return None if array is None else array[pointer.offset : pointer.offset + nbytes]


def _overlap(first: Pointer, second: Pointer, nbytes: int) -> bool:
    mine, other = _memory(first, nbytes), _memory(second, nbytes)
    if mine is not None and other is not None:
        return bool(nbytes) and np.shares_memory(mine, other)
    disjoint = abs(first.offset - second.offset) >= nbytes
    return first.allocation is second.allocation and not disjoint
