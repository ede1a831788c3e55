"""Requests and answers on the link to a board: what stands in the frames of `framing`.

The host asks, and the board carries requests out and answers them one after the other, in the order
in which they came. Numbers are little-endian. A request is

    u8 op | space << 4, u8 sequence, u16 length, u48 address, and of a write `length` bytes

and an answer

    u8 op | space << 4 | 0x80, u8 sequence, u8 status, u8 0, u16 length, `length` bytes

*Validity*: a body that is too short for a header, has an op or a space that nobody knows, or
bit 7 of the other direction, is dropped and has no effect; so a line may echo. An answer belongs to
a request if op, space and sequence are the same and it has a form that this request can have, see
`Answer.answers`; else it is dropped. A frame ends with its closing flag, which is sent at once.
Nothing is carried out before its CRC is checked, and no answer to a read begins before all of its
data are there. A line may lose, damage and repeat bytes and frames; that it repeats a stretch of
two whole frames or more is taken not to happen.

*Sessions*: one begins with SYNC, whose address is a number that the host has chosen at random and
that the answer repeats. It has sequence 0, and is sent alone, each time with a new number: only the
answer to the newest counts. The first request behind it has sequence 1. SYNC has its turn like any
request, and resets nothing but the record below; with the number of the session that is it changes
nothing. After its own reset a board has no session, and answers every request but SYNC with
NO_SESSION, badly formed or not: what registers held is gone, and the host must know. The reset of
the device through `Space.BOARD` does not end a session.

*Losses*: whoever waits in vain sends the request again, with its sequence number. Reads have
no side effects, and a write of memory has the same effect twice. A write of registers has not: the
board keeps a record of the last request that was carried out, whatever it was and however it ended
(with any status but BAD_REQUEST and NO_SESSION), and a write of registers whose op, space, sequence
and address are those of the record when its turn comes is not carried out again; its answer, an
error and its address too, is that of the first time. (Not of the last write, however long ago:
numbers come again after 256 requests.) Registers are those of every space but memory and the
manifest.

*Waits*: they double with every time that a request is sent again, and stay as long until a request
that was sent once is answered, which shows how long an answer takes. Who gives up on a request has
no session: it is unknown whether it was carried out, and nothing but SYNC is sent after it.

*Ahead*: a board holds `window` requests, and drops what is beyond whole. The next sequence number
less that of the oldest request without an answer is at most `window`, and `MOST_AHEAD`. A write of
registers is sent alone: nothing before it is unanswered, and nothing follows before its answer. Of
two requests without an answer that share a byte of memory none is a write.

*Limits*: a request has at most `MOST_DATA` bytes and stays within one page of 4 KiB. Those of
registers are whole, aligned words. What breaks a rule of `Request.check` is answered with
BAD_REQUEST. No bit of an address is ignored: one that a space does not have is answered with
DECERR, as is a part of the manifest beyond its end. Words are accessed in ascending order, and
memory in ascending bursts; the first that fails ends a request, what was written before it stays,
and the answer tells its address. After BUS_TIMEOUT requests of that space end likewise until the
late response has come, and was thrown away, or the device was reset.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from nearstep_spec.csr.model import WORD_BYTES
from nearstep_spec.errors import NearstepError

VERSION = 1
"""Of this protocol; the answer to SYNC tells that of the board."""

MOST_DATA = 1024
"""Bytes of data in a request or an answer."""

PAGE_BYTES = 4096
"""No request crosses a multiple of this."""

MOST_AHEAD = 64
"""Requests in a row of which the first is not answered, at most: a late answer is never taken for
that of a later request with the same number."""

ANSWER_BIT = 1 << 7
"""Of the first byte of an answer. Requests have a 0 there."""

ADDRESS_BYTES = 6
_REQUEST = struct.Struct("<BBH6s")
_ANSWER = struct.Struct("<BBBBH")
_FAILURE = struct.Struct("<6s")
_HELLO = struct.Struct("<6sBBH")
REQUEST_BYTES = _REQUEST.size
ANSWER_BYTES = _ANSWER.size
MOST_REQUEST = REQUEST_BYTES + MOST_DATA
MOST_ANSWER = ANSWER_BYTES + MOST_DATA


class Op(IntEnum):
    """What a request asks for."""

    SYNC = 0
    READ = 1
    WRITE = 2


class Space(IntEnum):
    """What an address is of."""

    REGISTERS = 0  # of the device, as its driver knows them
    MEMORY = 1
    BOARD = 2  # registers of the board itself: `nearstep_spec.boards.registers`
    CONTROLLER = 3  # registers of the memory controller
    MANIFEST = 4  # read-only text


class Status(IntEnum):
    """How a request ended. Those below 4 are responses of the bus, see `Response`."""

    OK = 0
    SLVERR = 2
    DECERR = 3
    BUS_TIMEOUT = 4
    BAD_REQUEST = 8
    NO_SESSION = 9


FAILED = (Status.SLVERR, Status.DECERR, Status.BUS_TIMEOUT)
"""How a request ends that the board's bus did not carry out; its answer tells the address."""


class MessageError(NearstepError, ValueError):
    """Bytes of a whole frame that are no request, or no answer."""


def _kind(byte: int, direction: int) -> tuple[Op, Space]:
    """Op and space in the first byte of a body."""
    if byte & ANSWER_BIT != direction:
        raise MessageError(f"bit 7 of {byte:#04x} is that of the other direction")
    try:
        return Op(byte & 15), Space((byte & ~ANSWER_BIT) >> 4)
    except ValueError as error:
        raise MessageError(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the host asks.

    Attributes
    ----------
    address : in bytes; of SYNC the number that the answer repeats.
    length : bytes to read or write.
    data : to write.
    """

    op: Op
    space: Space = Space.REGISTERS
    sequence: int = 0
    address: int = 0
    length: int = 0
    data: bytes = b""

    def encode(self) -> bytes:
        """The body of a frame."""
        return (
            _REQUEST.pack(
                self.op | self.space << 4,
                self.sequence,
                self.length,
                self.address.to_bytes(ADDRESS_BYTES, "little"),
            )
            + self.data
        )

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """What the body of a frame asks for, whether it may be carried out or not.

        Raises
        ------
        MessageError : it is no request, and to be dropped.
        """
        if len(body) < REQUEST_BYTES:
            raise MessageError(f"a request has at least {REQUEST_BYTES} bytes, not {len(body)}")
        kind, sequence, length, address = _REQUEST.unpack_from(body)
        op, space = _kind(kind, 0)
        return cls(
            op=op,
            space=space,
            sequence=sequence,
            address=int.from_bytes(address, "little"),
            length=length,
            data=body[REQUEST_BYTES:],
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """As `parse`, of a request that a board has to carry out.

        Raises
        ------
        MessageError : it is none.
        """
        found = cls.parse(body)
        found.check()
        return found

    def check(self) -> None:
        """Raise `MessageError` unless a board has to carry it out."""
        expected = self.length if self.op is Op.WRITE else 0
        if len(self.data) != expected:
            raise MessageError(f"data must be {expected} bytes, not {len(self.data)}")
        if self.op is Op.SYNC:
            if self.length or self.space:
                raise MessageError("SYNC has neither a space nor data")
            return
        if not 1 <= self.length <= MOST_DATA:
            raise MessageError(f"length must be 1 to {MOST_DATA}, not {self.length}")
        if self.address % PAGE_BYTES + self.length > PAGE_BYTES:
            raise MessageError("a request must stay within one page")
        if self.space is Space.MANIFEST and self.op is Op.WRITE:
            raise MessageError("the manifest is read-only")
        words = self.space not in (Space.MEMORY, Space.MANIFEST)
        if words and (self.address | self.length) % WORD_BYTES:
            raise MessageError("registers are whole words")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the board answers.

    Attributes
    ----------
    op, space, sequence : of the request.
    data : what was read, or after an error of the bus the address where it failed: see
        `failed_at`; of SYNC see `Hello`.
    """

    op: Op
    space: Space = Space.REGISTERS
    sequence: int = 0
    status: Status = Status.OK
    data: bytes = b""

    def encode(self) -> bytes:
        """The body of a frame."""
        kind = self.op | self.space << 4 | ANSWER_BIT
        return _ANSWER.pack(kind, self.sequence, self.status, 0, len(self.data)) + self.data

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """The answer in the body of a frame.

        Raises
        ------
        MessageError : it is none.
        """
        if len(body) < ANSWER_BYTES:
            raise MessageError(f"an answer has at least {ANSWER_BYTES} bytes, not {len(body)}")
        kind, sequence, status, zero, length = _ANSWER.unpack_from(body)
        data = body[ANSWER_BYTES:]
        if len(data) != length:
            raise MessageError(f"data must be {length} bytes, not {len(data)}")
        if zero:
            raise MessageError(f"the byte behind the status must be 0, not {zero}")
        op, space = _kind(kind, ANSWER_BIT)
        try:
            ended = Status(status)
        except ValueError as error:
            raise MessageError(str(error)) from None
        return cls(op=op, space=space, sequence=sequence, status=ended, data=data)

    def answers(self, request: Request) -> bool:
        """Whether it belongs to the request: another one is dropped.

        With OK a read has exactly the bytes that were asked for, SYNC repeats its number, and a
        write has no data; with `FAILED` there is an address; with any other status nothing.
        """
        if (self.op, self.space, self.sequence) != (request.op, request.space, request.sequence):
            return False
        if request.op is Op.SYNC:
            number = request.address.to_bytes(ADDRESS_BYTES, "little")
            return self.status is Status.OK and self.data[:ADDRESS_BYTES] == number
        if self.status is Status.OK:
            return len(self.data) == (request.length if request.op is Op.READ else 0)
        return len(self.data) == (ADDRESS_BYTES if self.status in FAILED else 0)

    @property
    def failed_at(self) -> int:
        """Address of the first word, or of the burst, that the bus answered with an error."""
        return int.from_bytes(_FAILURE.unpack(self.data)[0], "little")

    @staticmethod
    def failure(address: int) -> bytes:
        """The data of an answer to a request that failed at `address`."""
        return _FAILURE.pack(address.to_bytes(ADDRESS_BYTES, "little"))


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The data of an answer to SYNC.

    Attributes
    ----------
    number : that of the request.
    version : of the protocol.
    window : requests that the board holds.
    manifest_bytes : length of the manifest.
    """

    number: int
    version: int = VERSION
    window: int
    manifest_bytes: int

    def encode(self) -> bytes:
        number = self.number.to_bytes(ADDRESS_BYTES, "little")
        return _HELLO.pack(number, self.version, self.window, self.manifest_bytes)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The greeting in the data of an answer to SYNC.

        Raises
        ------
        MessageError : it does not have the length, or is of another version.
        """
        if len(data) < ADDRESS_BYTES + 1:
            raise MessageError(f"the answer to SYNC has {_HELLO.size} bytes, not {len(data)}")
        version = data[ADDRESS_BYTES]
        if version != VERSION or len(data) != _HELLO.size:
            raise MessageError(f"the board speaks version {version}, the host {VERSION}")
        number, version, window, manifest = _HELLO.unpack(data)
        return cls(
            number=int.from_bytes(number, "little"),
            version=version,
            window=window,
            manifest_bytes=manifest,
        )
