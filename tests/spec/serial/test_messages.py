"""Requests, answers and manifests: each is read as it was written, or refused."""

from __future__ import annotations

import dataclasses

import pytest

from nearstep_spec.serial.manifest import Manifest, ManifestError
from nearstep_spec.serial.protocol import (
    MOST_DATA,
    PAGE_BYTES,
    VERSION,
    Answer,
    Hello,
    MessageError,
    Op,
    Request,
    Space,
    Status,
)

REQUESTS = [
    Request(op=Op.SYNC, address=(1 << 48) - 1),
    Request(op=Op.READ, space=Space.MEMORY, sequence=255, address=3, length=1),
    Request(op=Op.READ, space=Space.MEMORY, address=PAGE_BYTES - MOST_DATA, length=MOST_DATA),
    Request(op=Op.READ, space=Space.REGISTERS, address=1 << 40, length=8),
    Request(op=Op.WRITE, space=Space.BOARD, sequence=7, address=64, length=4, data=b"abcd"),
    Request(op=Op.WRITE, space=Space.MEMORY, address=1, length=5, data=b"~}abc"),
    Request(op=Op.READ, space=Space.MANIFEST, address=1, length=3),
]
MANIFEST = Manifest(
    board="ulx3s_85f",
    family="smartssd",
    config={"lanes": 2},
    map_hashes={"updater0": 1},
    memory_bytes=4096,
    regions=((0, 4096),),
    clock_hz=100,
)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_a_request_is_read_as_it_was_written(request_: Request) -> None:
    assert Request.decode(request_.encode()) == request_


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"op": Op.READ, "data": b"a", "length": 1}, "data must be 0 bytes"),
        ({"op": Op.WRITE, "data": b"a", "length": 2}, "data must be 2 bytes"),
        ({"op": Op.READ, "length": 0}, "length must be 1 to"),
        ({"op": Op.READ, "length": MOST_DATA + 1}, "length must be 1 to"),
        ({"op": Op.READ, "address": PAGE_BYTES - 1, "length": 2}, "one page"),
        ({"op": Op.READ, "space": Space.BOARD, "address": 2, "length": 4}, "whole words"),
        ({"op": Op.READ, "space": Space.REGISTERS, "length": 2}, "whole words"),
        ({"op": Op.WRITE, "space": Space.MANIFEST, "length": 1, "data": b"a"}, "read-only"),
        ({"op": Op.SYNC, "length": 1}, "SYNC has neither"),
    ],
)
def test_what_is_no_request_is_refused(change: dict[str, object], reason: str) -> None:
    made = dataclasses.replace(Request(op=Op.READ, space=Space.MEMORY), **change)
    if made.op is Op.SYNC:
        made = dataclasses.replace(made, space=Space.REGISTERS)
    with pytest.raises(MessageError, match=reason):
        Request.decode(made.encode())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "at least 10 bytes, not 0"),
        (bytes(9), "at least 10 bytes, not 9"),
        (b"\x0f" + bytes(9), "15 is not a valid Op"),
        (b"\x50" + bytes(9), "5 is not a valid Space"),
        (b"\x80" + bytes(9), "bit 7 of 0x80 is that of the other direction"),
    ],
)
def test_bytes_that_are_no_request(body: bytes, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        Request.parse(body)


def test_what_must_not_be_carried_out_is_a_request_all_the_same() -> None:
    body = bytes([Op.READ | Space.MEMORY << 4, 9]) + bytes(8)
    found = Request.parse(body)
    assert (found.op, found.space, found.sequence) == (Op.READ, Space.MEMORY, 9)
    with pytest.raises(MessageError, match="length must be"):
        Request.decode(body)


def test_an_answer_is_read_as_it_was_written() -> None:
    answer = Answer(op=Op.READ, space=Space.MEMORY, sequence=3, data=b"abc")
    assert Answer.decode(answer.encode()) == answer
    failed = Answer(op=Op.WRITE, status=Status.BUS_TIMEOUT, data=Answer.failure(0x1234_5678_9ABC))
    assert Answer.decode(failed.encode()).failed_at == 0x1234_5678_9ABC


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "at least 6 bytes, not 0"),
        (bytes(5), "at least 6 bytes, not 5"),
        (b"\x81" + bytes(6), "data must be 0 bytes, not 1"),
        (b"\x8f" + bytes(5), "15 is not a valid Op"),
        (b"\xd1" + bytes(5), "5 is not a valid Space"),
        (b"\x81\x00\x07" + bytes(3), "7 is not a valid Status"),
        (b"\x81\x00\x00\x01" + bytes(2), "must be 0, not 1"),
        (b"\x01" + bytes(5), "bit 7 of 0x01 is that of the other direction"),
    ],
)
def test_bytes_that_are_no_answer(body: bytes, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        Answer.decode(body)


READ = Request(op=Op.READ, space=Space.MEMORY, sequence=3, length=4)
WRITE = Request(op=Op.WRITE, space=Space.MEMORY, sequence=3, length=4, data=b"abcd")
SYNC = Request(op=Op.SYNC, address=5)
HELLO = Hello(number=5, window=7, manifest_bytes=600).encode()


@pytest.mark.parametrize(
    ("request_", "change", "belongs"),
    [
        (READ, {"data": bytes(4)}, True),
        (READ, {"data": bytes(3)}, False),
        (READ, {"data": bytes(4), "sequence": 4}, False),
        (READ, {"data": bytes(4), "space": Space.BOARD}, False),
        (READ, {"data": bytes(4), "op": Op.WRITE}, False),
        (READ, {"status": Status.DECERR, "data": bytes(6)}, True),
        (READ, {"status": Status.DECERR, "data": bytes(4)}, False),
        (READ, {"status": Status.NO_SESSION}, True),
        (READ, {"status": Status.BAD_REQUEST, "data": bytes(6)}, False),
        (WRITE, {}, True),
        (WRITE, {"data": bytes(4)}, False),
        (WRITE, {"status": Status.BUS_TIMEOUT, "data": bytes(6)}, True),
        (SYNC, {"data": HELLO}, True),
        (SYNC, {"data": b"\x06" + HELLO[1:]}, False),
        (SYNC, {"data": HELLO, "status": Status.BAD_REQUEST}, False),
    ],
)
def test_what_belongs_to_a_request(
    request_: Request, change: dict[str, object], belongs: bool
) -> None:
    made = Answer(op=request_.op, space=request_.space, sequence=request_.sequence)
    answer = dataclasses.replace(made, **change)  # type: ignore[arg-type]
    assert answer.answers(request_) is belongs


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_no_message_is_one_of_the_other_direction(request_: Request) -> None:
    with pytest.raises(MessageError):
        Answer.decode(request_.encode())
    answer = Answer(op=request_.op, space=request_.space, data=bytes(10))
    with pytest.raises(MessageError, match="bit 7"):
        Request.parse(answer.encode())


def test_a_greeting_is_of_one_version() -> None:
    hello = Hello(number=5, window=7, manifest_bytes=600)
    assert Hello.decode(hello.encode()) == hello
    other = dataclasses.replace(hello, version=VERSION + 1).encode()
    with pytest.raises(MessageError, match=f"version {VERSION + 1}, the host {VERSION}"):
        Hello.decode(other)
    with pytest.raises(MessageError, match="has 10 bytes"):
        Hello.decode(b"abc")


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST
    assert b" " not in MANIFEST.encode()


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"{}", b'{"format":2}', b'{"format":1}', b"\xff", MANIFEST.encode()[:-1]],
)
def test_what_is_no_manifest(text: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.decode(text)
