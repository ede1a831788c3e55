"""Lines that lose, damage, repeat and echo: a board in software does everything once."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.serial.link import Link
from nearstep_sim.serial.endpoint import Endpoint
from nearstep_sim.serial.line import Loopback, Noise, NoisyLine, ResettingEndpoint
from nearstep_spec.serial.protocol import ANSWER_BIT, PAGE_BYTES, Answer, Op, Request, Space, Status

from .recorder import MEMORY_BYTES, Board, Recorder, WrongError, read, write


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
