"""A board in software: it does as the protocol says, and writes registers exactly once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Poll
from nearstep.errors import BusError, NearstepError, OutOfBoundsError
from nearstep.serial.link import Link
from nearstep_sim.serial.endpoint import MOST_STEPS, Endpoint
from nearstep_sim.serial.line import Loopback, Noise, NoisyLine, ResettingEndpoint
from nearstep_spec.boards.registers import board_map
from nearstep_spec.serial.framing import Deframer, to_frame
from nearstep_spec.serial.manifest import Manifest
from nearstep_spec.serial.protocol import (
    ANSWER_BIT,
    MOST_ANSWER,
    MOST_DATA,
    PAGE_BYTES,
    Answer,
    Hello,
    Op,
    Request,
    Space,
    Status,
)

MEMORY_BYTES = 1 << 14
REGISTERS = 64
NUMBER = 0x1234_5678_9ABC
BAD = b"\x11\x05" + bytes(10)
"""A read of memory of no bytes, with data."""
MANIFEST = Manifest(
    board="test",
    family="none",
    config={},
    map_hashes={},
    memory_bytes=MEMORY_BYTES,
    regions=((0, MEMORY_BYTES),),
)


class Recorder(Backend):
    """A device of memory and registers that keeps what it was told, in order."""

    family = "none"
    config = None
    capacity_bytes = MEMORY_BYTES

    def __init__(self) -> None:
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        self.registers = [0] * REGISTERS
        self.written: list[tuple[int, int]] = []
        self.resets = 0
        self.passed = 0

    @property
    def cycles(self) -> int | None:
        return None

    def read_register(self, address: int) -> int:
        if address >= 4 * REGISTERS:
            raise BusError(address, 2, write=False)
        return self.registers[address // 4]

    def write_register(self, address: int, value: int) -> None:
        if address >= 4 * REGISTERS:
            raise BusError(address, 2, write=True)
        self.written.append((address, value))
        self.registers[address // 4] = value

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        self._check(address, out.size)
        out[:] = self.memory[address : address + out.size]

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self._check(address, data.size)
        self.memory[address : address + data.size] = data

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        self.passed += max_cycles

    def reset(self) -> None:
        self.resets += 1

    def close(self) -> None:
        pass

    @staticmethod
    def _check(address: int, nbytes: int) -> None:
        if address + nbytes > MEMORY_BYTES:
            raise OutOfBoundsError("memory", address, address + nbytes, MEMORY_BYTES)


class Board:
    """An endpoint, and what a test says to it."""

    def __init__(self) -> None:
        self.device = Recorder()
        self.endpoint = Endpoint(self.device, "test", manifest=MANIFEST, window=5)
        self._deframer = Deframer(MOST_ANSWER)

    def say(self, *bodies: bytes) -> list[bytes]:
        """Bodies of what it answers."""
        return list(
            self._deframer.feed(self.endpoint.receive(b"".join(to_frame(each) for each in bodies)))
        )

    def ask(self, request: Request) -> Answer:
        (body,) = self.say(request.encode())
        found = Answer.decode(body)
        assert (found.op, found.space) == (request.op, request.space)
        assert found.sequence == request.sequence
        return found

    def begin(self) -> Hello:
        return Hello.decode(self.ask(Request(op=Op.SYNC, address=NUMBER)).data)


@pytest.fixture
def board() -> Board:
    made = Board()
    made.begin()
    return made


def write(space: Space, address: int, data: bytes, sequence: int = 0) -> Request:
    return Request(
        op=Op.WRITE,
        space=space,
        sequence=sequence,
        address=address,
        length=len(data),
        data=data,
    )


def read(space: Space, address: int, length: int = 4, sequence: int = 0) -> Request:
    return Request(op=Op.READ, space=space, sequence=sequence, address=address, length=length)


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


class WrongError(NearstepError):
    """A checker found that registers were written otherwise than they were told to be."""


def exercise(line: Loopback, device: Recorder, count: int, seed: int) -> int:
    """Random requests; what the device was told must be what was asked, once and in order."""
    rng = np.random.default_rng(seed)
    link = Link(line, tries=200)
    link.open()
    told, memory, compared = [], np.zeros(MEMORY_BYTES, np.uint8), 0
    for _ in range(count):
        kind = int(rng.integers(4))
        if kind == 0:
            address, value = 4 * int(rng.integers(4)), int(rng.integers(1 << 32))
            told.append((address, value))
            link.ask(write(Space.REGISTERS, address, value.to_bytes(4, "little")))
        elif kind == 1:
            link.ask(read(Space.REGISTERS, 4 * int(rng.integers(4))))
        else:
            page = PAGE_BYTES * int(rng.integers(MEMORY_BYTES // PAGE_BYTES))
            requests = []
            for at in range(page, page + PAGE_BYTES, PAGE_BYTES // 16):
                data = rng.integers(0, 256, 50).astype(np.uint8)
                if kind == 2:
                    requests.append(write(Space.MEMORY, at, data.tobytes()))
                    memory[at : at + 50] = data
                else:
                    requests.append(read(Space.MEMORY, at, 50))
            found: dict[int, Answer] = {}
            link.ask_all(requests, found.__setitem__)
            for index, request in enumerate(requests):
                if request.op is Op.READ:
                    expected = memory[request.address : request.address + 50].tobytes()
                    if found[index].data != expected:
                        raise WrongError(f"memory at {request.address:#x}")
                    compared += 50
    if device.written != told:
        raise WrongError(f"{len(device.written)} writes of registers, {len(told)} were asked for")
    np.testing.assert_array_equal(device.memory, memory)
    print(f"{len(told)} writes in order, {compared} bytes read, {link.traffic}")
    assert link.traffic.frames_resent > count // 20
    return len(told)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "noise",
    [
        Noise(loss=1e-3),
        Noise(corruption=1e-3),
        Noise(repetition=1e-3),
        Noise(loss=1e-3, corruption=1e-3, repetition=1e-3),
    ],
    ids=str,
)
def test_over_a_bad_line_everything_is_carried_out_once_and_in_order(
    noise: Noise, seed: int
) -> None:
    board = Board()
    line = Loopback(board.endpoint, noise=noise, seed=seed)
    assert exercise(line, board.device, 200, seed) > 30


class Stuttering:
    """An endpoint to which some frames come twice, at once."""

    def __init__(self, endpoint: Endpoint, seed: int) -> None:
        self._endpoint = endpoint
        self._random = np.random.default_rng(seed)

    def receive(self, data: bytes) -> bytes:
        answer = b""
        for frame in data.split(b"~~"):
            whole = b"~" + frame.strip(b"~") + b"~"
            for _ in range(1 + int(self._random.random() < 0.3)):
                answer += self._endpoint.receive(whole)
        return answer


def stuttering(board: Board, noise: Noise, seed: int) -> Loopback:
    line = Loopback(board.endpoint, noise=noise, seed=seed)
    line._server = Stuttering(board.endpoint, seed)  # type: ignore[assignment]
    return line


def test_frames_that_come_twice_are_carried_out_once() -> None:
    board = Board()
    line = stuttering(board, Noise(corruption=1e-3), 4)
    assert exercise(line, board.device, 200, 4) > 30


class Echo:
    """An endpoint on a line that gives both ends what they have sent, too."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.echoed = 0

    def receive(self, data: bytes) -> bytes:
        answer = self._endpoint.receive(data)
        if self._endpoint.receive(answer):
            raise WrongError("an answer was answered")
        self.echoed += len(data) + len(answer)
        return data + answer


def echoing(board: Board, noise: Noise) -> tuple[Loopback, Echo]:
    line = Loopback(board.endpoint, noise=noise, seed=4)
    echo = Echo(board.endpoint)
    line._server = echo  # type: ignore[assignment]
    return line, echo


def test_a_line_may_echo() -> None:
    board = Board()
    line, echo = echoing(board, Noise(corruption=1e-3))
    assert exercise(line, board.device, 200, 4) > 30
    assert echo.echoed > 1 << 16


LIKE_AN_ANSWER = write(Space.MEMORY, 6, b"ab")
"""Without bit 7 its echo is a good SLVERR, of address 0x6261_0000_0000."""


def answer_to_it(link: Link) -> Status:
    link.open()
    return link.ask(LIKE_AN_ANSWER).status


@pytest.mark.parametrize("end", ["host", "board"])
def test_an_end_that_does_not_look_at_bit_7_is_found(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    kind = Answer if end == "host" else Request
    name = "decode" if end == "host" else "parse"
    look = getattr(kind, name)
    wanted = ANSWER_BIT if end == "host" else 0

    def blind(body: bytes) -> Answer | Request:
        return look(bytes([body[0] & ~ANSWER_BIT | wanted]) + body[1:])

    assert answer_to_it(Link(echoing(Board(), Noise())[0])) is Status.OK
    monkeypatch.setattr(kind, name, blind)
    line, _ = echoing(Board(), Noise())
    if end == "host":
        assert answer_to_it(Link(line)) is Status.SLVERR
    else:
        with pytest.raises(WrongError, match="an answer was answered"):
            exercise(line, Board().device, 20, 4)


def test_a_board_that_carries_out_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    carry_out = board.endpoint._carry_out

    def forgetful(request: Request) -> Answer:
        board.endpoint._last = None
        return carry_out(request)

    def answers(body: bytes) -> list[bytes]:
        board.endpoint._last = None
        return list(Endpoint._answers(board.endpoint, body))

    monkeypatch.setattr(board.endpoint, "_answers", answers)
    monkeypatch.setattr(board.endpoint, "_carry_out", forgetful)
    with pytest.raises(WrongError, match="writes of registers"):
        exercise(stuttering(board, Noise(corruption=1e-3), 4), board.device, 200, 4)


@pytest.mark.parametrize("kind", ["loss", "corruption", "repetition"])
def test_noise_is_as_frequent_as_it_says(kind: str) -> None:
    line = NoisyLine(Noise(**{kind: 0.01}), 6)
    data = bytes(range(256)) * 400
    arrived = line.carry(data)
    hits = {"loss": line.lost, "corruption": line.corrupted, "repetition": line.repeated}
    count = hits.pop(kind)
    assert set(hits.values()) == {0}
    assert 0.8 * 0.01 * len(data) < count < 1.2 * 0.01 * len(data)
    assert len(arrived) == len(data) - line.lost + line.repeated
    if kind == "corruption":
        wrong = np.frombuffer(arrived, np.uint8) ^ np.frombuffer(data, np.uint8)
        assert np.count_nonzero(wrong) == count
        assert set(np.unique(wrong)) == {0, *(1 << bit for bit in range(8))}


@pytest.mark.parametrize("kind", ["loss", "corruption", "repetition"])
@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_probability_is_one(kind: str, share: float) -> None:
    with pytest.raises(ValueError, match=f"{kind} must be from 0 to below 1"):
        Noise(**{kind: share})


def test_resets_come_after_so_many_bytes_whatever_the_pieces() -> None:
    with pytest.raises(ValueError, match="reset_after must be at least 1"):
        ResettingEndpoint(Board().endpoint, 0)
    for piece in (1, 7, 100, 1000):
        board = Board()
        line = ResettingEndpoint(board.endpoint, 100)
        for _ in range(1000 // piece):
            line.receive(bytes(piece))
        assert line.resets == board.device.resets == 1000 // piece * piece // 100
