"""The backend of a device on a board behind a link."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Backend
from nearstep.errors import BusError, WaitTimeoutError
from nearstep.registers import BlockRegisters, RegisterBus
from nearstep.serial.controllers import initialiser
from nearstep.serial.description import BOARD, config_of, read_manifest
from nearstep.serial.errors import (
    LinkMemoryError,
    MemoryNotReadyError,
    RegisterTimeoutError,
    WrongBoardError,
)
from nearstep.serial.link import Link
from nearstep.serial.polling import PollingBackend
from nearstep_spec.boards.registers import board_map
from nearstep_spec.csr.model import WORD_BYTES
from nearstep_spec.serial.protocol import (
    FAILED,
    MOST_DATA,
    PAGE_BYTES,
    Answer,
    Op,
    Request,
    Space,
    Status,
)

RESET_CYCLES = 1 << 20
"""Most cycles of a reset, which waits for outstanding memory accesses."""

READY_CYCLES = 1 << 27
"""Most cycles of a memory controller's own initialisation: the memory needs some 200 us."""


class LinkBackend(PollingBackend):
    """A board that is accessed over a link.

    Waits are bounded by the board's cycle counter. Several threads may use the backend. After a
    `LinkError` every access raises one, and a new backend has to be made.

    Parameters
    ----------
    link : closed; the backend opens it.
    board : expected name of the board. None: any.

    Attributes
    ----------
    manifest : the board's description.
    controller : registers of its memory controller.
    board : registers of the board.

    Raises
    ------
    LinkError : there is no answer, or none of the protocol.
    ProtocolVersionError, WrongBoardError, FirmwareError : the board is not one that this host
        drives.
    """

    def __init__(self, link: Link, board: str | None = None) -> None:
        self.link = link
        self._lock = threading.RLock()
        try:
            hello = link.open()
            self.manifest = read_manifest(self._manifest_text(hello.manifest_bytes), link.port)
            self._check_board(board)
            self.config = config_of(self.manifest, link.port)
            self.family = self.manifest.family
            self.capacity_bytes = self.manifest.memory_bytes
            self.controller: RegisterBus = SpaceBus(link, Space.CONTROLLER)
            self._registers = SpaceBus(link, Space.REGISTERS)
            self.board = BlockRegisters(SpaceBus(link, Space.BOARD), BOARD, 0, board_map())
            self.board.check_identity()
            self._bring_memory_up()
            self.reset()
        except BaseException:
            link.close()
            raise

    @property
    def backend(self) -> Backend:
        """This backend, for `nearstep.serial.controllers.BoardAccess`."""
        return self

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        return self.manifest.regions

    @property
    def cycles(self) -> int | None:
        return self.now if self.manifest.clock_hz else None

    @property
    def unit(self) -> str:
        """Unit of the board's cycle counter."""
        return "device cycles" if self.manifest.clock_hz else "steps"

    def read_register(self, address: int) -> int:
        return self._registers.read_register(address)

    def write_register(self, address: int, value: int) -> None:
        self._registers.write_register(address, value)

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        self._check_memory(self._read(Space.MEMORY, address, out), write=False)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        failed: list[Answer] = []

        def take(_: int, answer: Answer) -> None:
            if answer.status is not Status.OK:
                failed.append(answer)

        write: Any = {"op": Op.WRITE, "space": Space.MEMORY}
        requests = (
            Request(address=at, length=size, data=data[at - address :][:size].tobytes(), **write)
            for at, size in _cut(address, data.size)
        )
        self.link.ask_all(requests, take)
        self._check_memory(failed, write=True)

    def reset(self) -> None:
        """Reset the device and its path to memory, and wait for the end of the reset.

        Raises
        ------
        WaitTimeoutError : memory does not complete an outstanding access.
        """
        self.board.control.set(reset=1)
        self._await_board("resetting", 0, RESET_CYCLES)

    def close(self) -> None:
        self.link.close()

    def transactions(self) -> Sequence[str]:
        return tuple(self.link.history)

    @property
    def now(self) -> int:
        with self._lock:  # no other thread latches between the latch and the read
            self.board.control.set(latch=1)
            return int(self.board.cycles.value)

    def _manifest_text(self, nbytes: int) -> bytes:
        text = np.zeros(nbytes, np.uint8)
        for answer in self._read(Space.MANIFEST, 0, text):
            raise LinkMemoryError(answer.failed_at, answer.status.name, write=False)
        return text.tobytes()

    def _read(self, space: Space, address: int, out: NDArray[np.uint8]) -> list[Answer]:
        """Read bytes of a space into `out`, and return the answers of failed parts."""
        parts = list(_cut(address, out.size))
        failed: list[Answer] = []

        def take(index: int, answer: Answer) -> None:
            if answer.status is not Status.OK:
                failed.append(answer)
                return
            first, size = parts[index]
            out[first - address :][:size] = np.frombuffer(answer.data, np.uint8)

        requests = (Request(op=Op.READ, space=space, address=at, length=n) for at, n in parts)
        self.link.ask_all(requests, take)
        return failed

    def _check_board(self, board: str | None) -> None:
        if board is not None and board != self.manifest.board:
            raise WrongBoardError(f"board on {self.link.port}", repr(board), self.manifest.board)

    def _bring_memory_up(self) -> None:
        initialise = initialiser(self.manifest.controller, self.manifest.board)
        if initialise is not None and not self.board.status.memory_ready:
            initialise(self)
            self.board.memory.set(ready=1)
        try:
            self._await_board("memory_ready", 1, READY_CYCLES)
        except WaitTimeoutError as error:
            reason = f"memory of {self.manifest.board} is not ready after {READY_CYCLES} cycles"
            raise MemoryNotReadyError(reason, registers=self.board.dump()) from error

    def _await_board(self, field: str, value: int, max_cycles: int) -> None:
        """Wait for a bit of the board's status."""
        begun = self.now
        while self.board.status.get()[field] != value:
            if self.now - begun >= max_cycles:
                raise WaitTimeoutError(
                    f"board.status.{field} to be {value}",
                    max_cycles,
                    unit=self.unit,
                    registers=self.board.dump(),
                    transactions=self.transactions(),
                )

    def _check_memory(self, failed: Sequence[Answer], *, write: bool) -> None:
        if failed:
            first = min(failed, key=lambda answer: answer.failed_at)
            raise LinkMemoryError(
                first.failed_at, first.status.name, write=write, transactions=self.transactions()
            )


class SpaceBus:
    """Registers of one space of a board."""

    def __init__(self, link: Link, space: Space) -> None:
        self._link = link
        self._space = space

    def read_register(self, address: int) -> int:
        """Read one word."""
        answer = self._ask(Op.READ, address, b"")
        return int.from_bytes(answer.data, "little")

    def write_register(self, address: int, value: int) -> None:
        """Write one word."""
        self._ask(Op.WRITE, address, value.to_bytes(WORD_BYTES, "little"))

    def _ask(self, op: Op, address: int, data: bytes) -> Answer:
        asked: Any = {"op": op, "space": self._space, "address": address, "data": data}
        answer = self._link.ask(Request(length=WORD_BYTES, **asked))
        if answer.status in FAILED:
            write = op is Op.WRITE
            if answer.status is Status.BUS_TIMEOUT:
                history = tuple(self._link.history)
                raise RegisterTimeoutError(address, write=write, transactions=history)
            raise BusError(address, answer.status, write=write)
        return answer


def _cut(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Split a range into requests: yield first byte and size of each part."""
    assert PAGE_BYTES % MOST_DATA == 0
    end = address + nbytes
    while address < end:
        size = min(MOST_DATA - address % MOST_DATA, end - address)
        yield address, size
        address += size
