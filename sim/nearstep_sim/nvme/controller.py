"""The controller whose registers and queues are RTL; its commands are executed as by the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from nearstep.linux.nvme.controller import (
    Commands,
    CompletionQueue,
    Flight,
    NvmeController,
    SubmissionQueue,
)
from nearstep.linux.nvme.namespace import Namespace
from nearstep.linux.nvme.standard import TRANSFER_BYTES, Status, StatusError, require
from nearstep.linux.nvme.transfer import Command
from nearstep.linux.pci import DmaError
from nearstep_hw.nvme.layout import OrderKind
from nearstep_sim.nvme.engine import RtlEngine
from nearstep_spec.nvme import ENABLE, MSIX_TABLE, READY, Register, completed


class WalkedCommand(Command):
    """A command whose PRP entries the engine walks over."""

    def __init__(self, entry: bytes, flight: Flight, controller: RtlController, io: bool) -> None:
        super().__init__(entry, flight)
        self._controller, self._io = controller, io

    def segments(self, nbytes: int) -> list[tuple[int, int]]:
        require(nbytes <= TRANSFER_BYTES)
        with self._controller.lock:
            parts, status = self._controller.engine.walk(
                self._io, self.wide(6), self.wide(8), nbytes
            )
        if status:
            raise StatusError(Status(status))
        return parts


class RtlController(NvmeController):
    """A controller with the queue engine of `nvme_card` in Verilator.

    Doorbells, fetches, the walk over PRP entries, completions, interrupts, resets and what happens
    to commands of deleted queues are those of the RTL; this class makes the accesses to memory that
    the RTL asks for, and is the firmware that executes the commands.

    Parameters
    ----------
    namespaces, commands, serial : as of `NvmeController`.

    Attributes
    ----------
    engine
    """

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        commands: Callable[[NvmeController], Commands],
        serial: str,
    ) -> None:
        self._arrived: tuple[deque[SubmissionQueue], deque[SubmissionQueue]] = deque(), deque()
        self._entries: tuple[deque[bytes], deque[bytes]] = deque(), deque()
        self.engine = RtlEngine(self)
        super().__init__(namespaces, commands, serial)

    # What the engine asks for

    def completed(self) -> None:
        self.counters.completions += 1

    def interrupt(self, vector: int) -> None:
        self.counters.interrupts += 1
        self.bus.interrupt(vector)

    def arrived(self, queue: int, entry: bytes) -> None:
        found = self.submissions[queue]
        found.flying = Flight(self, identifier=int.from_bytes(entry[2:4], "little"))
        self._arrived[queue != 0].append(found)
        self._entries[queue != 0].append(entry)
        self.lock.notify_all()

    def wrong_doorbell(self, information: int) -> None:
        self.admin.report(information)

    def shuts_down(self) -> None:
        self._shutting = True
        self.lock.notify_all()

    # Registers

    def read_bar(self, number: int, offset: int, nbytes: int) -> bytes:
        with self.lock:
            self.counters.mmio_reads += 1
            words = range(offset & ~3, offset + nbytes, 4)
            values = (self.engine.read(at) if at < MSIX_TABLE else 0 for at in words)
            data = b"".join(value.to_bytes(4, "little") for value in values)
            return data[offset & 3 :][:nbytes]

    def write_bar(self, number: int, offset: int, data: bytes) -> None:
        if len(data) not in (4, 8) or offset % len(data):
            return
        with self.lock:
            self.counters.mmio_writes += 1
            for at in range(0, len(data), 4):
                self._write_word(offset + at, int.from_bytes(data[at : at + 4], "little"))

    def _write_word(self, offset: int, value: int) -> None:
        if offset >= MSIX_TABLE:
            return
        before = self._registers[Register.CC]
        if offset >= Register.DOORBELLS:
            self.counters.doorbells += 1
        elif offset == Register.CC:
            self._registers[Register.CC] = value
            if before & ENABLE and not value & ENABLE:
                self._end_queues()
        self.engine.write(offset, value)
        if offset == Register.CC and value & ENABLE and not before & ENABLE:
            if self.engine.read(Register.CSTS) & READY:
                self.completions[0] = CompletionQueue(0, 0, 2, 0)
                self.submissions[0] = SubmissionQueue(0, 0, 2, self.completions[0])
        self.lock.notify_all()

    def reset(self) -> None:
        with self.lock:
            super().reset()
            for offset in (Register.CC, Register.AQA, Register.ASQ, Register.ASQ + 4,
                           Register.ACQ, Register.ACQ + 4):  # fmt: skip
                self.engine.write(offset, 0)

    # Queues

    def fail(self) -> None:
        with self.lock:
            self.engine.fail()

    def post(
        self, queue: SubmissionQueue, identifier: int, status: Status, result: int = 0
    ) -> None:
        """Complete an admin command later; all other completions are the engine's."""
        self.engine.complete_later(identifier, result)

    def create_completions(self, queue: CompletionQueue) -> None:
        vector = queue.vector
        self._order(
            OrderKind.CREATE_COMPLETIONS, queue.number, base=queue.base >> 12, last=queue.size - 1,
            vector=vector or 0, interrupts=vector is not None,
        )  # fmt: skip
        super().create_completions(queue)

    def create_submissions(self, queue: SubmissionQueue) -> None:
        self._order(
            OrderKind.CREATE_SUBMISSIONS, queue.number, base=queue.base >> 12, last=queue.size - 1,
            target=queue.completions.number,
        )  # fmt: skip
        super().create_submissions(queue)

    def delete_completions(self, number: int) -> None:
        self._order(OrderKind.DELETE_COMPLETIONS, number)
        super().delete_completions(number)

    def delete_submissions(self, number: int) -> None:
        gone = self.submissions.pop(number)
        gone.alive = False
        if gone.flying is not None:
            gone.flying.alive = False
        self._order(OrderKind.DELETE_SUBMISSIONS, number)

    def _order(self, kind: OrderKind, number: int, **fields: int) -> None:
        """Let the engine carry out an order, which `AdminCommands` has checked."""
        if not self.engine.order(kind, number, **fields):
            raise DmaError("access", 0, 0, f"queue {number} cannot be accessed")

    # Commands

    def _next(self, admin: bool) -> SubmissionQueue | None:
        waiting = self._arrived[not admin]
        return waiting[0] if waiting else None

    def _fetch(self, queue: SubmissionQueue) -> tuple[Command, Flight] | None:
        io = queue.number != 0
        self._arrived[io].popleft()
        flight = queue.flying
        assert flight is not None
        return WalkedCommand(self._entries[io].popleft(), flight, self, io), flight

    def _complete(
        self, queue: SubmissionQueue, flight: Flight, status: Status, found: int | None
    ) -> None:
        word = completed(status)
        self.engine.done(queue.number != 0, word, found or 0, complete=found is not None)

    def _flushed(self) -> None:
        self.engine.flushed()
