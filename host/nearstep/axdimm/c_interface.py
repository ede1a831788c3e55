"""Functions of `axdimm.h`, called by `libaxdimm.so`."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedDict

from nearstep.axdimm.runtime import Axdimm, Place, Pointer
from nearstep.errors import (
    ArgumentError,
    BusyError,
    ClosedDeviceError,
    DeviceError,
    ModeError,
    NearstepError,
)
from nearstep.storage.drive_errors import DriveFullError, StorageError
from nearstep.updater.run import UpdateRun

HEADER = Path(__file__).with_name("axdimm.h")

NUMBERS = {
    name: int(number)
    for name, number in re.findall(r"\b(AXDIMM_\w+) = (-?\d+)", HEADER.read_text("utf-8"))
}
"""Values of the header's enumerations."""

STATUSES: tuple[tuple[str, tuple[type[BaseException], ...]], ...] = (
    ("AXDIMM_CLOSED", (ClosedDeviceError,)),
    ("AXDIMM_MODE", (ModeError,)),
    ("AXDIMM_BUSY", (BusyError,)),
    ("AXDIMM_MEMORY", (DriveFullError, MemoryError)),
    ("AXDIMM_ARGUMENT", (ArgumentError,)),
    ("AXDIMM_STORAGE", (StorageError, OSError)),
    ("AXDIMM_DEVICE", (DeviceError,)),
    ("AXDIMM_FAILED", (BaseException,)),
)
"""Statuses and their errors; the first that matches applies."""

PLACES = {NUMBERS[f"AXDIMM_ON_{place.name}"]: place for place in Place}

MESSAGE_BYTES = 4095
"""Most bytes of a message, in UTF-8."""

DEVICE_BASE, SPACING = 1 << 63, 1 << 20
"""Addresses of AXDIMM and NVMe memory, which no program can dereference: each allocation begins at
a multiple of `SPACING`, with a gap before it. No address is used twice.
"""

_handles = itertools.count(1)
_issued, _next_address = 0, DEVICE_BASE + SPACING
_sessions: dict[int, _Session] = {}
_lock = threading.Lock()


class _Memory:
    """Memory of the program, for `np.asarray`."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class _Session:
    """A runtime, with the addresses and handles that C has.

    Methods have the names of the header's functions.
    """

    def __init__(self, runtime: Axdimm) -> None:
        self.runtime = runtime
        self.lock = threading.RLock()  # of all below
        self.allocations: SortedDict = SortedDict()  # pointers by their first address
        self.runs: dict[int, UpdateRun] = {}
        self.regions: dict[int, AbstractContextManager[None]] = {}

    def RegisterStorage(self, device: bytes | None, nbytes: int, flags: int, number: int) -> None:
        path, known = _path(device), NUMBERS["AXDIMM_BUFFERED"] | NUMBERS["AXDIMM_OVERWRITE"]
        if flags & ~known:
            raise ArgumentError(f"flags must be of {known:#x}, not {flags:#x}")
        with self.lock:
            found = self.runtime.RegisterStorage(
                path,
                nbytes or None,
                direct=not flags & NUMBERS["AXDIMM_BUFFERED"],
                overwrite=bool(flags & NUMBERS["AXDIMM_OVERWRITE"]),
            )
        if number:
            ctypes.c_int.from_address(number).value = found

    def MallocX(self, x: int, nbytes: int, channel: int, ptr: int) -> None:
        _check_address("ptr", ptr)
        if x not in PLACES:
            raise ArgumentError(f"x must be of {sorted(PLACES)}, not {x}")
        chosen = None if channel == NUMBERS["AXDIMM_ANY"] else channel
        with self.lock:
            pointer = self.runtime.MallocX(nbytes, chosen, on=PLACES[x])
            array = pointer.allocation.array
            address = _reserve(nbytes) if array is None else int(array.ctypes.data)
            self.allocations[address] = pointer
        ctypes.c_uint64.from_address(ptr).value = address

    def FreeX(self, ptr: int) -> None:
        with self.lock:
            pointer = self._found("ptr", ptr)
            if pointer is None:
                raise ArgumentError(f"ptr must be of MallocX, not {ptr:#x}")
            self.runtime.FreeX(pointer)
            del self.allocations[ptr]

    def MemcpyX2Y(self, dst: int, src: int, nbytes: int) -> None:
        self.runtime.MemcpyX2Y(
            self._memory("dst", dst, nbytes), self._memory("src", src, nbytes), nbytes
        )

    def CopyNVMeToGPU(self, dst: int, src: int, nbytes: int) -> None:
        self.runtime.CopyNVMeToGPU(self._pointer("dst", dst), self._pointer("src", src), nbytes)

    def CopyGPUToNVMe(self, dst: int, src: int, nbytes: int) -> None:
        self.runtime.CopyGPUToNVMe(self._pointer("dst", dst), self._pointer("src", src), nbytes)

    def SetArbiterAcc(self, channel: int) -> None:
        region = self.runtime.SetArbiterAcc(channel)
        region.__enter__()
        with self.lock:
            self.regions[channel] = region

    def SetArbiterNormal(self, channel: int) -> None:
        self.runtime.dimm.check_open("leave acceleration mode")
        self.runtime.dimm.check_channel(channel)
        with self.lock:
            region = self.regions.pop(channel, None)
        if region is None:
            raise ModeError("leave acceleration mode", channel, "acceleration", "normal")
        region.__exit__(None, None, None)

    def RunAdamOnAxdimmAsync(self, *arguments: Any) -> None:
        *addresses, nparams, lr, beta1, beta2, eps, weight_decay, t, channel, out = arguments
        p, m, v, g = (self._pointer(*each) for each in zip("pmvg", addresses, strict=True))
        run = self.runtime.RunAdamOnAxdimmAsync(
            p,
            m,
            v,
            g,
            nparams,
            t=t,
            channel=channel,
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
        )
        if out:
            with self.lock:
                handle = next(_handles)
                self.runs[handle] = run
            ctypes.c_uint64.from_address(out).value = handle

    def AxdimmWait(self, run: int) -> None:
        found = self.runs.get(run)
        if found is None:
            raise ArgumentError("run must have been started, and not have been waited for")
        try:
            found.wait()
        finally:
            if found.ended:  # else another wait may follow
                self.runs.pop(run, None)

    def AxdimmClose(self) -> None:
        errors: list[BaseException] = []
        for channel in list(self.regions):
            try:
                self.SetArbiterNormal(channel)
            except NearstepError as error:
                errors.append(error)
        self.runtime.close()
        if errors:
            raise errors[0]

    def _found(self, what: str, address: int) -> Pointer | None:
        """Return the pointer to an address; None for other memory of the program."""
        _check_address(what, address)
        with self.lock:
            for base in self.allocations.irange(maximum=address, reverse=True):
                pointer: Pointer = self.allocations[base]
                limit = pointer.allocation.nbytes + (address >= DEVICE_BASE)  # its end is a pointer
                if address - base < limit:
                    return pointer + int(address - base)
                break
        if address >= DEVICE_BASE:
            raise ArgumentError(f"{what} must be in an allocation that was not freed: {address:#x}")
        return None

    def _memory(self, what: str, address: int, nbytes: int) -> Pointer | NDArray[np.uint8]:
        pointer = self._found(what, address)
        if pointer is not None:
            return pointer
        if nbytes > DEVICE_BASE - address:
            raise ArgumentError(f"{what} must have an end: {nbytes} bytes at {address:#x}")
        return np.asarray(_Memory(address, nbytes))

    def _pointer(self, what: str, address: int) -> Pointer:
        pointer = self._found(what, address)
        if pointer is None:
            raise ArgumentError(f"{what} must be of MallocX, not {address:#x}")
        return pointer


def call(function: str, handle: int, *arguments: Any) -> tuple[int, str]:
    """Call a function of the header, and return its status and the message for `AxdimmError`.

    Parameters
    ----------
    handle : of the runtime.
    arguments : numbers; addresses as numbers, names as bytes or None.
    """
    try:
        if function == "Axdimm":
            _open(*arguments)
        else:
            getattr(_session(function, handle), function)(*arguments)
    except BaseException as error:  # no caller in C could catch it
        status = next(name for name, kinds in STATUSES if isinstance(error, kinds))
        return NUMBERS[status], _message(error)
    return NUMBERS["AXDIMM_OK"], ""


def _open(device: bytes | None, out: int) -> None:
    global _issued
    _check_address("runtime", out)
    session = _Session(Axdimm(_path(device)))
    with _lock:
        _issued = handle = next(_handles)
        _sessions[handle] = session
    ctypes.c_uint64.from_address(out).value = handle


def _reserve(nbytes: int) -> int:
    global _next_address
    with _lock:
        address = _next_address
        _next_address += (nbytes // SPACING + 2) * SPACING
    return address


def _session(function: str, handle: int) -> _Session:
    with _lock:
        closing = function == "AxdimmClose"
        session = _sessions.pop(handle, None) if closing else _sessions.get(handle)
    if session is None:
        if 0 < handle <= _issued:
            raise ClosedDeviceError(f"of runtime {handle}", f"call {function}")
        raise ArgumentError(f"runtime must be of Axdimm, not {handle:#x}")
    return session


def _path(given: bytes | None) -> str:
    if given is None:
        raise ArgumentError("device must not be NULL")
    return os.fsdecode(given)


def _check_address(what: str, address: int) -> None:
    if not address:
        raise ArgumentError(f"{what} must not be NULL")


def _message(error: BaseException) -> str:
    text = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
    if not isinstance(error, NearstepError):
        text = f"{type(error).__name__}: {text}"
    said = text.replace("\0", "?").encode("utf-8", "replace")
    return said[:MESSAGE_BYTES].decode("utf-8", "ignore")
