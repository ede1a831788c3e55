"""Frames on a serial line: HDLC in asynchronous form, with a CRC of 32 bits.

A frame is its bytes and their CRC, least significant byte first, between two flags. A flag or an
escape among them is sent as an escape and the byte with bit 5 inverted. One flag may end a frame
and begin the next. Frames that are damaged, too short, or too long are dropped without an answer;
sequence numbers and timeouts detect the loss.

Ref: RFC 1662, sections 4 and C.3.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from zlib import crc32

FLAG = 0x7E
ESCAPE = 0x7D
INVERT = 0x20
CRC_BYTES = 4
_FLAG = bytes([FLAG])
_ESCAPE = bytes([ESCAPE])
_ESCAPED = re.compile(rb"\x7d(.)", re.DOTALL)


def to_frame(body: bytes) -> bytes:
    """Encode one frame, with a flag at each end."""
    whole = body + crc32(body).to_bytes(CRC_BYTES, "little")
    stuffed = whole.replace(b"\x7d", b"\x7d\x5d").replace(b"\x7e", b"\x7d\x5e")
    return bytes([FLAG]) + stuffed + bytes([FLAG])


@dataclass
class Deframer:
    """Finds frames in bytes from a line, in pieces of any size.

    Attributes
    ----------
    most_bytes : limit of a body; longer frames are dropped.
    dropped : frames that were damaged, too short or too long.
    """

    most_bytes: int
    dropped: int = 0
    _held: bytearray = field(default_factory=bytearray)
    _started: bool = False
    _too_long: bool = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies of the frames that these bytes complete, in order."""
        *whole, rest = data.split(_FLAG)
        for part in whole:
            self._hold(part)
            body = self._end()
            if body is not None:
                yield body
        self._hold(rest)

    def _hold(self, part: bytes) -> None:
        """Store a part of a frame, unless the frame is too long."""
        if not self._started:
            return
        self._held += part
        if len(self._held) > 2 * (self.most_bytes + CRC_BYTES):
            self._too_long = True
            self._held.clear()

    def _end(self) -> bytes | None:
        """Return the body of the frame that a flag ends, if intact, and begin the next."""
        held, too_long = bytes(self._held), self._too_long
        self._held.clear()
        self._too_long = False
        started, self._started = self._started, True
        if not started or not (held or too_long):
            return None
        whole = None if too_long else _unescaped(held)
        if whole is not None and CRC_BYTES < len(whole) <= self.most_bytes + CRC_BYTES:
            body, crc = whole[:-CRC_BYTES], whole[-CRC_BYTES:]
            if crc == crc32(body).to_bytes(CRC_BYTES, "little"):
                return body
        self.dropped += 1
        return None


def _unescaped(held: bytes) -> bytes | None:
    """Decode the bytes between two flags; None if an escape is followed by an escape or nothing."""
    if _ESCAPE not in held:
        return held
    pairs = _ESCAPED.findall(held)
    if _ESCAPE in pairs or _ESCAPED.sub(b"", held).endswith(_ESCAPE):
        return None
    return _ESCAPED.sub(lambda pair: bytes([pair[1][0] ^ INVERT]), held)
