"""Packets of a device that keeps no rule of PCIe, and what a card must make of each of them.

What is expected comes from the PCIe Base Specification and the card's page, docs/smartssd.md: it
shares nothing with the models in C++ and the RTL.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.smartssd.pcie_card import MEMORY_BASE, REGISTER_BASE

PAGE = 4096
MAX_PAYLOAD = 256
REGISTER_BYTES = 0x2000
SC, UR, CA = 0, 1, 4
"""Completion status."""

TYPES = {
    "read": (False, 0x00), "write": (True, 0x00), "locked": (False, 0x01), "io_read": (False, 2),
    "io_write": (True, 2), "configuration": (False, 4), "completion": (False, 0x0A),
    "completion_data": (True, 0x0A), "fetch_add": (True, 0x0C), "swap": (True, 0x0D),
    "compare_and_swap": (True, 0x0E), "message": (False, 0x13), "message_data": (True, 0x12),
}  # fmt: skip
"""With data or without, and type: PCIe Base Specification, table 2-3."""

POSTED = ("write", "message", "message_data")
UNKNOWN_TYPES = (0x03, 0x06, 0x07, 0x08, 0x0F, 0x18, 0x1F)


class Fate(Enum):
    """What becomes of a packet before the card sees it."""

    MALFORMED = "malformed"
    UNEXPECTED = "unexpected"
    CONFIGURATION = "configuration"
    UNCLAIMED = "unclaimed"
    HANDED_OVER = "handed over"


@dataclass(frozen=True)
class Packet:
    """One packet. `longer` dwords more, or less, come than the header says."""

    kind: str
    address: int
    dwords: int
    first: int = 0xF
    last: int = 0
    requester: int = 0x300
    tag: int = 0
    traffic_class: int = 0
    attributes: int = 0
    poisoned: bool = False
    digest: bool = False
    longer: int = 0
    type: int | None = None  # instead of that of the kind
    payload: tuple[int, ...] = field(default=(), repr=False)

    @property
    def long_header(self) -> bool:
        return self.address >= 1 << 32 or self.kind.startswith("message")

    def words(self) -> NDArray[np.uint32]:
        """On the link, see `PcieCardBackend.send`."""
        data, type_ = TYPES[self.kind]
        type_ = type_ if self.type is None else self.type
        form = 2 * data + self.long_header
        length = self.dwords & 0x3FF
        first = form << 29 | type_ << 24 | self.traffic_class << 20
        first |= (self.attributes >> 2) << 18 | self.digest << 15 | self.poisoned << 14
        first |= (self.attributes & 3) << 12 | length
        second = self.requester << 16 | self.tag << 8 | self.last << 4 | self.first
        address = [self.address >> 32] * self.long_header + [self.address & 0xFFFF_FFFF]
        content = list(self.payload)
        if self.longer < 0:
            content = content[: self.longer]
        content += [0xBAD0_BAD0] * (max(self.longer, 0) + self.digest)
        return np.array([first, second, *address, *content], np.uint32)

    @property
    def posted(self) -> bool:
        return self.kind in POSTED

    @property
    def carries(self) -> bool:
        return TYPES[self.kind][0]

    @property
    def bar(self) -> str | None:
        """The BAR that claims its address."""
        if REGISTER_BASE <= self.address < REGISTER_BASE + REGISTER_BYTES:
            return "registers"
        return "memory" if self.address >= MEMORY_BASE else None

    @property
    def forbidden(self) -> bool:
        """Whether no memory request may have its byte enables (2.2.5)."""
        if self.dwords == 1:
            return self.last != 0
        if self.first == 0 or self.last == 0:
            return True
        pairs = self.dwords == 2 and self.address % 8 == 0
        return not pairs and (self.first not in (15, 14, 12, 8) or self.last not in (15, 7, 3, 1))

    def enables(self) -> list[bool]:
        """Whether each of its bytes is enabled."""
        masks = [self.first, *[0xF] * (self.dwords - 2), *[self.last] * (self.dwords > 1)]
        return [bool(mask >> byte & 1) for mask in masks for byte in range(4)]


@dataclass(frozen=True)
class Rules:
    """What a card has, and so what it does with a packet.

    Attributes
    ----------
    memory_bytes, bar_bytes : of the memory, and of its BAR.
    readable : offsets of words in BAR 0 that can be read.
    writable : those of which a write is no error.
    """

    memory_bytes: int
    bar_bytes: int
    readable: Collection[int]
    writable: Collection[int]

    def fate(self, packet: Packet) -> Fate:
        """Before the card (2.2, 2.3.2, 2.7.2.2)."""
        wrong = packet.longer != 0 or packet.type is not None
        too_long = packet.carries and 4 * packet.dwords > MAX_PAYLOAD
        if wrong or too_long:
            return Fate.MALFORMED
        if packet.kind.startswith("completion"):
            return Fate.UNEXPECTED
        if packet.kind == "configuration":
            return Fate.CONFIGURATION
        if packet.kind.startswith("message"):
            return Fate.HANDED_OVER
        claimed = packet.bar is not None
        if packet.bar == "memory":
            claimed = packet.address < MEMORY_BASE + self.bar_bytes
        if not claimed or (packet.poisoned and packet.carries and not packet.posted):
            return Fate.UNCLAIMED
        return Fate.HANDED_OVER

    def status(self, packet: Packet) -> int | None:
        """Of the completion; None if there is none."""
        fate = self.fate(packet)
        if packet.posted or fate in (Fate.MALFORMED, Fate.UNEXPECTED, Fate.CONFIGURATION):
            return None
        return UR if fate is Fate.UNCLAIMED else self.verdict(packet)

    def verdict(self, packet: Packet) -> int:
        """Of the card on a request that it sees, whether it has an answer or not."""
        if packet.kind not in ("read", "write"):
            return UR
        memory = packet.bar == "memory"
        offset = packet.address - (MEMORY_BASE if memory else REGISTER_BASE)
        if offset + 4 * packet.dwords > (self.memory_bytes if memory else REGISTER_BYTES):
            return UR
        if packet.forbidden or packet.address % PAGE + 4 * packet.dwords > PAGE:
            return CA
        if memory:
            return SC
        whole = all(packet.enables()) or (packet.dwords == 1 and packet.first == 0)
        if packet.dwords > 2 or not whole:
            return CA
        if packet.first == 0:
            return SC
        known = self.writable if packet.kind == "write" else self.readable
        every = range(offset, offset + 4 * packet.dwords, 4)
        return SC if all(each in known for each in every) else UR

    def writes(self, packet: Packet) -> bool:
        """Whether bytes of memory become those of its payload."""
        return (
            packet.kind == "write"
            and packet.bar == "memory"
            and self.fate(packet) is Fate.HANDED_OVER
            and not packet.poisoned
            and self.verdict(packet) == SC
        )


@dataclass(frozen=True)
class Places:
    """Where packets go, as offsets in the memory.

    Attributes
    ----------
    scratch : bytes that others may write.
    constant : bytes that nobody writes.
    arrays : those of runs.
    """

    scratch: range
    constant: range
    arrays: range


class Vandal:
    """Makes packets at random, most of them wrong.

    None is a write that a driver could make of registers or arrays: those would be right.
    """

    def __init__(self, rules: Rules, places: Places, seed: str) -> None:
        self.rules = rules
        self.places = places
        self.random = random.Random(seed)

    def packet(self) -> Packet:
        """The next one."""
        while True:
            made = self._made()
            if self._may_be_sent(made):
                return made

    def _may_be_sent(self, made: Packet) -> bool:
        if self.rules.writes(made):
            begin = made.address - MEMORY_BASE
            return begin >= self.places.scratch.start and (
                begin + 4 * made.dwords <= self.places.scratch.stop
            )
        good = self.rules.fate(made) is Fate.HANDED_OVER and not made.poisoned
        return not (
            good
            and made.kind == "write"
            and made.bar == "registers"
            and made.first != 0
            and self._changes(made)
        )

    def _changes(self, made: Packet) -> bool:
        """A write of registers of which a word is carried out: the first, or the second."""
        if self.rules.verdict(made) == CA:
            return False
        offset = made.address - REGISTER_BASE
        words = range(offset, offset + 4 * made.dwords, 4)
        return any(each in self.rules.writable for each in words)

    def _made(self) -> Packet:
        rng = self.random
        kind = rng.choices(
            list(TYPES),
            weights=[30, 30, 3, 2, 2, 2, 3, 3, 2, 2, 2, 3, 3],
        )[0]
        carries = TYPES[kind][0]
        most = MAX_PAYLOAD // 4 if carries else 1024
        dwords = rng.choice((1, 1, 2, 3, 4, 16, 17, rng.randint(1, 64), rng.randint(1, most)))
        dwords = min(dwords, most)
        if kind.startswith(("io", "configuration")):
            dwords = 1
        if kind == "message":
            dwords = 1
        address = self._address(kind, dwords)
        if kind.startswith(("completion", "configuration")):
            address &= 0xFFFF_FFFF  # a longer header would be malformed
        first, last = 0xF, 0xF if dwords > 1 else 0
        if rng.random() < 0.3:
            first, last = rng.randrange(16), rng.randrange(16)
        trouble = rng.random()
        longer = 0
        if carries and trouble < 0.08:
            longer = rng.choice((-1, 1, 2, -dwords, 5))
            longer = max(longer, -dwords)
        type_ = rng.choice(UNKNOWN_TYPES) if 0.08 <= trouble < 0.1 else None
        if carries and 0.1 <= trouble < 0.12:
            dwords = rng.randint(MAX_PAYLOAD // 4 + 1, 300)
        return Packet(
            kind,
            address,
            dwords,
            first,
            last,
            requester=rng.choice((0x300, 0x301, 0x5A5A, 0xFFFF)),
            tag=rng.randrange(256),
            traffic_class=rng.randrange(8),
            attributes=rng.randrange(8),
            poisoned=rng.random() < 0.1,
            digest=rng.random() < 0.1,
            longer=longer,
            type=type_,
            payload=tuple(rng.getrandbits(32) for _ in range(dwords)) if carries else (),
        )

    def _address(self, kind: str, dwords: int) -> int:
        rng, places, rules = self.random, self.places, self.rules
        if kind.startswith("io"):
            return REGISTER_BASE + rng.randrange(0, 2 * REGISTER_BYTES, 4)
        near = rng.choice((0, 4 * dwords, 4 * rng.randint(0, dwords + 2)))
        where = rng.random()
        if where < 0.25:
            return REGISTER_BASE + rng.randrange(0, REGISTER_BYTES + 64, 4)
        if where < 0.3:
            outside = (0x1000, REGISTER_BASE - 4, MEMORY_BASE - 4, MEMORY_BASE + rules.bar_bytes)
            return rng.choice(outside)
        if where < 0.4:  # at the end of the memory, and beyond
            return MEMORY_BASE + max(0, rules.memory_bytes - near)
        if where < 0.45:
            return MEMORY_BASE + rng.randrange(rules.memory_bytes, rules.bar_bytes, 4)
        area = rng.choice((places.scratch, places.scratch, places.constant, places.arrays))
        if where < 0.6:  # at the end of a page
            page = rng.randrange(area.start // PAGE, area.stop // PAGE) * PAGE
            return MEMORY_BASE + max(area.start, page + PAGE - near)
        return MEMORY_BASE + rng.randrange(area.start, area.stop, 4)


def read_bytes(packet: Packet, content: Sequence[int]) -> bytes:
    """What a read of these bytes of memory gives, 0 where none is enabled."""
    return bytes(
        byte if enabled else 0 for byte, enabled in zip(content, packet.enables(), strict=True)
    )
