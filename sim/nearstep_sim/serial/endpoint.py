"""A board in software: the board's end of the link, over any opened device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nearstep.backends.base import Backend, Poll
from nearstep.backends.emulated import EmulatedBackend
from nearstep.errors import BusError, DeviceError, MemoryBarError, OutOfBoundsError
from nearstep.serial.description import describe
from nearstep_sim.golden.registers import RegisterFile
from nearstep_spec.boards.registers import board_map
from nearstep_spec.csr.model import ADDRESS_WIDTH, WORD_BITS, WORD_BYTES
from nearstep_spec.serial.framing import Deframer, to_frame
from nearstep_spec.serial.manifest import Manifest
from nearstep_spec.serial.protocol import (
    MOST_REQUEST,
    REQUEST_BYTES,
    Answer,
    Hello,
    MessageError,
    Op,
    Request,
    Space,
    Status,
)

WINDOW = 7
"""Requests that a board holds, as `nearstep_hw.serial.endpoint` has it."""

CLOCK_HZ = 200_000_000
"""Clock of a device of the papers; reported for any emulated device with a clock."""

FREE_POLLS = 4
"""Polls after which a host is considered waiting."""

FEWEST_CYCLES = 128
MOST_CYCLES = 1 << 13
MOST_STEPS = 1 << 20
"""Device cycles, and steps of a device without a clock, that pass at a poll of a host that only
polls, doubled with each poll. At 3 Mbaud a poll takes some 10,000 cycles of 100 MHz."""

_CONTROL = board_map()["control"]
MEMORY_STATUS = {"SLVERR": Status.SLVERR, "DECERR": Status.DECERR, "timeout": Status.BUS_TIMEOUT}


class Endpoint:
    """Carries out requests on a device: bytes of the line in, bytes of the line out.

    A board's clock always runs, that of an emulated device only during calls. So time passes at a
    poll: the host reads the register of the device that was read last, or latches the board's
    counters; the time ends when that register changes. Steps count as cycles of a device without a
    clock. A kernel that reads unwritten memory stops an emulated device, as without a link; its
    registers then do not answer until the board is reset.

    Parameters
    ----------
    backend : a device without other users.
    board : reported name of the board.
    manifest : description in place of the device's own; None: the device's.
    window : reported capacity of the request buffer.

    Attributes
    ----------
    fault : error that stopped the emulated device since the last reset.
    received : number of bytes received.
    """

    def __init__(
        self,
        backend: Backend,
        board: str,
        *,
        manifest: Manifest | None = None,
        window: int = WINDOW,
    ) -> None:
        self._backend = backend
        if isinstance(backend, EmulatedBackend):
            for base, nbytes in backend.regions:
                backend.claim(base, nbytes)
        self.manifest = manifest or describe(
            backend.config,
            board=board,
            family=backend.family,
            memory_bytes=backend.capacity_bytes,
            regions=tuple(backend.regions),
            clock_hz=0 if backend.cycles is None else CLOCK_HZ,
        )
        self._text = self.manifest.encode()
        self._window = window
        self.fault: DeviceError | None = None
        self.received = 0
        self._power_up()

    def _power_up(self) -> None:
        self._deframer = Deframer(MOST_REQUEST)
        self._session: int | None = None  # its number
        self._last: tuple[tuple[int, int, int], bytes] | None = None
        self._registers = RegisterFile(board_map())
        self._registers["status.memory_ready"] = 1
        self._steps = 0
        self._zero = self._backend.cycles or 0
        self._polled: tuple[int, int] | None = None
        self._polls = 0

    def receive(self, data: bytes) -> bytes:
        """Process received bytes, and return the answers' bytes."""
        self.received += len(data)
        return b"".join(
            to_frame(answer) for body in self._deframer.feed(data) for answer in self._answers(body)
        )

    def reset(self) -> None:
        """Reset the whole board, as its button does; this ends the session."""
        self._reset_device()
        self._power_up()

    def _answers(self, body: bytes) -> Iterator[bytes]:
        """Yield the body of the answer to a request, and nothing for other bodies."""
        if len(body) < REQUEST_BYTES:
            self._deframer.dropped += 1
            return
        try:
            request = Request.parse(body)
        except MessageError:
            return
        try:
            request.check()
        except MessageError:
            status = Status.NO_SESSION if self._session is None else Status.BAD_REQUEST
            yield _answer(request, status).encode()
            return
        if request.op is Op.SYNC:
            yield self._begin(request).encode()
            return
        if self._session is None:
            yield _answer(request, Status.NO_SESSION).encode()
            return
        writes = request.op is Op.WRITE and request.space is not Space.MEMORY
        this = request.sequence, request.space, request.address
        if writes and self._last is not None and self._last[0] == this:
            yield self._last[1]
            return
        answer = self._carry_out(request).encode()
        self._last = (this, answer) if writes else None
        yield answer

    def _begin(self, request: Request) -> Answer:
        if request.address != self._session:
            self._session = request.address
            self._last = None
        hello = Hello(number=request.address, window=self._window, manifest_bytes=len(self._text))
        return _answer(request, Status.OK, hello.encode())

    def _carry_out(self, request: Request) -> Answer:
        polls = request.op is Op.READ and request.space is Space.REGISTERS
        if not polls and request.space is not Space.BOARD:
            self._polled, self._polls = None, 0
        if request.space is Space.MEMORY:
            return self._memory(request)
        if request.space is Space.MANIFEST:
            return self._manifest(request)
        if request.space is Space.CONTROLLER:
            return _failure(request, Status.DECERR, request.address)
        read = bytearray()
        for at in range(request.address, request.address + request.length, WORD_BYTES):
            word = int.from_bytes(request.data[at - request.address :][:WORD_BYTES], "little")
            status, value = self._word(request.op, request.space, at, word)
            if status is not Status.OK:
                return _failure(request, status, at)
            if request.op is Op.READ:
                read += value.to_bytes(WORD_BYTES, "little")
        return _answer(request, Status.OK, bytes(read))

    def _word(self, op: Op, space: Space, address: int, value: int) -> tuple[Status, int]:
        """Access one register word; return status and word read."""
        if space is Space.BOARD:
            return self._board(op, address, value)
        try:
            if op is Op.WRITE:
                self._backend.write_register(address, value)
                return Status.OK, 0
            return Status.OK, self._poll(address)
        except DeviceError as error:
            return self._status(error), 0
        except OutOfBoundsError:
            return Status.DECERR, 0

    def _poll(self, address: int) -> int:
        """Read a register; if it was the last one to be read, let time pass before."""
        if self._polled is not None and self._polled[0] == address:
            self._let_time_pass()
        else:
            self._polls = 0
        word = self._backend.read_register(address)
        self._polled = address, word
        return word

    def _let_time_pass(self) -> None:
        """Let time pass until the polled register changes."""
        backend = self._backend
        polls: list[Poll] = []
        if self._polled is not None:
            address, word = self._polled
            polls = [
                Poll(address=address, mask=1 << bit, value=~word & 1 << bit)
                for bit in range(WORD_BITS)
            ]
        most = MOST_STEPS if backend.cycles is None else MOST_CYCLES
        self._polls += 1
        more = self._polls - FREE_POLLS
        if more < 0:
            return
        cycles = most if more > most.bit_length() else min(FEWEST_CYCLES << more, most)
        try:
            backend.advance(cycles, polls)
            changed = any(poll.holds(backend.read_register(poll.address)) for poll in polls[:1])
        except DeviceError as error:
            self._status(error)
            changed = False
        self._steps += 1 if changed else cycles

    def _board(self, op: Op, address: int, value: int) -> tuple[Status, int]:
        registers = self._registers
        if address >> ADDRESS_WIDTH:
            return Status.DECERR, 0
        if op is Op.READ:
            found = registers.read(address)
            return (Status.SLVERR if found.error else Status.OK), found.value
        if address == _CONTROL.offset and value & _CONTROL.field("latch").mask:
            self._let_time_pass()
            cycles = self._backend.cycles
            registers["cycles.value"] = self._steps if cycles is None else cycles - self._zero
            registers["dropped.value"] = self._deframer.dropped & 0xFFFF_FFFF
        found = registers.write(address, value)
        if "control.reset" in found.pulses:
            self._reset_device()
        return (Status.SLVERR if found.error else Status.OK), 0

    def _reset_device(self) -> None:
        self._backend.reset()
        self.fault = None
        self._polled, self._polls = None, 0

    def _memory(self, request: Request) -> Answer:
        try:
            if request.op is Op.WRITE:
                data = np.frombuffer(request.data, np.uint8)
                self._backend.write_memory(request.address, data)
                return _answer(request, Status.OK)
            out = np.zeros(request.length, np.uint8)
            self._backend.read_memory(request.address, out)
            return _answer(request, Status.OK, out.tobytes())
        except MemoryBarError as error:
            return _failure(request, MEMORY_STATUS[error.status], error.address)
        except DeviceError as error:
            return _failure(request, self._status(error), request.address)
        except OutOfBoundsError:
            return _failure(request, Status.DECERR, request.address)

    def _manifest(self, request: Request) -> Answer:
        end = request.address + request.length
        if end > len(self._text):
            return _failure(request, Status.DECERR, request.address)
        return _answer(request, Status.OK, self._text[request.address : end])

    def _status(self, error: DeviceError) -> Status:
        """Return the status on the bus of a device that raises this error."""
        if isinstance(error, BusError):
            return Status(error.response)
        self.fault = self.fault or error
        return Status.BUS_TIMEOUT


def _answer(request: Request, status: Status, data: bytes = b"") -> Answer:
    return Answer(
        op=request.op, space=request.space, sequence=request.sequence, status=status, data=data
    )


def _failure(request: Request, status: Status, address: int) -> Answer:
    return _answer(request, status, Answer.failure(address))
