"""Frames on a serial line: HDLC in asynchronous form, with a CRC of 32 bits.

A frame is its bytes and their CRC, least significant byte first, between two flags. A flag or an
escape among them is sent as an escape and the byte with bit 5 inverted. One flag may end a frame
and begin the next. What is damaged, too short, or too long, is dropped without an answer: that
something is missing is found by sequence numbers, and by waiting.

Ref: RFC 1662, sections 4 and C.3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from zlib import crc32

FLAG = 0x7E
ESCAPE = 0x7D
INVERT = 0x20
CRC_BYTES = 4


def to_frame(body: bytes) -> bytes:
    """The bytes on the line for one frame, with a flag at each end."""
    whole = body + crc32(body).to_bytes(CRC_BYTES, "little")
    stuffed = whole.replace(b"\x7d", b"\x7d\x5d").replace(b"\x7e", b"\x7d\x5e")
    return bytes([FLAG]) + stuffed + bytes([FLAG])


@dataclass
class Deframer:
    """Finds frames in what comes from a line, in pieces of any size.

    Attributes
    ----------
    most_bytes : of a body; longer frames are dropped.
    dropped : frames that were damaged, too short or too long.
    """

    most_bytes: int
    dropped: int = 0
    _held: bytearray = field(default_factory=bytearray)
    _started: bool = False
    _escaped: bool = False
    _bad: bool = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies of the frames that these bytes complete, in order."""
        for byte in data:
            if byte == FLAG:
                body = self._end()
                if body is not None:
                    yield body
            elif not self._started:
                continue
            elif byte == ESCAPE:
                self._bad |= self._escaped
                self._escaped = True
            else:
                self._held.append(byte ^ INVERT if self._escaped else byte)
                self._escaped = False
                if len(self._held) > self.most_bytes + CRC_BYTES:
                    self._bad = True
                    self._held.clear()

    def _end(self) -> bytes | None:
        """The body of the frame that a flag ends, if it is whole; begin the next."""
        held, bad = bytes(self._held), self._bad or self._escaped
        empty = not held and not bad
        self._held.clear()
        self._escaped = self._bad = False
        started, self._started = self._started, True
        if not started or empty:
            return None
        body, crc = held[:-CRC_BYTES], held[-CRC_BYTES:]
        if bad or not body or crc != crc32(body).to_bytes(CRC_BYTES, "little"):
            self.dropped += 1
            return None
        return body
