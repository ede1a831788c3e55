"""Requests and answers on the link to a board: the contents of the frames of `framing`.

The host sends requests, and the board executes and answers them one after the other, in order of
arrival. Numbers are little-endian. A request is

    u8 op | space << 4, u8 sequence, u16 length, u48 address, and of a write `length` bytes

and an answer

    u8 op | space << 4 | 0x80, u8 sequence, u8 status, u8 0, u16 length, `length` bytes

*Validity*: a body that is too short for a header, has an unknown op or space, or bit 7 of the other
direction, is dropped without effect; so a line may echo. An answer belongs to a request if op,
space and sequence are equal and its form is valid for the request, see `Answer.answers`; otherwise
the answer is dropped. A frame ends with its closing flag, which is sent at once. A request is
executed only after its CRC is checked, and an answer to a read begins only when all of its data are
available. A line may lose, damage and repeat bytes and frames; it is assumed not to repeat a
sequence of two or more whole frames.

*Sessions*: a session begins with SYNC, whose address is a random number of the host that the answer
repeats. SYNC has sequence 0, and is sent alone, each time with a new number: only the answer to the
newest counts. The first request behind it has sequence 1. SYNC is executed in order like any
request, and resets only the record below; with the number of the current session it changes
nothing. After its own reset a board has no session, and answers every request but SYNC with
NO_SESSION, malformed or not, because its registers were lost. The reset of the device through
`Space.BOARD` does not end a session.

*Losses*: after a timeout a request is sent again, with its sequence number. Reads have no side
effects, and writes of memory are idempotent. Writes of registers are not: the board keeps a record
of the last executed request of any kind (with any status but BAD_REQUEST and NO_SESSION), and a
write of registers whose op, space, sequence and address equal those of the record is not executed
again; its answer, including an error and its address, is repeated. (The record is not that of the
last write, however long ago: sequence numbers repeat after 256 requests.) Registers are those of
every space but memory and the manifest.

*Waits*: the timeout doubles with every retransmission, until a request that was sent once is
answered, which shows the time of an answer. Giving up a request ends the session: the request may
have been executed, and only SYNC is sent after it.

*Ahead*: a board holds `window` requests, and drops any more. The next sequence number less that of
the oldest request without an answer is at most `window`, and `MOST_AHEAD`. A write of registers is
sent alone: nothing before it is unanswered, and nothing follows before its answer. Of two requests
without an answer that share a byte of memory none is a write.

*Limits*: a request has at most `MOST_DATA` bytes within one page of 4 KiB. Those of registers are
whole, aligned words. A request that violates `Request.check` is answered with BAD_REQUEST. No bit
of an address is ignored: an invalid address is answered with DECERR, as is one beyond the end of
the manifest. Words are accessed in ascending order, and memory in ascending bursts; the first
failure ends a request, earlier writes remain, and the answer has the address of the failure. After
BUS_TIMEOUT requests of that space fail in the same way until the late response has been received
and dropped, or the device was reset.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from nearstep_spec.csr.model import WORD_BYTES
from nearstep_spec.errors import NearstepError

VERSION = 1
"""Version of this protocol; the answer to SYNC has the board's version."""

MOST_DATA = 1024
"""Bytes of data in a request or an answer."""

PAGE_BYTES = 4096
"""No request crosses a multiple of this."""

MOST_AHEAD = 64
"""Most requests in a row with the first unanswered: a late answer is never mistaken for that of a
later request with the same number.
"""

ANSWER_BIT = 1 << 7
"""Bit 7 of the first byte: 1 in answers, 0 in requests."""

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
    """Operation of a request."""

    SYNC = 0
    READ = 1
    WRITE = 2


class Space(IntEnum):
    """Address space of a request."""

    REGISTERS = 0  # registers of the device, for its driver
    MEMORY = 1
    BOARD = 2  # registers of the board itself: `nearstep_spec.boards.registers`
    CONTROLLER = 3  # registers of the memory controller
    MANIFEST = 4  # read-only text


class Status(IntEnum):
    """Result of a request. Values below 4 are responses of the bus, see `Response`."""

    OK = 0
    SLVERR = 2
    DECERR = 3
    BUS_TIMEOUT = 4
    BAD_REQUEST = 8
    NO_SESSION = 9


FAILED = (Status.SLVERR, Status.DECERR, Status.BUS_TIMEOUT)
"""Results of requests that failed on the board's bus; the answer has the address."""


class MessageError(NearstepError, ValueError):
    """A frame holds no valid request or answer."""


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
    """A request of the host.

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
        """Parse the body of a frame, valid for execution or not.

        Raises
        ------
        MessageError : the body is no request, and must be dropped.
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
        """Parse a request that a board must execute.

        Raises
        ------
        MessageError : the body is not a request, or must not be executed.
        """
        found = cls.parse(body)
        found.check()
        return found

    def check(self) -> None:
        """Raise `MessageError` unless a board must execute the request."""
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
    """An answer of the board.

    Attributes
    ----------
    op, space, sequence : of the request.
    data : of a read; or after an error of the bus the failed address, see `failed_at`; of SYNC see
        `Hello`.
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
        """Parse the answer in the body of a frame.

        Raises
        ------
        MessageError : the body is not an answer.
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
        """Whether the answer belongs to the request; others are dropped.

        With OK the answer to a read has exactly the requested bytes, SYNC repeats its number, and a
        write has no data; with `FAILED` there is an address; with other statuses no data.
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
        """Return the address of the first word, or of the burst, that the bus answered with an
        error.
        """
        return int.from_bytes(_FAILURE.unpack(self.data)[0], "little")

    @staticmethod
    def failure(address: int) -> bytes:
        """Encode the data of an answer to a request that failed at `address`."""
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
        """Parse the data of an answer to SYNC.

        Raises
        ------
        MessageError : the data have another length or version.
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
