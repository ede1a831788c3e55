"""A host of an NVMe controller: memory with guards, queues, and commands that wait."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from nearstep.linux.nvme.card import open_controller
from nearstep.linux.nvme.controller import NvmeController
from nearstep.linux.nvme.standard import Admin, Register
from nearstep.linux.pci import BUS_MASTER, COMMAND, DmaError

PAGE = 4096
MEMORY_BYTES, SLM_BYTES, DRIVE_BYTES = 8 << 20, 1 << 20, 1 << 20
SHAPE = "golden:smartssd?lanes=4&chunk_bytes=512&memory_bytes=4MiB"
WAIT_S = 60.0


class Completion(NamedTuple):
    """Result, status with its type in the upper byte, identifier, queue and head."""

    result: int
    status: int
    identifier: int
    queue: int
    head: int


class GuestRam:
    """Memory of a host, and the interrupts that it got; accesses outside are refused."""

    def __init__(self, nbytes: int = MEMORY_BYTES) -> None:
        self.data = bytearray(nbytes)
        self.vectors: list[int] = []
        self.written: list[tuple[int, int]] = []
        self.arrived = threading.Event()

    def read(self, address: int, nbytes: int) -> bytes:
        self._check("read", address, nbytes)
        return bytes(self.data[address : address + nbytes])

    def write(self, address: int, data: bytes) -> None:
        self._check("write", address, len(data))
        self.written.append((address, len(data)))
        self.data[address : address + len(data)] = data

    def interrupt(self, vector: int) -> None:
        self.vectors.append(vector)
        self.arrived.set()

    def _check(self, action: str, address: int, nbytes: int) -> None:
        if address + nbytes > len(self.data):
            raise DmaError(action, address, nbytes, "not mapped")


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Queue:
    """A pair of queues of the host."""

    def __init__(self, guest: Guest, number: int, size: int) -> None:
        self.guest, self.number, self.size = guest, number, size
        self.entries, self.completions = (
            guest.pages(-(-64 * size // PAGE)),
            guest.pages(-(-16 * size // PAGE)),
        )
        self.tail = self.head = 0
        self.phase = 1

    def push(self, entry: bytes, *, ring: bool = True) -> None:
        """Write an entry, and the doorbell."""
        at = self.entries + 64 * self.tail
        self.guest.ram.data[at : at + 64] = entry
        self.tail = (self.tail + 1) % self.size
        if ring:
            self.guest.ring(2 * self.number, self.tail)

    def poll(self) -> Completion | None:
        """Take a completion if there is one."""
        at = self.completions + 16 * self.head
        result, head, queue, identifier, word = struct.unpack_from(
            "<QHHHH", self.guest.ram.data, at
        )
        if word & 1 != self.phase:
            return None
        self.head = (self.head + 1) % self.size
        self.phase ^= self.head == 0
        self.guest.ring(2 * self.number + 1, self.head)
        return Completion(result, word >> 1 & 0x7FF, identifier, queue, head)

    def wait(self) -> Completion:
        """Wait for a completion."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            self.guest.ram.arrived.clear()
            found = self.poll()
            if found is not None:
                return found
            self.guest.ram.arrived.wait(0.2)
        raise AssertionError(f"no completion in queue {self.number} within {WAIT_S} s")


def entry(
    opcode: int, identifier: int = 0, nsid: int = 0, *, prp1: int = 0, prp2: int = 0,
    flags: int = 0, **dwords: int,
) -> bytes:  # fmt: skip
    """A command; `dw10` and so on set dwords."""
    words = [opcode | flags << 8 | identifier << 16, nsid, *[0] * 4,
             prp1 & 0xFFFFFFFF, prp1 >> 32, prp2 & 0xFFFFFFFF, prp2 >> 32, *[0] * 6]  # fmt: skip
    for name, value in dwords.items():
        words[int(name.removeprefix("dw"))] = value
    return struct.pack("<16I", *words)


def ranges_of(*spans: tuple[int, int], namespace: int = 2) -> bytes:
    """Descriptors of memory ranges: start and bytes of each."""
    return b"".join(struct.pack("<IIQ16x", namespace, size, start) for start, size in spans)


class Guest:
    """Enables a controller as Linux does, with one pair of I/O queues.

    Attributes
    ----------
    scratch : 64 pages for data.
    """

    def __init__(self, controller: NvmeController, *, depth: int = 64) -> None:
        self.controller = controller
        self.ram = GuestRam()
        controller.bus = self.ram
        self._free = PAGE  # page 0 is a guard
        self._identifier = 0
        controller.write_config(COMMAND, struct.pack("<H", BUS_MASTER))
        self.admin = Queue(self, 0, 32)
        self.enable()
        self.io = Queue(self, 1, depth)
        self.scratch = self.pages(64)
        assert self.create(self.io) == [0, 0]

    def enable(self, css: int = 6) -> None:
        self.write(Register.AQA, 31 | 31 << 16)
        for register, base in ((0x28, self.admin.entries), (0x30, self.admin.completions)):
            self.write(register, base & 0xFFFFFFFF)
            self.write(register + 4, base >> 32)
        self.write(Register.CC, css << 4 | 6 << 16 | 4 << 20)
        self.write(Register.CC, 1 | css << 4 | 6 << 16 | 4 << 20)
        assert self.status == 1

    def create(self, queue: Queue) -> list[int]:
        """Create a pair of queues; return both statuses."""
        size = queue.number | queue.size - 1 << 16
        return [
            self.run(Admin.CREATE_CQ, prp1=queue.completions, dw10=size,
                     dw11=3 | queue.number << 16).status,
            self.run(Admin.CREATE_SQ, prp1=queue.entries, dw10=size,
                     dw11=1 | queue.number << 16).status,
        ]  # fmt: skip

    @property
    def status(self) -> int:
        return int.from_bytes(self.controller.read_bar(0, Register.CSTS, 4), "little")

    def write(self, offset: int, value: int) -> None:
        self.controller.write_bar(0, offset, struct.pack("<I", value))

    def ring(self, doorbell: int, value: int) -> None:
        self.write(Register.DOORBELLS + 4 * doorbell, value)

    def pages(self, count: int) -> int:
        """Address of fresh pages."""
        at, self._free = self._free, self._free + count * PAGE
        return at

    def put(self, address: int, data: bytes) -> None:
        self.ram.data[address : address + len(data)] = data

    def get(self, address: int, nbytes: int) -> bytes:
        return bytes(self.ram.data[address : address + nbytes])

    def run(self, opcode: int, nsid: int = 0, *, io: bool = False, **fields: int) -> Completion:
        """Execute a command, and wait for its completion."""
        self._identifier = (self._identifier + 1) & 0xFFFF
        queue = self.io if io else self.admin
        queue.push(entry(opcode, self._identifier, nsid, **fields))
        found = queue.wait()
        assert (found.identifier, found.queue) == (self._identifier, queue.number)
        return found


@contextmanager
def guest_of(
    folder: Path, url: str = SHAPE, *, queues: str = "python", **options: int
) -> Iterator[Guest]:
    """A guest of a fresh card, whose controller has queues in `python` or in `rtl`."""
    kind = NvmeController
    if queues == "rtl":
        from nearstep_sim.nvme.controller import RtlController

        kind = RtlController
    drive = folder / "drive"
    drive.write_bytes(bytes(DRIVE_BYTES))
    controller = open_controller(url, drive, SLM_BYTES, kind=kind)
    try:
        yield Guest(controller, **options)
    finally:
        controller.close()
