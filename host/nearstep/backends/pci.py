"""`pci:`: a card in a slot of this machine, such as `pci:0000:01:00.0`, without a driver of its own
in the kernel.
"""

from __future__ import annotations

import mmap
import os
import select
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Poll
from nearstep.backends.options import AnyTarget, Family, Variant, parse_options
from nearstep.backends.vfio import DRIVER, VfioFunction
from nearstep.errors import DeviceError, MismatchError, UrlError, WaitTimeoutError
from nearstep_spec.codec import Nested, Option
from nearstep_spec.pcie import MEMORY_BAR, REGISTER_BAR, REGISTER_BYTES
from nearstep_spec.smartssd.config import SmartssdConfig

SLOT = "SLOT"
"""Placeholder of a function's address in lists of devices."""

ACCESSES: tuple[Literal["B"], Literal["I"], Literal["Q"]] = ("B", "I", "Q")
"""Types of loads and stores, of 1, 4 and 8 bytes."""

FUNCTIONS = Path("/sys/bus/pci/devices")
NOTHING = b"\xff\xff\xff\xff"
"""What a read returns that nothing has answered."""


SLEEP_S = 0.001
"""Most seconds of a step of a wait for an interrupt."""


class SilentCardError(DeviceError):
    """A card that does not answer: it was removed or has stopped, or its slot is disabled."""

    def __init__(self, action: str) -> None:
        super().__init__(f"{action}: the card does not answer, not even with its ID")


class Slot(Protocol):
    """Access to the BARs of a function."""

    def read(self, bar: int, offset: int, nbytes: int) -> bytes:
        """Read a BAR; a register with one access of 4 bytes."""

    def write(self, bar: int, offset: int, data: bytes) -> None:
        """Write a BAR, behind earlier writes; a register with one access of 4 bytes."""

    def reset(self) -> None:
        """Reset the function.

        Raises
        ------
        DeviceError : the slot cannot.
        """

    def sleep(self) -> None:
        """Sleep until an interrupt, or for `SLEEP_S`; not at all if the slot has no interrupts."""

    def close(self) -> None: ...


class MappedSlot(ABC):
    """BARs that are mapped.

    Loads and stores have 8 bytes where they can: a copy by the C library may use single bytes.

    Parameters
    ----------
    memory_bytes : least size of the memory BAR.

    Attributes
    ----------
    driver : the kernel's driver that must have the function, or `none`.

    Raises
    ------
    UrlError : there is no such function, or its files cannot be opened.
    MismatchError : another driver has it, or its BARs are others.
    """

    driver: ClassVar[str]

    def __init__(self, name: str, memory_bytes: int) -> None:
        self._folder = FUNCTIONS / name
        if not name or not self._folder.is_dir():
            raise UrlError(f"pci:{name}", "there is no such function", sorted(_functions()))
        driver = self._folder / "driver"
        has = driver.resolve().name if driver.exists() else "none"
        if has != self.driver:
            raise MismatchError(f"driver of {name}", self.driver, has)
        self._views: dict[int, dict[str, memoryview]] = {}
        self._open = ExitStack()
        try:
            self._prepare()
            for bar, least in ((REGISTER_BAR, REGISTER_BYTES), (MEMORY_BAR, memory_bytes)):
                self._map(bar, least)
        except OSError as error:
            self._open.close()
            raise UrlError(f"pci:{name}", f"{error.filename}: {error.strerror}") from error
        except BaseException:
            self._open.close()
            raise

    @abstractmethod
    def _prepare(self) -> None:
        """Make the function ready for accesses."""

    @abstractmethod
    def _file(self, bar: int) -> tuple[int, int, int]:
        """Bytes of a BAR, 0 if it is missing, a file that has it, and where it begins there."""

    def _map(self, bar: int, least: int) -> None:
        nbytes, file, at = self._file(bar)
        if nbytes < least:
            raise MismatchError(f"BAR {bar} of {self._folder.name}", f"{least} bytes", nbytes)
        pages = self._open.enter_context(mmap.mmap(file, nbytes, offset=at))
        whole = self._open.enter_context(memoryview(pages))
        self._views[bar] = {each: self._open.enter_context(whole.cast(each)) for each in ACCESSES}

    def read(self, bar: int, offset: int, nbytes: int) -> bytes:
        views = self._views[bar]
        parts = (
            np.array(views[kind][first:last].tolist(), kind).tobytes()
            for kind, first, last in _accesses(offset, nbytes)
        )
        return b"".join(parts)

    def write(self, bar: int, offset: int, data: bytes) -> None:
        at = 0
        for kind, first, last in _accesses(offset, len(data)):
            view = self._views[bar][kind]
            words = memoryview(data[at : at + (last - first) * view.itemsize]).cast(kind)
            for index, word in enumerate(words, first):
                view[index] = word
            at += words.nbytes

    def close(self) -> None:
        self._open.close()


class ResourceSlot(MappedSlot):
    """BARs by the resource files of sysfs, which need the rights of root."""

    driver = "none"

    def _prepare(self) -> None:
        enabled = self._folder / "enable"
        if int(enabled.read_text()) == 0:
            enabled.write_text("1")

    def _file(self, bar: int) -> tuple[int, int, int]:
        path = self._folder / f"resource{bar}"
        if not path.exists():
            return 0, -1, 0
        file = os.open(path, os.O_RDWR | os.O_SYNC)
        self._open.callback(os.close, file)
        return path.stat().st_size, file, 0

    def sleep(self) -> None:
        pass

    def reset(self) -> None:
        try:
            (self._folder / "reset").write_text("1")
        except OSError as error:
            reason = f"the kernel knows no reset of {self._folder.name}: {error.strerror}"
            raise DeviceError(reason) from None


class VfioSlot(MappedSlot):
    """BARs and the interrupt by VFIO, which needs the rights for the nodes of /dev/vfio."""

    driver = DRIVER

    def _prepare(self) -> None:
        self._function = VfioFunction(self._folder)
        self._open.callback(self._function.close)
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._open.callback(os.close, self._event)
        self._function.listen(self._event)

    def _file(self, bar: int) -> tuple[int, int, int]:
        nbytes, at, mappable = self._function.region(bar)
        if nbytes and not mappable:
            raise MismatchError(f"BAR {bar} of {self._folder.name}", "mappable", "of whole pages")
        return nbytes, self._function.file, at

    def sleep(self) -> None:
        if select.select([self._event], [], [], SLEEP_S)[0]:
            os.eventfd_read(self._event)

    def reset(self) -> None:
        try:
            self._function.reset()
        except OSError as error:
            raise DeviceError(f"{error.filename}: {error.strerror}") from None


def _functions() -> list[str]:
    return [each.name for each in FUNCTIONS.iterdir()] if FUNCTIONS.is_dir() else []


def _accesses(offset: int, nbytes: int) -> Iterator[tuple[Literal["B", "I", "Q"], int, int]]:
    """Words of 8 bytes, and single bytes at both ends; or one word of 4 bytes: type, first, end."""
    if nbytes == 4 and offset % 4 == 0:
        yield "I", offset // 4, offset // 4 + 1
        return
    end = offset + nbytes
    first = min(-(-offset // 8) * 8, end)
    last = max(end // 8 * 8, first)
    yield "B", offset, first
    yield "Q", first // 8, last // 8
    yield "B", last, end


class PciBackend(Backend):
    """A card whose BARs a slot gives access to.

    Writes have no answer. A step of a wait is a look at a register and the slot's sleep, and takes
    more than a cycle of the card.

    Parameters
    ----------
    slot : closed with the backend.

    Raises
    ------
    SilentCardError : from every read, and from the constructor.
    """

    family = "smartssd"
    config: SmartssdConfig

    def __init__(self, slot: Slot, config: SmartssdConfig) -> None:
        self.config = config
        self.capacity_bytes = config.memory_bytes
        self._slot: Slot = slot
        self.read_register(0)

    @property
    def cycles(self) -> int | None:
        return None

    def read_register(self, address: int) -> int:
        word = self._slot.read(REGISTER_BAR, address, 4)
        self._check(word, f"read of the register at {address:#x}")
        return int.from_bytes(word, "little")

    def write_register(self, address: int, value: int) -> None:
        self._slot.write(REGISTER_BAR, address, value.to_bytes(4, "little"))

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        data = self._slot.read(MEMORY_BAR, address, out.size)
        self._check(data, f"read of {out.size} bytes of memory at {address:#x}")
        out[:] = np.frombuffer(data, np.uint8)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self._slot.write(MEMORY_BAR, address, data.tobytes())

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        for _ in range(max_cycles + 1):
            if any(poll.holds(self.read_register(poll.address)) for poll in polls):
                return
            self._slot.sleep()
        raise WaitTimeoutError(" or ".join(map(str, polls)), max_cycles, unit="steps")

    def reset(self) -> None:
        self._slot.reset()

    def close(self) -> None:
        self._slot.close()

    def _check(self, data: bytes, action: str) -> None:
        ends_with_ones = not data[-4:].strip(NOTHING)
        if ends_with_ones and self._slot.read(REGISTER_BAR, 0, 4) == NOTHING:
            raise SilentCardError(action)


@dataclass(frozen=True, kw_only=True)
class PciOptions:
    """Options of `pci:SLOT`: those of the card, which must be as its hardware has been made."""

    access: Annotated[
        Literal["resource", "vfio"],
        Option(meaning="how BARs are mapped: resource files of sysfs, or VFIO with the interrupt"),
    ] = "resource"

    card: Annotated[SmartssdConfig, Nested(omit=("address_width", "windows", "bursts_ahead"))] = (
        field(default_factory=SmartssdConfig)
    )


DEVICES = AnyTarget(
    SLOT,
    Family(
        f"pci:{SLOT}",
        (
            Variant(
                options=PciOptions,
                opens="nearstep.backends.pci:open_device",
                summary="a SmartSSD card in a slot of this machine",
            ),
        ),
    ),
)
"""Devices of this backend."""


def open_device(name: str, options: dict[str, str]) -> PciBackend:
    """Open the card at `pci:<domain:bus:device.function>`.

    Raises
    ------
    OptionError
    UrlError, MismatchError : as `MappedSlot` and `VfioFunction`.
    SilentCardError
    """
    chosen = parse_options(PciOptions, f"pci:{name}", options)
    kind = VfioSlot if chosen.access == "vfio" else ResourceSlot
    slot = kind(name, chosen.card.memory_bytes)
    try:
        return PciBackend(slot, chosen.card)
    except BaseException:
        slot.close()
        raise
