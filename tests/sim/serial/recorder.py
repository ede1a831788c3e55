"""A board in software on a device that keeps what it was told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Poll
from nearstep.errors import BusError, NearstepError, OutOfBoundsError
from nearstep_sim.serial.endpoint import Endpoint
from nearstep_spec.serial.framing import Deframer, to_frame
from nearstep_spec.serial.manifest import Manifest
from nearstep_spec.serial.protocol import MOST_ANSWER, Answer, Hello, Op, Request, Space

MEMORY_BYTES = 1 << 14
REGISTERS = 64
NUMBER = 0x1234_5678_9ABC
BAD = b"\x11\x05" + bytes(10)
"""A read of memory of no bytes, with data."""
MANIFEST = Manifest(
    board="test",
    family="none",
    config={},
    map_hashes={},
    memory_bytes=MEMORY_BYTES,
    regions=((0, MEMORY_BYTES),),
)


class WrongError(NearstepError):
    """A checker found that a board did not do what it was told, once and in order."""


class Recorder(Backend):
    """A device of memory and registers that keeps what it was told, in order."""

    family = "none"
    config = None
    capacity_bytes = MEMORY_BYTES

    def __init__(self) -> None:
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        self.registers = [0] * REGISTERS
        self.written: list[tuple[int, int]] = []
        self.resets = 0
        self.passed = 0

    @property
    def cycles(self) -> int | None:
        return None

    def read_register(self, address: int) -> int:
        if address >= 4 * REGISTERS:
            raise BusError(address, 2, write=False)
        return self.registers[address // 4]

    def write_register(self, address: int, value: int) -> None:
        if address >= 4 * REGISTERS:
            raise BusError(address, 2, write=True)
        self.written.append((address, value))
        self.registers[address // 4] = value

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        self._check(address, out.size)
        out[:] = self.memory[address : address + out.size]

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self._check(address, data.size)
        self.memory[address : address + data.size] = data

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        self.passed += max_cycles

    def reset(self) -> None:
        self.resets += 1

    def close(self) -> None:
        pass

    @staticmethod
    def _check(address: int, nbytes: int) -> None:
        if address + nbytes > MEMORY_BYTES:
            raise OutOfBoundsError("memory", address, address + nbytes, MEMORY_BYTES)


class Board:
    """An endpoint, and what a test says to it."""

    def __init__(self) -> None:
        self.device = Recorder()
        self.endpoint = Endpoint(self.device, "test", manifest=MANIFEST, window=5)
        self._deframer = Deframer(MOST_ANSWER)

    def say(self, *bodies: bytes) -> list[bytes]:
        """Bodies of what it answers."""
        return list(
            self._deframer.feed(self.endpoint.receive(b"".join(to_frame(each) for each in bodies)))
        )

    def ask(self, request: Request) -> Answer:
        (body,) = self.say(request.encode())
        found = Answer.decode(body)
        assert (found.op, found.space) == (request.op, request.space)
        assert found.sequence == request.sequence
        return found

    def begin(self) -> Hello:
        return Hello.decode(self.ask(Request(op=Op.SYNC, address=NUMBER)).data)


def write(space: Space, address: int, data: bytes, sequence: int = 0) -> Request:
    return Request(
        op=Op.WRITE,
        space=space,
        sequence=sequence,
        address=address,
        length=len(data),
        data=data,
    )


def read(space: Space, address: int, length: int = 4, sequence: int = 0) -> Request:
    return Request(op=Op.READ, space=space, sequence=sequence, address=address, length=length)
