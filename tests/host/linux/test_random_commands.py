"""Malformed commands at random: each gets a status, and no other memory is touched."""

from __future__ import annotations

import random
import struct
from collections import Counter
from pathlib import Path

import pytest

from nearstep.linux.nvme.standard import Admin, Register, Status

from .guest import PAGE, SLM_BYTES, Guest, guest_of, ranges_of

PAGES = 48
"""Pages of the scratch memory, data and lists, that commands may name."""

INTERESTING = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 64, 255, 256, 4092, 4096, 8192, 65535, 1 << 16,
               1 << 20, (1 << 20) - 4, 1 << 24, 1 << 31, (1 << 32) - 1)  # fmt: skip
VALID = (
    [(False, 0, int(opcode)) for opcode in Admin if opcode < 0x80]
    + [(False, 3, opcode) for opcode in (0x85, 0x88, 0x89, 0x89, 0x89, 0x02)]
    + [(True, 1, opcode) for opcode in (0, 1, 2)]
    + [(True, 2, opcode) for opcode in (0, 1, 1, 2, 4, 5)]
    + [(True, 3, 1)] * 5
)
"""Whether it is an I/O command, namespace and opcode."""


class Fuzz:
    """Sends random commands to a guest's controller."""

    def __init__(self, guest: Guest, seed: int) -> None:
        self.guest = guest
        self.draw = random.Random(seed)
        self.statuses: Counter[str] = Counter()
        self.resets = 0
        base, draw = guest.scratch, self.draw
        pages = [base + PAGE * number for number in range(PAGES)]
        nowhere = [len(guest.ram.data), len(guest.ram.data) + 4, 1 << 40, (1 << 64) - PAGE]
        self.addresses = [*pages, *(page + draw.choice((4, 8, 2040, 4088, 4092, 1,
        2)) for page in pages),
                          *nowhere]  # fmt: skip
        words = draw.choices(
            [*pages, base + 4, 1 << 40, base + 2048], [*[8] * PAGES, 1, 1, 1], k=512 * 16
        )
        descriptors = ranges_of(*[(64 + 8192 * n, 4096) for n in range(4)], (1 << 20 | 64, 64))
        self.contents = (
            (b"\1" * (PAGE * 16)) + struct.pack(f"<{512 * 16}Q", *words)
            + (descriptors + struct.pack("<II14f", 1, 9, *[1.0] * 14)).ljust(PAGE, b"\0") * 16
        )  # fmt: skip

    def number(self) -> int:
        if self.draw.random() < 0.75:
            return self.draw.choice(INTERESTING)
        return self.draw.getrandbits(32)

    def send(self) -> str:
        """Send a command, wait for its status, and check what was written."""
        guest, draw = self.guest, self.draw
        guest.put(guest.scratch, self.contents)
        guest.ram.written.clear()
        io, nsid, opcode = draw.choice(VALID)
        if draw.random() < 0.1:
            io, opcode = draw.random() < 0.5, draw.getrandbits(8)
        if draw.random() < 0.1:
            nsid = draw.choice((0, 1, 2, 3, 4, 0xFFFFFFFF))
        if not io and opcode == Admin.ASYNC_EVENT:
            opcode = Admin.ABORT  # an event is completed when there is one
        often = draw.choice((0.05, 0.2, 0.5))
        fields = {
            f"dw{n}": self.number() for n in (2, 3, 4, 5, *range(10, 16)) if draw.random() < often
        }
        if (io, opcode, nsid) == (True, 1, 3) and draw.random() < 0.7:
            fields |= {"dw2": 1, "dw3": 4, "dw4": draw.choice((0, 192, 128))}
        fields.setdefault("dw10", draw.randrange(4) | draw.choice((0, 0, 1, 7)) << 16)
        fields.setdefault("dw11", draw.randrange(5))
        if not io and opcode in (Admin.DELETE_SQ, Admin.DELETE_CQ) and fields["dw10"] & 0xFFFF == 1:
            fields["dw10"] = 2  # the queue that this guest uses
        flags = draw.getrandbits(8) if draw.random() < 0.02 else 0
        prp1, prp2 = draw.choice(self.addresses), draw.choice(self.addresses)
        found = guest.run(opcode, nsid, io=io, prp1=prp1, prp2=prp2, flags=flags, **fields)
        self.check_writes()
        return Status(found.status).name

    def check_writes(self) -> None:
        """Every write is a completion, or in the pages that commands may name."""
        guest = self.guest
        own = [
            (0, PAGE),  # zeros of a data structure, read as a list
            (guest.scratch, PAGES * PAGE),
            (guest.admin.completions, PAGE),
            (guest.io.completions, PAGE),
        ]
        for address, nbytes in guest.ram.written:
            inside = (base <= address and address + nbytes <= base + size for base, size in own)
            assert any(inside), hex(address)

    def ring(self) -> None:
        """Write a doorbell that is none, or out of range, or of a queue of a random command."""
        value = self.draw.choice((self.number(), self.draw.randrange(8)))
        doorbell = self.draw.choice([*range(4, 20), 1023])
        if self.draw.random() < 0.3:
            doorbell, value = self.draw.choice(((2, 64), (3, 64), (0, 32), (1, 1 << 20)))
        self.guest.ring(doorbell, value)
        if self.guest.status & 2:  # a queue that points nowhere: fatal, until the host resets
            self.recover()

    def recover(self) -> None:
        self.guest.write(Register.CC, 0)
        again = Guest(self.guest.controller)
        self.guest.__dict__.update(again.__dict__)
        self.resets += 1

    def run(self, count: int) -> None:
        for number in range(count):
            if number % 16 == 15:
                self.ring()
            if self.guest.status & 2:
                self.recover()
            self.statuses[self.send()] += 1
            if number % 2000 == 1999:
                self.recover()


def check(folder: Path, count: int, seed: int, queues: str = "python") -> Counter[str]:
    with guest_of(folder, queues=queues) as guest:
        drive = (folder / "drive").stat().st_size
        fuzz = Fuzz(guest, seed)
        fuzz.run(count)
        assert sum(fuzz.statuses.values()) == count
        assert fuzz.resets >= count // 2000
        assert (folder / "drive").stat().st_size == drive
        fuzz.recover()
        assert guest.run(4, 2, io=True, dw12=SLM_BYTES).status == 0
        return fuzz.statuses


def test_ten_thousand_malformed_commands(tmp_path: Path) -> None:
    statuses = check(tmp_path, 10_000, 47)
    assert len(statuses) >= 17
    assert statuses["SUCCESS"] > 1000


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_thousand_malformed_commands(tmp_path: Path, seed: int) -> None:
    assert len(check(tmp_path, 20_000, 100 + seed)) >= 17


@pytest.mark.deep
def test_malformed_commands_for_queues_in_rtl(tmp_path: Path) -> None:
    assert len(check(tmp_path, 4_000, 47, "rtl")) >= 17
