"""A board in software: it does as the protocol says, and writes registers exactly once."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep_sim.serial.endpoint import MOST_STEPS
from nearstep_spec.boards.registers import board_map
from nearstep_spec.serial.protocol import (
    ANSWER_BIT,
    MOST_DATA,
    PAGE_BYTES,
    Answer,
    Hello,
    Op,
    Request,
    Space,
    Status,
)

from .recorder import BAD, MANIFEST, MEMORY_BYTES, NUMBER, REGISTERS, Board, WrongError, read, write


@pytest.fixture
def board() -> Board:
    made = Board()
    made.begin()
    return made


def test_without_a_session_everything_else_is_refused() -> None:
    board = Board()
    for request in (read(Space.MEMORY, 0), write(Space.REGISTERS, 0, b"abcd")):
        assert board.ask(request).status is Status.NO_SESSION
    for none in (BAD, Request(op=Op.SYNC, length=1).encode()):
        assert Answer.decode(board.say(none)[0]).status is Status.NO_SESSION
    assert board.say(b"\xff" * 12) == []
    assert board.device.written == []
    assert board.begin() == Hello(number=NUMBER, window=5, manifest_bytes=len(MANIFEST.encode()))
    assert board.ask(read(Space.MEMORY, 0)).status is Status.OK
    board.endpoint.reset()
    assert board.device.resets == 1
    assert board.ask(read(Space.MEMORY, 0)).status is Status.NO_SESSION


def test_memory_is_read_as_it_was_written(board: Board) -> None:
    rng = np.random.default_rng(2)
    whole = board.device.memory.copy()
    for number in range(200):
        length = int(rng.integers(1, MOST_DATA + 1))
        page = int(rng.integers(MEMORY_BYTES // PAGE_BYTES)) * PAGE_BYTES
        address = page + int(rng.integers(PAGE_BYTES - length + 1))
        data = rng.integers(0, 256, length).astype(np.uint8)
        whole[address : address + length] = data
        answer = board.ask(write(Space.MEMORY, address, data.tobytes(), number % 256))
        assert (answer.status, answer.data) == (Status.OK, b"")
        assert board.ask(read(Space.MEMORY, address, length)).data == data.tobytes()
    np.testing.assert_array_equal(board.device.memory, whole)


@pytest.mark.parametrize(
    ("request_", "status", "address"),
    [
        (read(Space.REGISTERS, 4 * REGISTERS - 8, 16), Status.SLVERR, 4 * REGISTERS),
        (write(Space.REGISTERS, 4 * REGISTERS, bytes(4)), Status.SLVERR, 4 * REGISTERS),
        (read(Space.MEMORY, MEMORY_BYTES - 4, 4), Status.OK, None),
        (read(Space.MEMORY, MEMORY_BYTES, 4), Status.DECERR, MEMORY_BYTES),
        (write(Space.MEMORY, MEMORY_BYTES, bytes(4)), Status.DECERR, MEMORY_BYTES),
        (read(Space.BOARD, 0x4), Status.OK, None),
        (read(Space.BOARD, 0x20), Status.SLVERR, 0x20),
        (read(Space.BOARD, 1 << 12), Status.DECERR, 1 << 12),
        (write(Space.BOARD, 1 << 47, bytes(4)), Status.DECERR, 1 << 47),
        (read(Space.MEMORY, 1 << 47, 4), Status.DECERR, 1 << 47),
        (read(Space.MANIFEST, 1 << 47, 1), Status.DECERR, 1 << 47),
        (write(Space.BOARD, 0, bytes(4)), Status.SLVERR, 0),
        (read(Space.CONTROLLER, 8), Status.DECERR, 8),
        (read(Space.MANIFEST, len(MANIFEST.encode()) - 1, 1), Status.OK, None),
        (read(Space.MANIFEST, len(MANIFEST.encode()) - 1, 2), Status.DECERR, None),
    ],
    ids=str,
)
def test_how_a_request_ends(
    board: Board, request_: Request, status: Status, address: int | None
) -> None:
    answer = board.ask(request_)
    assert answer.status is status
    if status is not Status.OK:
        assert answer.failed_at == (request_.address if address is None else address)


def test_words_before_the_one_that_fails_are_carried_out(board: Board) -> None:
    words = np.arange(4, dtype=np.uint32)
    answer = board.ask(write(Space.REGISTERS, 4 * REGISTERS - 8, words.tobytes()))
    assert (answer.status, answer.failed_at) == (Status.SLVERR, 4 * REGISTERS)
    assert board.device.written == [(4 * REGISTERS - 8, 0), (4 * REGISTERS - 4, 1)]


def test_the_manifest_is_there_in_parts(board: Board) -> None:
    text = MANIFEST.encode()
    parts = [board.ask(read(Space.MANIFEST, at, 1)).data for at in range(len(text))]
    assert b"".join(parts) == text


@pytest.mark.parametrize(
    "body",
    [
        read(Space.MEMORY, 0, 0).encode(),
        read(Space.MEMORY, 0, MOST_DATA + 1).encode(),
        read(Space.MEMORY, PAGE_BYTES - 1, 2).encode(),
        read(Space.REGISTERS, 2).encode(),
        read(Space.REGISTERS, 0, 6).encode(),
        write(Space.MANIFEST, 0, b"a").encode(),
        write(Space.MEMORY, 0, b"ab").encode()[:-1],
        read(Space.MEMORY, 0).encode() + b"a",
        Request(op=Op.SYNC, length=1).encode(),
    ],
)
def test_what_is_no_request_is_told_so_with_its_number(board: Board, body: bytes) -> None:
    body = bytes([body[0], 0xA5]) + body[2:]
    head = bytes([body[0] | ANSWER_BIT, 0xA5])
    assert board.say(body) == [head + bytes([Status.BAD_REQUEST, 0, 0, 0])]
    assert board.device.written == []


@pytest.mark.parametrize("kind", [0x03, 0x0F, 0x51, 0x72, 0x82, 0x92, 0xFF])
def test_what_nobody_knows_is_dropped_and_leaves_the_record(board: Board, kind: int) -> None:
    """Ops, spaces, and the bit of answers."""
    request = write(Space.REGISTERS, 8, b"abcd", 7)
    first = board.ask(request)
    assert board.say(bytes([kind]) + request.encode()[1:]) == []
    assert board.ask(request) == first
    assert len(board.device.written) == 1


def test_a_reset_of_the_device_does_not_end_the_session(board: Board) -> None:
    reset = write(Space.BOARD, board_map()["control"].offset, (1).to_bytes(4, "little"), 3)
    assert board.ask(reset) == board.ask(reset)
    assert board.device.resets == 1
    assert board.ask(read(Space.MEMORY, 0)).status is Status.OK


def test_sync_with_the_number_of_the_session_changes_nothing(board: Board) -> None:
    request = write(Space.REGISTERS, 8, b"abcd", 7)
    first = board.ask(request)
    board.begin()
    assert board.ask(request) == first
    assert len(board.device.written) == 1
    board.ask(Request(op=Op.SYNC, address=NUMBER ^ 1 << 47))
    board.begin()
    board.ask(request)
    assert len(board.device.written) == 2


def test_a_failed_write_is_recorded_and_a_bad_request_leaves_the_record(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = write(Space.REGISTERS, 4 * REGISTERS, b"abcd", 7)
    first = board.ask(request)
    assert (first.status, first.failed_at) == (Status.SLVERR, 4 * REGISTERS)
    assert Answer.decode(board.say(BAD)[0]).status is Status.BAD_REQUEST

    def fail(address: int, value: int) -> None:
        raise WrongError(f"{value:#x} was written to {address:#x}")

    monkeypatch.setattr(board.device, "write_register", fail)
    assert board.ask(request) == first
    with pytest.raises(WrongError, match="was written to 0x100"):
        board.ask(write(Space.REGISTERS, 4 * REGISTERS, b"abcd", 8))


def test_what_is_too_short_is_dropped(board: Board) -> None:
    assert board.say(b"short", read(Space.MEMORY, 0).encode()[:9]) == []
    board.ask(write(Space.BOARD, board_map()["control"].offset, (2).to_bytes(4, "little")))
    dropped = board.ask(read(Space.BOARD, board_map()["dropped"].offset))
    assert int.from_bytes(dropped.data, "little") == 2


def test_a_write_of_registers_that_comes_twice_is_carried_out_once(board: Board) -> None:
    request = write(Space.REGISTERS, 8, b"abcd", 7)
    assert [board.ask(request) for _ in range(3)] == [board.ask(request)] * 3
    assert len(board.device.written) == 1
    failed = write(Space.REGISTERS, 4 * REGISTERS, b"abcd", 8)
    assert board.ask(failed) == board.ask(failed)
    for other in (write(Space.REGISTERS, 8, b"efgh", 9), write(Space.REGISTERS, 12, b"efgh", 9)):
        board.ask(other)
    assert len(board.device.written) == 3


@pytest.mark.parametrize(
    "between",
    [read(Space.MEMORY, 0), write(Space.MEMORY, 8, b"a", 7), Request(op=Op.SYNC, address=1)],
    ids=str,
)
def test_after_anything_else_the_same_write_is_another(board: Board, between: Request) -> None:
    """Numbers come again after 256 requests."""
    request = write(Space.REGISTERS, 8, b"abcd", 7)
    board.ask(request)
    board.ask(between)
    board.ask(request)
    assert len(board.device.written) == 2


def test_a_write_of_memory_that_comes_twice_has_the_same_effect(board: Board) -> None:
    request = write(Space.MEMORY, 8, b"abcd", 7)
    assert board.ask(request) == board.ask(request)


def test_time_passes_while_the_host_polls_and_only_then(board: Board) -> None:
    for _ in range(40):
        board.ask(read(Space.REGISTERS, 8))
        board.ask(read(Space.REGISTERS, 12))
    assert board.device.passed == 0
    for _ in range(40):
        board.ask(read(Space.REGISTERS, 8))
    assert board.device.passed > 10 * MOST_STEPS
    passed = board.device.passed
    latch = write(Space.BOARD, board_map()["control"].offset, (2).to_bytes(4, "little"))
    board.ask(latch)
    cycles = board.ask(read(Space.BOARD, board_map()["cycles"].offset, 8))
    assert int.from_bytes(cycles.data, "little") == board.device.passed > passed
