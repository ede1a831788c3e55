"""An NVMe controller: registers, queues and completions; commands are in `admin` and namespaces."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nearstep.errors import ArgumentError
from nearstep.linux.nvme.namespace import Namespace
from nearstep.linux.nvme.standard import (
    IO_QUEUES,
    PAGE_BYTES,
    Register,
    Status,
    StatusError,
)
from nearstep.linux.nvme.transfer import Command
from nearstep.linux.pci import DmaError, Identity, Msix, PciFunction
from nearstep_spec.nvme import (
    AQA_MASK,
    BAR_BYTES,
    CAP,
    COMMAND_SETS,
    ENABLE,
    FATAL,
    MSIX_PENDING,
    MSIX_TABLE,
    NO_SUCH_DOORBELL,
    NO_SUCH_VALUE,
    READY,
    READY_TIME,
    SHUTDOWN_BUSY,
    SHUTDOWN_DONE,
    completed,
)
from nearstep_spec.nvme import COMPLETION_BYTES as COMPLETION_BYTES
from nearstep_spec.nvme import ENTRY_BYTES as ENTRY_BYTES
from nearstep_spec.nvme import VERSION as VERSION

IDENTITY = Identity(
    vendor=0x1B36, device=0x0010, class_code=0x010802, revision=1,
    subsystem_vendor=0x1AF4, subsystem=0x1100,
)  # fmt: skip
"""Vendor and device of QEMU's NVMe controller: Linux has quirks for some others."""

SERIAL_BYTES = 20


@dataclass(eq=False)
class CompletionQueue:
    """A completion queue in memory of the host; `vector` is None without interrupts."""

    number: int
    base: int
    size: int
    vector: int | None
    head: int = 0
    tail: int = 0
    phase: int = 1

    @property
    def is_full(self) -> bool:
        return (self.tail + 1) % self.size == self.head


@dataclass(eq=False)
class SubmissionQueue:
    """A submission queue in memory of the host, and its command that is being executed."""

    number: int
    base: int
    size: int
    completions: CompletionQueue
    head: int = 0
    tail: int = 0
    alive: bool = True
    flying: Flight | None = None

    @property
    def pending(self) -> int:
        """Entries that have not been fetched."""
        return (self.tail - self.head) % self.size


@dataclass(eq=False)
class Flight:
    """Memory of the host for one command: nothing can be accessed once the command is aborted."""

    controller: NvmeController
    alive: bool = True
    identifier: int = 0

    def read(self, address: int, nbytes: int) -> bytes:
        with self.controller.lock:
            self._check("read", address, nbytes)
            return self.controller.dma_read(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        with self.controller.lock:
            self._check("write", address, len(data))
            self.controller.dma_write(address, data)

    def _check(self, action: str, address: int, nbytes: int) -> None:
        if not self.alive:
            raise DmaError(action, address, nbytes, "the command was aborted")


@dataclass
class Counters:
    """What a controller has done, for tests and tables."""

    mmio_reads: int = 0
    mmio_writes: int = 0
    doorbells: int = 0
    commands: int = 0
    completions: int = 0
    interrupts: int = 0
    by_opcode: dict[tuple[int, int], int] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.commands} commands, {self.mmio_writes} writes and {self.mmio_reads} reads of "
            f"registers, {self.interrupts} interrupts"
        )


class Commands(Protocol):
    """Executes commands, without knowledge of registers and entries of queues."""

    def execute(self, queue: SubmissionQueue, command: Command) -> int | None:
        """Execute a command of the admin queue; return DW0 and DW1 of the completion, or None if
        the command is completed later.

        Raises
        ------
        StatusError
        """

    def execute_io(self, queue: SubmissionQueue, command: Command) -> int | None:
        """Execute a command of another queue; as `execute`."""

    def report(self, information: int) -> None:
        """Report a wrong doorbell to the host, if it asked for events."""

    def complete_events(self) -> None:
        """Complete a request for an event if there are both, and room."""

    def reset(self) -> None:
        """Forget what a controller reset ends."""


class NvmeController(PciFunction):
    """A controller whose commands run in two threads: one of the admin queue, one of I/O queues.

    A write of a register returns at once. A reset ends every queue and every access to memory of
    the host immediately; a command that the card executes then ends without a completion.

    Parameters
    ----------
    namespaces : of NSID 1 and so on; closed with the controller.
    commands : makes what executes commands.
    serial : 1 to 20 letters and digits; different for each card of a host.

    Attributes
    ----------
    lock : of all state below; threads wait for changes of it.
    serial

    Raises
    ------
    ArgumentError : the serial number is invalid.
    """

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        commands: Callable[[NvmeController], Commands],
        serial: str,
    ) -> None:
        if not (0 < len(serial) <= SERIAL_BYTES and serial.isascii() and serial.isalnum()):
            raise ArgumentError(
                f"serial must be 1 to {SERIAL_BYTES} letters and digits, not {serial!r}"
            )
        msix = Msix(vectors=IO_QUEUES + 1, bar=0, table=MSIX_TABLE, pending=MSIX_PENDING)
        super().__init__(IDENTITY, {0: BAR_BYTES}, msix)
        self.namespaces = tuple(namespaces)
        for number, each in enumerate(self.namespaces, 1):
            each.number, each.serial = number, serial
        self.serial = serial
        self.lock = threading.Condition(threading.RLock())
        self.counters = Counters()
        self.submissions: dict[int, SubmissionQueue] = {}
        self.completions: dict[int, CompletionQueue] = {}
        self._registers = {Register.CC: 0, Register.AQA: 0, Register.ASQ: 0, Register.ACQ: 0}
        self._status = 0
        self._shutting = False
        self._closed = False
        self._turn = 0
        self.admin: Commands = commands(self)
        self._threads = [
            threading.Thread(target=self._work, args=(admin,), name=f"nvme {name}", daemon=True)
            for admin, name in ((True, "admin"), (False, "io"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def enabled_sets(self) -> int:
        """CC.CSS: 0 for NVM alone, 6 for all."""
        return self._registers[Register.CC] >> 4 & 7

    @property
    def queue_entries(self) -> tuple[int, int]:
        """Sizes of an entry of a submission and of a completion queue, as powers of two."""
        cc = self._registers[Register.CC]
        return cc >> 16 & 0xF, cc >> 20 & 0xF

    def write_config(self, offset: int, data: bytes) -> None:
        """As of `PciFunction`; once bus mastering is off, no access to memory is under way."""
        with self.lock:
            super().write_config(offset, data)

    def read_bar(self, number: int, offset: int, nbytes: int) -> bytes:
        with self.lock:
            self.counters.mmio_reads += 1
            held = self._registers
            data = bytearray(max(offset + nbytes, Register.CRTO + 4))
            struct.pack_into("<QI", data, 0, CAP, VERSION)
            struct.pack_into("<III", data, Register.CC, held[Register.CC], 0, self._status)
            struct.pack_into("<IQQ", data, Register.AQA, held[Register.AQA], held[Register.ASQ],
                             held[Register.ACQ])  # fmt: skip
            struct.pack_into("<I", data, Register.CRTO, READY_TIME)
            return bytes(data[offset : offset + nbytes])

    def write_bar(self, number: int, offset: int, data: bytes) -> None:
        if len(data) not in (4, 8) or offset % len(data):
            return
        with self.lock:
            self.counters.mmio_writes += 1
            if len(data) == 8 and offset in (Register.ASQ, Register.ACQ):
                self._registers[Register(offset)] = int.from_bytes(data, "little")
                return
            for at in range(0, len(data), 4):
                self._write_word(offset + at, int.from_bytes(data[at : at + 4], "little"))

    def _write_word(self, offset: int, value: int) -> None:
        held = self._registers
        if Register.DOORBELLS <= offset < MSIX_TABLE:
            self._ring(*divmod((offset - Register.DOORBELLS) // 4, 2), value)
        elif offset == Register.CC:
            self._configure(value)
        elif offset == Register.AQA:
            held[Register.AQA] = value & AQA_MASK
        elif offset & ~4 in (Register.ASQ, Register.ACQ):
            base, shift = Register(offset & ~4), 8 * (offset & 4)
            held[base] = held[base] & ~(0xFFFFFFFF << shift) | value << shift

    def _configure(self, value: int) -> None:
        """Write CC: enable, disable, shut down."""
        before, self._registers[Register.CC] = self._registers[Register.CC], value
        if value & ENABLE and not before & ENABLE:
            self._enable()
        elif before & ENABLE and not value & ENABLE:
            self._end_queues()
        if value >> 14 & 3 and not before >> 14 & 3:
            self._status = self._status & ~SHUTDOWN_DONE | SHUTDOWN_BUSY
            self._shutting = True
            self.lock.notify_all()
        elif before >> 14 & 3 and not value >> 14 & 3:
            self._status &= ~(SHUTDOWN_DONE | SHUTDOWN_BUSY)

    def _enable(self) -> None:
        held = self._registers
        sizes = [(held[Register.AQA] >> shift & 0xFFF) + 1 for shift in (0, 16)]
        bases = held[Register.ASQ], held[Register.ACQ]
        mps_and_arbitration = held[Register.CC] >> 7 & 0x7F
        if (
            any(base % PAGE_BYTES for base in bases)
            or min(sizes) < 2
            or mps_and_arbitration
            or self.enabled_sets not in COMMAND_SETS
        ):
            self._status |= FATAL
            return
        self.completions[0] = CompletionQueue(0, bases[1], sizes[1], 0)
        self.submissions[0] = SubmissionQueue(0, bases[0], sizes[0], self.completions[0])
        self._status |= READY

    def _end_queues(self) -> None:
        for queue in self.submissions.values():
            queue.alive = False
            if queue.flying is not None:
                queue.flying.alive = False
        self.submissions.clear()
        self.completions.clear()
        self._status = 0
        self._shutting = False
        self.admin.reset()
        for each in self.namespaces:
            each.reset()
        self.lock.notify_all()

    def reset(self) -> None:
        with self.lock:
            super().reset()
            self._end_queues()
            self._registers = dict.fromkeys(self._registers, 0)

    def close(self) -> None:
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._end_queues()
        for thread in self._threads:
            thread.join()
        for each in self.namespaces:
            each.close()

    def _ring(self, number: int, is_completion: int, value: int) -> None:
        """Write a doorbell; wrong ones are dropped, and reported to a host that asked."""
        self.counters.doorbells += 1
        queues = self.completions if is_completion else self.submissions
        queue = queues.get(number)
        if queue is None or value >= queue.size:
            self.admin.report(NO_SUCH_DOORBELL if queue is None else NO_SUCH_VALUE)
        elif isinstance(queue, CompletionQueue):
            queue.head = value
            self.admin.complete_events()
        else:
            queue.tail = value
        self.lock.notify_all()

    def fail(self) -> None:
        """Stop: the queues of the host cannot be accessed."""
        with self.lock:
            self._status |= FATAL
            for queue in self.submissions.values():
                queue.head = queue.tail

    def post(
        self, queue: SubmissionQueue, identifier: int, status: Status, result: int = 0
    ) -> None:
        """Write a completion, to a queue that has room, and interrupt the host."""
        to = queue.completions
        word = completed(status) << 1 | to.phase
        words = struct.pack("<QHH", result, queue.head, queue.number)
        address = to.base + COMPLETION_BYTES * to.tail
        try:
            self.dma_write(address, words)
            # The phase last: the host may look at any time.
            self.dma_write(address + 12, struct.pack("<HH", identifier, word))
        except DmaError:
            self.fail()
            return
        to.tail = (to.tail + 1) % to.size
        to.phase ^= to.tail == 0
        self.counters.completions += 1
        if to.vector is not None:
            self.counters.interrupts += 1
            self.bus.interrupt(to.vector)

    def create_completions(self, queue: CompletionQueue) -> None:
        """Create a queue, whose number is free."""
        self.completions[queue.number] = queue

    def create_submissions(self, queue: SubmissionQueue) -> None:
        """Create a queue, whose number is free."""
        self.submissions[queue.number] = queue

    def delete_completions(self, number: int) -> None:
        """Delete a queue that no other needs."""
        del self.completions[number]

    def delete_submissions(self, number: int) -> None:
        """Delete a queue; its commands are aborted, the one in flight too.

        Raises
        ------
        DmaError : the queue cannot be accessed.
        """
        gone = self.submissions.pop(number)
        gone.alive = False
        aborted: list[int] = []
        if gone.flying is not None and gone.flying.alive:
            gone.flying.alive = False
            aborted.append(gone.flying.identifier)
        while gone.pending:
            entry = self.dma_read(gone.base + ENTRY_BYTES * gone.head, ENTRY_BYTES)
            aborted.append(int.from_bytes(entry[2:4], "little"))
            gone.head = (gone.head + 1) % gone.size
        for identifier in aborted:
            if not gone.completions.is_full:  # a completion of an aborted command is optional
                self.post(gone, identifier, Status.ABORTED_BY_DELETION)

    def _next(self, admin: bool) -> SubmissionQueue | None:
        """A queue with an entry and room for its completion; I/O queues have turns."""
        if self._status & FATAL:
            return None
        numbers = sorted(number for number in self.submissions if (number == 0) == admin)
        turn = self._turn
        for number in [*(n for n in numbers if n > turn), *(n for n in numbers if n <= turn)]:
            queue = self.submissions[number]
            if queue.pending and not queue.completions.is_full:
                self._turn = turn if admin else number
                return queue
        return None

    def _work(self, admin: bool) -> None:
        """Fetch, execute and complete commands until `close`; the host sees if this fails."""
        try:
            self._serve(admin)
        except BaseException:
            self.fail()
            raise

    def _serve(self, admin: bool) -> None:
        while True:
            with self.lock:
                queue = self._next(admin)
                while queue is None and not self._closed and not (admin and self._shutting):
                    self.lock.wait()
                    queue = self._next(admin)
                if self._closed:
                    return
                shutting, self._shutting = admin and self._shutting, self._shutting and not admin
                fetched = None if queue is None else self._fetch(queue)
            if shutting:
                self._shut_down()
            if queue is not None and fetched is not None:
                self._execute(admin, queue, *fetched)

    def _fetch(self, queue: SubmissionQueue) -> tuple[Command, Flight] | None:
        """Fetch the next command of a queue; None if the queue cannot be accessed."""
        flight = Flight(self)
        try:
            entry = flight.read(queue.base + ENTRY_BYTES * queue.head, ENTRY_BYTES)
        except DmaError:
            self.fail()
            return None
        queue.head = (queue.head + 1) % queue.size
        flight.identifier = int.from_bytes(entry[2:4], "little")
        queue.flying = flight
        return Command(entry, flight), flight

    def _execute(
        self, admin: bool, queue: SubmissionQueue, command: Command, flight: Flight
    ) -> None:
        status = Status.SUCCESS
        found: int | None
        try:
            found = (self.admin.execute if admin else self.admin.execute_io)(queue, command)
        except StatusError as refused:
            status, found = refused.status, 0
        except DmaError:  # of a queue
            self.fail()
            found = None
        with self.lock:
            self.counters.commands += 1
            key = (queue.number and 1, command.opcode)
            self.counters.by_opcode[key] = self.counters.by_opcode.get(key, 0) + 1
            self._complete(queue, flight, status, found)
            if queue.flying is flight:
                queue.flying = None
            self.lock.notify_all()

    def _complete(
        self, queue: SubmissionQueue, flight: Flight, status: Status, found: int | None
    ) -> None:
        """Complete a command that was executed, unless it was aborted or `found` is None."""
        while flight.alive and queue.completions.is_full and found is not None:
            self.lock.wait()  # a deleted queue may have taken the room
        if flight.alive and found is not None:
            self.post(queue, flight.identifier, status, found)

    def _shut_down(self) -> None:
        for each in self.namespaces:
            try:
                each.flush()
            except OSError:
                self.fail()
        with self.lock:
            self._flushed()

    def _flushed(self) -> None:
        """Caches are flushed: the shutdown is complete, unless it has been ended."""
        if self._status & SHUTDOWN_BUSY:
            self._status = self._status & ~SHUTDOWN_BUSY | SHUTDOWN_DONE
