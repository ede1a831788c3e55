"""Requests and answers on the link to a board: what stands in the frames of `framing`.

The host asks, the board answers each request once it is carried out, in the order in which
requests came. Numbers are little-endian. A request is

    u8 op | space << 4, u8 sequence, u16 length, u48 address, and of a write `length` bytes

and an answer

    u8 op | space << 4, u8 sequence, u8 status, u8 0, u16 length, `length` bytes

A session begins with SYNC, whose address is a number that the host has chosen at random and that
the answer repeats. A board that has been reset has none, and answers everything else with
NO_SESSION: what registers held is gone, and the host must know.

*Losses*: whoever waits in vain sends the request again, with its sequence number. Reads have
no side effects, and a write of memory has the same effect twice. A write of registers has not: one
whose sequence number and address are those of the request carried out just before it is not carried
out again; its answer is that of the first time. (Not of the last write, however long ago: numbers
come again after 256 requests.) Registers are those of every space but memory and the manifest.

*Ahead*: a board holds `window` requests, so that the host need not wait for each answer. The host
writes registers only when nothing else is unanswered, and waits for the answer.

*Limits*: a request has at most `MOST_DATA` bytes and stays within one page of 4 KiB. Those of
registers are whole, aligned words. A frame that is no such request is answered with BAD_REQUEST,
and dropped if it has not even the header of one. An address that a space does not have is answered
with DECERR. The first word, or burst, that fails ends a request; what was written before it stays.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from nearstep_spec.csr.model import WORD_BYTES

VERSION = 1
"""Of this protocol; the answer to SYNC tells that of the board."""

MOST_DATA = 1024
"""Bytes of data in a request or an answer."""

PAGE_BYTES = 4096
"""No request crosses a multiple of this."""

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


class MessageError(ValueError):
    """Bytes of a whole frame that are no request, or no answer."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the host asks.

    Attributes
    ----------
    op, space, sequence
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
    def decode(cls, body: bytes) -> Self:
        """The request in the body of a frame.

        Raises
        ------
        MessageError : it is none; its sequence number may be known all the same.
        """
        if len(body) < REQUEST_BYTES:
            raise MessageError(f"a request has at least {REQUEST_BYTES} bytes, not {len(body)}")
        kind, sequence, length, address = _REQUEST.unpack_from(body)
        data = body[REQUEST_BYTES:]
        try:
            op, space = Op(kind & 15), Space(kind >> 4)
        except ValueError as error:
            raise MessageError(str(error)) from None
        found = cls(
            op=op,
            space=space,
            sequence=sequence,
            address=int.from_bytes(address, "little"),
            length=length,
            data=data,
        )
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
    status
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
        kind = self.op | self.space << 4
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
        kind, sequence, status, _, length = _ANSWER.unpack_from(body)
        data = body[ANSWER_BYTES:]
        if len(data) != length:
            raise MessageError(f"data must be {length} bytes, not {len(data)}")
        try:
            op, space, ended = Op(kind & 15), Space(kind >> 4), Status(status)
        except ValueError as error:
            raise MessageError(str(error)) from None
        return cls(op=op, space=space, sequence=sequence, status=ended, data=data)

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
