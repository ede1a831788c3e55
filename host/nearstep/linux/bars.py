"""The card as it ships: accesses of a host become packets to its endpoint, or the model's accesses.

The endpoint is a completer: it makes no request of its own. What the card sends to the host is a
message of MSI-X at the end of each run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from nearstep.backends.endpoint import EndpointBackend
from nearstep.device import open_backend
from nearstep.errors import (
    MismatchError,
    NearstepError,
    PostedWriteError,
    RegisterAccessError,
    WaitTimeoutError,
)
from nearstep.linux.pci import (
    BAR_32,
    BAR_64,
    MSIX_CONTROL,
    MSIX_ENABLE,
    MSIX_MASK,
    PREFETCHABLE,
    Identity,
    Msix,
    PciFunction,
)
from nearstep.registers import BlockRegisters
from nearstep_spec.pcie import (
    MEMORY_BAR,
    MSIX_PBA_OFFSET,
    MSIX_TABLE_OFFSET,
    REGISTER_BAR,
    REGISTER_BYTES,
)

Result = TypeVar("Result")

IDENTITY = Identity(vendor=0x10EE, device=0x9034, class_code=0x058000,
                    subsystem_vendor=0x10EE, subsystem=0x0007)  # fmt: skip
"""Defaults of the hard block's core for Gen3 x4: the block has the numbers, the RTL behind it has
none. Not read from a board."""

RUN_VECTOR = 0
ACCESS_BYTES = 4096  # of a request of PCIe
ANSWER_S = 2.0
"""Seconds after which the host gets an answer in the card's place; QEMU gives a message 5 s."""

POSTED = 32
"""Writes under way, as many as the card's hard block buffers; the next one waits."""

SLICE_CYCLES, MESSAGE_CYCLES = 1024, 64
"""Device cycles of a run between two accesses of the host; and for a message to leave."""


@dataclass
class Counters:
    """What a card was asked, for tests and tables.

    Attributes
    ----------
    refused : accesses that the card refused or could not carry out.
    unanswered : accesses that took longer than `ANSWER_S`.
    last : the last error of these, as text.
    """

    reads: int = 0
    writes: int = 0
    interrupts: int = 0
    refused: int = 0
    unanswered: int = 0
    last: str = ""

    def __str__(self) -> str:
        failed = f", {self.refused} refused and {self.unanswered} unanswered"
        return (
            f"{self.writes} writes and {self.reads} reads of BARs, {self.interrupts} interrupts"
            f"{failed + ', the last: ' + self.last if self.last else ''}"
        )


class CardFunction(PciFunction):
    """A card's own BARs: 0 has the registers, 2 the memory.

    One thread uses the card: it carries out accesses in their order, and lets device time pass in
    between as long as a run has not ended. A write is posted. A read waits for the card, at most
    `ANSWER_S`; then, and if the card refuses it, all bits of the answer are ones, as those of a
    root port. The page of the MSI-X table is the virtual machine's: here it reads as zeros.

    Parameters
    ----------
    card : closed with the function; its memory keeps its contents over resets.

    Attributes
    ----------
    config : of the card.
    counters
    """

    access_bytes = ACCESS_BYTES

    def __init__(self, card: EndpointBackend) -> None:
        msix = Msix(vectors=1, bar=REGISTER_BAR, table=MSIX_TABLE_OFFSET, pending=MSIX_PBA_OFFSET)
        bars = {REGISTER_BAR: REGISTER_BYTES, MEMORY_BAR: card.capacity_bytes}
        kinds = {REGISTER_BAR: BAR_32, MEMORY_BAR: BAR_64 | PREFETCHABLE}
        super().__init__(IDENTITY, bars, msix, kinds)
        self.config = card.config
        self.counters = Counters()
        self._card = card
        card.claim(0, card.capacity_bytes)
        ((name, (base, registers)),) = card.config.maps().items()
        kernel = BlockRegisters(card, name, base, registers)
        self._start, self._idle = kernel.start.address, kernel.status.poll(busy=0)
        self._sent = card.messages
        self._runs = False
        self._life = object()  # another one after each reset
        self._lock = threading.Lock()  # held while the bus is used
        self._room = threading.BoundedSemaphore(POSTED)
        self._link = ThreadPoolExecutor(1, "card")
        self._submit(self._allow)

    def read_bar(self, number: int, offset: int, nbytes: int) -> bytes:
        self.counters.reads += 1
        if _is_msix(number, offset, nbytes):
            return bytes(nbytes)
        data = None
        try:
            data = self._submit(partial(self._read, number, offset, nbytes)).result(ANSWER_S)
        except TimeoutError:
            self._give_up(f"read of {nbytes} bytes at {offset:#x} of BAR {number}")
        return b"\xff" * nbytes if data is None else data

    def write_bar(self, number: int, offset: int, data: bytes) -> None:
        self.counters.writes += 1
        if _is_msix(number, offset, len(data)):
            return
        if not self._room.acquire(timeout=ANSWER_S):
            self._give_up(f"write of {len(data)} bytes at {offset:#x} of BAR {number}")
            return
        done = self._submit(partial(self._write, number, offset, data))
        done.add_done_callback(lambda _: self._room.release())

    def write_config(self, offset: int, data: bytes) -> None:
        super().write_config(offset, data)
        self._submit(self._allow)

    def reset(self) -> None:
        with self._lock:
            self._life = object()
        super().reset()
        with suppress(TimeoutError):  # accesses after it wait for its end
            self._submit(self._reset).result(ANSWER_S)

    def close(self) -> None:
        with self._lock:
            self._life = object()
        self._link.shutdown(cancel_futures=True)
        self._card.close()

    def _submit(self, access: Callable[[], Result]) -> Future[Result | None]:
        done = self._link.submit(self._carry_out, self._life, access)
        done.add_done_callback(_check)
        return done

    def _carry_out(self, life: object, access: Callable[[], Result]) -> Result | None:
        """Carry out an access in the link's thread, unless there was a reset; None if it fails."""
        while life is self._life:
            try:
                return access()
            except PostedWriteError as error:  # of an earlier write; this access is made again
                self._refuse(error)
            except NearstepError as error:
                self._refuse(error)
                break
            finally:
                self._deliver(life)
        return None

    def _deliver(self, life: object) -> None:
        """Send the host the messages that the card has sent since the last call."""
        sent = self._card.messages
        new, self._sent = sent - self._sent, sent
        with self._lock:
            for _ in range(new if life is self._life else 0):
                self.counters.interrupts += 1
                self.bus.interrupt(RUN_VECTOR)

    def _refuse(self, error: NearstepError) -> None:
        self.counters.refused += 1
        self.counters.last = str(error)

    def _give_up(self, what: str) -> None:
        self.counters.unanswered += 1
        self.counters.last = f"{what}: no answer in {ANSWER_S} s"

    def _read(self, number: int, offset: int, nbytes: int) -> bytes:
        if number == MEMORY_BAR:
            out = np.empty(nbytes, np.uint8)
            self._card.read_memory(offset, out)
            return out.tobytes()
        words = [self._card.read_register(at) for at in _words(offset, nbytes)]
        return b"".join(word.to_bytes(4, "little") for word in words)

    def _write(self, number: int, offset: int, data: bytes) -> None:
        if number == MEMORY_BAR:
            self._card.write_memory(offset, np.frombuffer(data, np.uint8))
            return
        words = _words(offset, len(data))
        self._card.flush()  # so that no error of another write makes this one be made twice
        for at in words:
            word = data[at - offset :][:4]
            self._card.write_register(at, int.from_bytes(word, "little"))
            if at == self._start:
                self._go_on()

    def _go_on(self) -> None:
        """Let a run go on behind the accesses that wait now."""
        if not self._runs:
            self._runs = True
            self._submit(self._run)

    def _run(self) -> None:
        self._runs = False
        try:
            slice_ = 1 if self._card.cycles is None else SLICE_CYCLES
            self._card.wait([self._idle], slice_)
        except WaitTimeoutError:
            self._go_on()
        else:
            self._card.advance(MESSAGE_CYCLES)

    def _allow(self) -> None:
        """Tell the card what configuration space says of messages."""
        control = int.from_bytes(self.read_config(MSIX_CONTROL, 2), "little")
        enabled = self.masters_bus and bool(control & MSIX_ENABLE)
        self._card.allow_messages(enabled=enabled, masked=bool(control & MSIX_MASK))
        if self._card.cycles is not None:
            self._card.advance(MESSAGE_CYCLES)

    def _reset(self) -> None:
        self._runs = False
        self._card.reset()
        self._allow()


def open_card(url: str) -> CardFunction:
    """Open a card for a virtual machine that drives the BARs itself.

    Parameters
    ----------
    url : `golden:smartssd` or `sim:smartssd?bus=pcie`, of one card.

    Raises
    ------
    MismatchError : the device is no card behind a PCIe endpoint.
    UrlError, OptionError : the name is invalid.
    """
    card = open_backend(url)
    try:
        if not isinstance(card, EndpointBackend):
            known = "golden:smartssd or sim:smartssd?bus=pcie, with one card"
            raise MismatchError("device with BARs", known, url)
        return CardFunction(card)
    except BaseException:
        card.close()
        raise


def _check(done: Future[Result | None]) -> None:
    """Show an error that is a defect of this module, also of what nobody waits for."""
    if not done.cancelled():
        done.result()


def _is_msix(number: int, offset: int, nbytes: int) -> bool:
    return number == REGISTER_BAR and offset + nbytes > MSIX_TABLE_OFFSET


def _words(offset: int, nbytes: int) -> range:
    """Addresses of the words of an access of registers."""
    if nbytes not in (4, 8) or offset % 4:
        raise RegisterAccessError(offset, nbytes, "of 4 or 8 bytes, in whole words")
    return range(offset, offset + nbytes, 4)
