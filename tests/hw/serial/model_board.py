"""What a board answers, from the protocol alone; and what may stand behind it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from nearstep_sim.bench.axi_memory import SLVERR, STALL_MODES, AxiMemory, BurstError
from nearstep_sim.bench.axi_sample import Address
from nearstep_spec.serial.protocol import (
    MOST_DATA,
    PAGE_BYTES,
    REQUEST_BYTES,
    Answer,
    Hello,
    MessageError,
    Op,
    Request,
    Space,
    Status,
)

ADDRESS_WIDTH = 16
MEMORY_BYTES = 1 << ADDRESS_WIDTH
MANIFEST = bytes(random.Random(5).randrange(256) for _ in range(300))
WINDOW = 3
BURST_BEATS = 16
REGISTER_BYTES = 4096
BAD_REGISTERS = range(0x800, 0x900)
"""Addresses of registers that fail, in every space."""
BAD_MEMORY = range(0x3000, 0x3200)
WORD_SPACES = (Space.REGISTERS, Space.BOARD, Space.CONTROLLER)
PORTS = {Space.REGISTERS: "csr", Space.BOARD: "board", Space.CONTROLLER: "wishbone"}
"""Names of the ports behind spaces of registers."""


class BoardMemory(AxiMemory):
    """Memory that answers bursts of `BAD_MEMORY` with SLVERR."""

    def _error(self, write: bool, burst: Address) -> BurstError | None:
        last = burst.addr + self.beat_bytes * (burst.len + 1) - 1
        if burst.addr < BAD_MEMORY.stop and last >= BAD_MEMORY.start:
            return BurstError(write=write, nth=0, response=SLVERR)
        return None


@dataclass
class Registers:
    """Words behind a port: what was written, or a pattern; and how often they were."""

    seed: int
    words: dict[int, int] = field(default_factory=dict)
    accesses: int = 0

    def read(self, address: int) -> int | None:
        """A word, or None if it fails."""
        self.accesses += 1
        if address % REGISTER_BYTES in BAD_REGISTERS:
            return None
        pattern = random.Random(self.seed << 48 | address).getrandbits(32)
        return self.words.get(address, pattern)

    def write(self, address: int, value: int) -> bool:
        """Whether a word is taken. What is written counts on, so that a second time shows."""
        self.accesses += 1
        if address % REGISTER_BYTES in BAD_REGISTERS:
            return False
        self.words[address] = (value + self.words.get(address, 0)) & 0xFFFF_FFFF
        return True


def memory_of(*, beat_bytes: int, mode: str = "free", seed: int = 0) -> BoardMemory:
    """A memory of `MEMORY_BYTES`, patterned, with stalls of `STALL_MODES`."""
    data = np.random.default_rng(seed).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
    stalls = STALL_MODES[mode]
    return BoardMemory(data, beat_bytes=beat_bytes, stalls=stalls, latency=3, seed=seed)


def registers() -> dict[str, Registers]:
    return {name: Registers(seed) for seed, name in enumerate(PORTS.values())}


class ModelBoard:
    """The board's end of the link, on a memory and registers of its own."""

    def __init__(self, *, beat_bytes: int, memory: np.ndarray) -> None:
        self.beat_bytes = beat_bytes
        self.memory = memory
        self.registers = registers()
        self.session: int | None = None
        self.last: tuple[Request, bytes] | None = None

    def answer(self, body: bytes) -> bytes | None:
        """The body of the answer to a body of at least a header; None if it is dropped."""
        assert len(body) >= REQUEST_BYTES
        try:
            request = Request.parse(body)
        except MessageError:
            return None
        try:
            request.check()
        except MessageError:
            status = Status.NO_SESSION if self.session is None else Status.BAD_REQUEST
            return self._reply(request, status, b"")
        if request.op is Op.SYNC:
            if request.address != self.session:
                self.session, self.last = request.address, None
            hello = Hello(number=request.address, window=WINDOW, manifest_bytes=len(MANIFEST))
            return self._reply(request, Status.OK, hello.encode())
        if self.session is None:
            return self._reply(request, Status.NO_SESSION, b"")
        once = request.op is Op.WRITE and request.space in WORD_SPACES
        if once and self.last is not None:
            before, answer = self.last
            if all(
                getattr(before, name) == getattr(request, name)
                for name in ("space", "sequence", "address")
            ):
                return answer
        answer = self._reply(request, *self._carry_out(request))
        self.last = (request, answer) if once else None
        return answer

    @staticmethod
    def _reply(request: Request, status: Status, data: bytes) -> bytes:
        return Answer(
            op=request.op,
            space=request.space,
            sequence=request.sequence,
            status=status,
            data=data,
        ).encode()

    def _carry_out(self, request: Request) -> tuple[Status, bytes]:
        if request.space is Space.MANIFEST:
            end = request.address + request.length
            if end > len(MANIFEST):
                return Status.DECERR, Answer.failure(request.address)
            return Status.OK, MANIFEST[request.address : end]
        if request.space is Space.MEMORY:
            return self._memory(request)
        if request.address >> (32 if request.space is Space.CONTROLLER else 12):
            return Status.DECERR, Answer.failure(request.address)
        device, read = self.registers[PORTS[request.space]], bytearray()
        for at in range(request.address, request.address + request.length, 4):
            if request.op is Op.READ:
                value = device.read(at)
                if value is None:
                    return Status.SLVERR, Answer.failure(at)
                read += value.to_bytes(4, "little")
            else:
                word = request.data[at - request.address :][:4]
                if not device.write(at, int.from_bytes(word, "little")):
                    return Status.SLVERR, Answer.failure(at)
        return Status.OK, bytes(read)

    def _memory(self, request: Request) -> tuple[Status, bytes]:
        if request.address >> ADDRESS_WIDTH:
            return Status.DECERR, Answer.failure(request.address)
        for first, end in self._bursts(request):
            low = first // self.beat_bytes * self.beat_bytes
            high = -(-end // self.beat_bytes) * self.beat_bytes
            if low < BAD_MEMORY.stop and high > BAD_MEMORY.start:
                return Status.SLVERR, Answer.failure(first)
            if request.op is Op.WRITE:
                data = request.data[first - request.address : end - request.address]
                self.memory[first:end] = np.frombuffer(data, np.uint8)
        end = request.address + request.length
        read = self.memory[request.address : end].tobytes() if request.op is Op.READ else b""
        return Status.OK, read

    def _bursts(self, request: Request) -> Iterator[tuple[int, int]]:
        size, at = BURST_BEATS * self.beat_bytes, request.address
        while at < request.address + request.length:
            end = min(at // size * size + size, request.address + request.length)
            yield at, end
            at = end


def random_body(rng: random.Random, sequence: int, *, most: int = MOST_DATA) -> bytes:
    """A body: mostly of a request that a board can carry out, at times of none."""
    op = rng.choice((Op.READ, Op.WRITE))
    space = rng.choice((*Space, Space.MEMORY, Space.MEMORY))
    if space is Space.MANIFEST:
        op = Op.READ if rng.random() < 0.9 else op
    length = rng.choice((1, 4, 8, rng.randint(1, min(most, 100)), rng.randint(1, most)))
    address = rng.choice((0, PAGE_BYTES, rng.randrange(MEMORY_BYTES))) + rng.choice(
        (0, 0, PAGE_BYTES - length, rng.randrange(64))
    )
    if space is Space.MANIFEST:
        address = rng.randrange(len(MANIFEST))
        length = rng.randint(1, len(MANIFEST) - address)
    elif space is not Space.MEMORY:
        address, length = address & ~3 & 0xFFF, (length + 3) & ~3
    if rng.random() < 0.04:
        address |= 1 << rng.choice((12, 16, 31, 32, 47))
    if rng.random() < 0.95:
        length = min(length, PAGE_BYTES - address % PAGE_BYTES)
    if rng.random() < 0.05:
        length = rng.choice((0, length + 1, MOST_DATA + 1, length ^ 2))
    data = rng.randbytes(length if op is Op.WRITE else 0)
    if rng.random() < 0.2:
        data = bytes(rng.choice((0x7D, 0x7E, 0x20, 0x5E)) for _ in data)
    if rng.random() < 0.03:
        data += bytes(rng.randint(1, 9))
    kind = op | space << 4
    if rng.random() < 0.03:
        kind = rng.randrange(256)
    head = bytes([kind, sequence & 0xFF]) + length.to_bytes(2, "little")
    return (head + address.to_bytes(6, "little") + data)[: REQUEST_BYTES + MOST_DATA]
