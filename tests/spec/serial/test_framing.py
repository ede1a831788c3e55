"""Frames on a serial line: what was sent is found, and nothing else, in pieces of any size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import pytest

from nearstep_spec.serial.framing import CRC_BYTES, ESCAPE, FLAG, INVERT, Deframer, to_frame

MOST = 40
SEED = 14


@dataclass
class Naive:
    """A deframer that looks at one byte after the other, as hardware does."""

    most_bytes: int
    dropped: int = 0
    held: bytearray = field(default_factory=bytearray)
    started: bool = False
    escaped: bool = False
    bad: bool = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        for byte in data:
            if byte == FLAG:
                yield from self.end()
            elif not self.started:
                continue
            elif byte == ESCAPE:
                self.bad |= self.escaped
                self.escaped = True
            else:
                self.held.append(byte ^ INVERT if self.escaped else byte)
                self.escaped = False
                if len(self.held) > self.most_bytes + CRC_BYTES:
                    self.bad = True
                    self.held.clear()

    def end(self) -> Iterator[bytes]:
        held, bad = bytes(self.held), self.bad or self.escaped
        empty = not held and not bad
        self.held.clear()
        self.escaped = self.bad = False
        started, self.started = self.started, True
        if not started or empty:
            return
        body, crc = held[:-CRC_BYTES], held[-CRC_BYTES:]
        if bad or not body or crc != crc32(body).to_bytes(CRC_BYTES, "little"):
            self.dropped += 1
        else:
            yield body


def pieces(data: bytes, rng: np.random.Generator) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = int(rng.integers(1, 30))
        yield data[at : at + size]
        at += size


def some_bytes(rng: np.random.Generator) -> bytes:
    """A body, or a longer one than may be; flags and escapes are as many as other bytes."""
    size = int(rng.integers(1, MOST + 4))
    special = rng.choice([FLAG, ESCAPE, FLAG ^ INVERT, ESCAPE ^ INVERT, 0, 255], size)
    usual = rng.integers(0, 256, size)
    return np.where(rng.random(size) < 0.5, special, usual).astype(np.uint8).tobytes()


def test_bodies_are_found_in_pieces_of_any_size() -> None:
    rng = np.random.default_rng(SEED)
    sent = [body for body in (some_bytes(rng) for _ in range(2000)) if len(body) <= MOST]
    line = b"noise" + b"".join(map(to_frame, sent))
    deframer = Deframer(MOST)
    found = [body for piece in pieces(line, rng) for body in deframer.feed(piece)]
    assert found == sent
    assert deframer.dropped == 0
    assert len(sent) > 1500


def test_a_flag_in_a_frame_is_seen_at_its_ends_alone() -> None:
    frame = to_frame(bytes([FLAG, ESCAPE, FLAG]))
    assert frame.count(FLAG) == 2
    assert frame[0] == frame[-1] == FLAG


def test_damage_gives_what_a_deframer_of_bytes_gives() -> None:
    rng = np.random.default_rng(SEED + 1)
    print(f"seed {SEED + 1}")
    deframer, naive = Deframer(MOST), Naive(MOST)
    compared = dropped = 0
    for _ in range(400):
        line = bytearray(b"".join(to_frame(some_bytes(rng)) for _ in range(5)))
        for _ in range(int(rng.integers(0, 6))):
            at = int(rng.integers(len(line)))
            if rng.random() < 0.5:
                line[at] = int(rng.choice([FLAG, ESCAPE, int(rng.integers(256))]))
            else:
                del line[at]
        for piece in pieces(bytes(line), rng):
            mine, theirs = list(deframer.feed(piece)), list(naive.feed(piece))
            assert mine == theirs
            compared += len(mine)
        assert deframer.dropped == naive.dropped
        dropped = deframer.dropped
    print(f"{compared} bodies compared, {dropped} frames dropped")
    assert compared > 700
    assert dropped > 300


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (to_frame(b"body")[:-3] + bytes([FLAG]), "cut off"),
        (to_frame(b"body").replace(b"b", b"c"), "another byte"),
        (bytes([FLAG, 1, 2, 3, 4, FLAG]), "no body"),
        (bytes([FLAG, 1, FLAG]), "too short"),
        (to_frame(bytes(MOST + 1)), "too long"),
        (to_frame(bytes(4 * MOST)), "much too long"),
        (to_frame(b"body")[:-1] + bytes([ESCAPE, FLAG]), "escaped end"),
        (bytes([FLAG, ESCAPE, ESCAPE, 1, 2, 3, 4, 5, 6, FLAG]), "escaped escape"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_damaged_frame_is_dropped_and_the_next_one_found(damaged: bytes, why: str) -> None:
    deframer = Deframer(MOST)
    assert list(deframer.feed(damaged + to_frame(b"next"))) == [b"next"], why
    assert deframer.dropped == 1


def test_one_flag_ends_a_frame_and_begins_the_next() -> None:
    deframer = Deframer(MOST)
    line = to_frame(b"one")[:-1] + to_frame(b"two")
    assert list(deframer.feed(line)) == [b"one", b"two"]
    assert deframer.dropped == 0


def test_what_comes_before_the_first_flag_is_no_frame() -> None:
    deframer = Deframer(MOST)
    assert list(deframer.feed(to_frame(b"body")[1:])) == []
    assert deframer.dropped == 0
