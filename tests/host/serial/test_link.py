"""The link against a scripted board: what is ahead, what is sent again and when, and the bound.

Time is the line's own and passes only in waits, so nothing here depends on this machine.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest

from nearstep.serial.errors import (
    AnswerError,
    DamagedFramesError,
    LinkError,
    LinkFailedError,
    NoAnswerError,
    SessionLostError,
)
from nearstep.serial.link import SEQUENCES, Link
from nearstep_spec.serial.framing import to_frame
from nearstep_spec.serial.protocol import MOST_AHEAD, Request

from .scripted import BYTES, LineError, ScriptedBoard, collect, damaged, greeting, lose, ok, opened


@pytest.mark.parametrize(("held", "asked", "expected"), [(4, None, 4), (7, 3, 3), (0, None, 1)])
def test_as_many_requests_are_ahead_as_the_board_holds(
    held: int, asked: int | None, expected: int
) -> None:
    board = ScriptedBoard(window=max(held, 1), sync=lambda _, request: [greeting(request, held)])
    link = Link(board, window=asked)
    link.open()
    assert collect(link, 50) == 50
    assert board.most_ahead == link.window == expected
    assert len(board.requests) == 50
    assert link.traffic.frames_resent == 0
    assert board.now == 0.0


def test_a_board_is_never_more_than_so_many_numbers_ahead() -> None:
    board = ScriptedBoard(window=200)
    link = opened(board)
    assert collect(link, 600) == 600
    assert board.most_ahead == MOST_AHEAD == 64


@pytest.mark.parametrize("window", [1, 7, 64, 200])
def test_numbers_that_have_no_answer_span_no_more_than_the_window(window: int) -> None:
    """With the oldest lost again and again; from the newest number back to the oldest's."""
    numbers = ScriptedBoard(lose(*range(0, 3000, 3)), window=window)
    spans: list[int] = []

    def script(number: int, request: Request) -> Sequence[bytes]:
        oldest = min((sent - request.sequence) % SEQUENCES for sent in numbers.unanswered)
        spans.append(oldest)
        spans.extend((request.sequence - sent) % SEQUENCES for sent in numbers.unanswered)
        return [] if number % 3 == 0 else [ok(request)]

    numbers._script = script
    assert collect(opened(numbers), 600) == 600
    assert len(spans) > 600
    near = [span for span in spans if span < SEQUENCES // 2]
    assert max(near) == min(window, MOST_AHEAD) - 1


def test_more_than_the_window_is_seen_by_the_line() -> None:
    board = ScriptedBoard(window=2, sync=lambda _, request: [greeting(request, 3)])
    with pytest.raises(LineError, match="3 requests at a time"):
        collect(opened(board), 50)


@pytest.mark.parametrize("lost", [(0,), (3,), (2, 3), (1, 4, 9), (10, 11, 15)])
def test_a_later_answer_shows_a_loss_at_once(lost: tuple[int, ...]) -> None:
    board = ScriptedBoard(lose(*lost))
    link = opened(board)
    assert collect(link, 40) == 40
    assert link.traffic.frames_resent == len(lost)
    assert len(board.requests) == 40 + len(lost)
    assert board.now == 0.0


def test_a_lost_answer_is_the_same_as_a_lost_request() -> None:
    board = ScriptedBoard(
        lambda number, request: [damaged(ok(request)) if number == 5 else ok(request)]
    )
    link = opened(board)
    assert collect(link, 40) == 40
    assert (link.traffic.frames_resent, link.traffic.frames_dropped) == (1, 1)
    assert board.now == 0.0


def test_the_last_request_is_sent_again_after_waits_that_grow() -> None:
    board = ScriptedBoard(lambda number, request: [ok(request)] if number >= 6 else [])
    link = opened(board, wait=0.5)
    assert collect(link, 1) == 1
    assert board.times == [0.0, 0.5, 1.5, 3.5, 7.5, 11.5, 15.5]
    assert [request.sequence for request in board.requests] == [1] * 7


def test_a_whole_window_that_is_lost_is_found_by_one_wait() -> None:
    board = ScriptedBoard(lose(0, 1, 2, 3))
    link = opened(board, wait=0.5)
    assert collect(link, 10) == 10
    assert board.now == 0.5
    assert link.traffic.frames_resent == 4


def test_an_answer_begins_the_waits_anew_if_it_is_to_something_sent_once() -> None:
    """Every second one is lost three times: were they counted together, waits would be longer."""
    seen: dict[int, int] = {}

    def script(_: int, request: Request) -> Sequence[bytes]:
        seen[request.address] = seen.get(request.address, 0) + 1
        lost = request.address // BYTES % 2 == 0 and seen[request.address] <= 3
        return [] if lost else [ok(request)]

    board = ScriptedBoard(script, window=1)
    link = opened(board, wait=1.0)
    assert collect(link, 6) == 6
    assert board.now == 3 * (1 + 2 + 4)


class TimedBoard(ScriptedBoard):
    """Carries out one request after the other, and every copy, each in the seconds that a function
    gives for the bytes of request and answer; nobody says so."""

    def __init__(self, seconds: Callable[[float], float], window: int) -> None:
        super().__init__(window=window)
        self._seconds = seconds
        self._free = 0.0
        self._ready: deque[tuple[float, bytes]] = deque()

    def write(self, data: bytes) -> None:
        super().write(data)
        share = len(data) / max(1, len(self._coming))
        for frame in self._coming:
            self._free = max(self._free, self.now) + self._seconds(share + len(frame))
            self._ready.append((self._free, frame))
        self._coming.clear()

    def read(self, seconds: float) -> bytes:
        if self._ready and self._ready[0][0] <= self.now + seconds:
            at, frame = self._ready.popleft()
            self.now = max(self.now, at)
            self._coming.append(frame)
            return super().read(0)
        self.now += seconds
        return b""


@pytest.mark.parametrize("window", [1, 7])
@pytest.mark.parametrize("times", [2.5, 20])
def test_copies_of_requests_do_not_beget_copies(times: float, window: int) -> None:
    """A board that takes longer than the first wait gets few of them, and then none."""
    board = TimedBoard(lambda _: 0.1 * times, window)
    link = opened(board, wait=0.1, tries=10)
    assert collect(link, 200) == 200
    copies = Counter(request.sequence for request in board.requests)
    print(f"{len(board.requests) - 200} copies, at most {max(copies.values())} of a request")
    assert len(copies) == 200
    assert max(copies.values()) <= 3
    early = link.traffic.frames_resent
    assert 0 < early < 20
    assert collect(link, 200) == 200
    assert link.traffic.frames_resent == early


@pytest.mark.parametrize("byte_seconds", [1e-5, 1e-3, 1e-2, 0.1])
def test_a_slow_board_is_given_the_time_that_it_takes(byte_seconds: float) -> None:
    """As on a simulated board, up to 4 s an answer, 40 times the first wait; what is sent twice in
    the beginning is late, and after that nothing is."""
    board = TimedBoard(lambda nbytes: nbytes * byte_seconds, window=7)
    link = opened(board)
    assert collect(link, 300) == 300
    early = link.traffic.frames_resent
    assert early < 60
    assert collect(link, 300) == 300
    assert link.traffic.frames_resent == early


def test_what_the_line_takes_is_added_to_the_wait() -> None:
    board = ScriptedBoard(lose(0), baud=1000)
    link = opened(board, wait=0.5)
    collect(link, 1)
    on_the_line = BYTES + (10 + 6) + (6 + 6)  # a request and its answer, each in a frame
    assert board.times[1] == pytest.approx(0.5 + on_the_line * 10 / 1000)


def test_the_bound_is_a_typed_error_with_time_and_tries() -> None:
    board = ScriptedBoard(lambda number, request: [])
    link = opened(board, wait=0.5, tries=4)
    with pytest.raises(
        NoAnswerError, match=r"no answer to read memory 0x0\.\.0x10 in 7.5 s, sent 4"
    ) as caught:
        collect(link, 1)
    assert (caught.value.seconds, caught.value.tries, caught.value.port) == (7.5, 4, "scripted")
    assert type(caught.value) is NoAnswerError
    assert caught.value.transactions[-1] == "read memory 0x0..0x10 -> nothing"
    assert board.closed


def test_nobody_at_all() -> None:
    board = ScriptedBoard(sync=lambda _, request: [])
    with pytest.raises(NoAnswerError, match=r"no answer to SYNC in 6.3 s, sent 10 times: nothing"):
        Link(board).open()
    assert len(board.frames) == 10


@pytest.mark.parametrize("noise", [b"AT OK\r\n", damaged(to_frame(bytes(20))), b"~~~~abc~"])
def test_somebody_else_at_the_port(noise: bytes) -> None:
    board = ScriptedBoard(sync=lambda _, request: [noise])
    with pytest.raises(DamagedFramesError, match="received bytes were its answer") as caught:
        Link(board, tries=3).open()
    assert caught.value.nbytes == 3 * len(noise)


def test_damage_to_the_bound() -> None:
    board = ScriptedBoard(lambda _, request: [damaged(ok(request))])
    with pytest.raises(DamagedFramesError) as caught:
        collect(opened(board, tries=5), 1)
    assert (caught.value.frames, caught.value.tries) == (5, 5)


def test_what_crossed_the_line_is_counted() -> None:
    board = ScriptedBoard(lose(2))
    link = opened(board)
    assert collect(link, 10) == 10
    traffic = link.traffic
    assert traffic.frames_sent == len(board.frames) == 12  # SYNC, and one twice
    assert traffic.bytes_sent == sum(len(to_frame(r.encode())) for _, r in board.frames)
    assert traffic.frames_received == 11
    assert traffic.bytes_received > 10 * BYTES


def test_errors_of_the_link_are_of_one_kind() -> None:
    assert all(
        issubclass(each, LinkError)
        for each in (NoAnswerError, SessionLostError, AnswerError, LinkFailedError)
    )
