"""The link against a scripted board: what is ahead, what is sent again and when, and the bound.

Time is the line's own and passes only in waits, so nothing here depends on this machine.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count

import pytest

from nearstep.serial.errors import (
    AnswerError,
    DamagedFramesError,
    InterruptedLinkError,
    LinkError,
    LinkFailedError,
    NoAnswerError,
    ProtocolVersionError,
    SessionLostError,
)
from nearstep.serial.link import SEQUENCES, Link
from nearstep_spec.serial.framing import Deframer, to_frame
from nearstep_spec.serial.protocol import (
    MOST_AHEAD,
    MOST_ANSWER,
    VERSION,
    Answer,
    Op,
    Request,
    Space,
    Status,
)

from .scripted import LineError, Script, ScriptedBoard, answer, damaged, greeting, ok

BYTES = 16


def reads(total: int) -> list[Request]:
    return [
        Request(op=Op.READ, space=Space.MEMORY, address=BYTES * at, length=BYTES)
        for at in range(total)
    ]


def opened(board: ScriptedBoard, **options: float) -> Link:
    link = Link(board, number=count(77).__next__, **options)  # type: ignore[arg-type]
    link.open()
    return link


def collect(link: Link, total: int) -> int:
    """Ask for `total` pieces; each must be what the board has there. The number compared."""
    found: dict[int, bytes] = {}

    def take(index: int, given: Answer) -> None:
        assert index not in found
        found[index] = given.data

    link.ask_all(reads(total), take)
    for index, data in found.items():
        assert data == bytes((BYTES * index + at) % 251 for at in range(BYTES))
    assert len(found) == total
    return len(found)


def lose(*frames: int) -> Script:
    """Requests with these numbers get no answer, all others a good one."""
    return lambda number, request: [] if number in frames else [ok(request)]


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


class BusyBoard(ScriptedBoard):
    """Carries out one request after the other, each in so many seconds, and every copy."""

    def __init__(self, seconds: float, window: int) -> None:
        super().__init__(window=window)
        self._seconds = seconds
        self._free = 0.0
        self._ready: deque[tuple[float, bytes]] = deque()

    def write(self, data: bytes) -> None:
        super().write(data)
        for frame in self._coming:
            self._free = max(self._free, self.now) + self._seconds
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
    board = BusyBoard(0.1 * times, window)
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


class SlowBoard(ScriptedBoard):
    """Each byte takes so many seconds, as on a simulated board, and nobody says so."""

    def __init__(self, byte_seconds: float, **options: int) -> None:
        super().__init__(**options)
        self._byte_seconds = byte_seconds
        self._free = 0.0
        self._ready: list[tuple[float, bytes]] = []

    def write(self, data: bytes) -> None:
        before = len(self._coming)
        super().write(data)
        share = len(data) / max(1, len(self._coming) - before)
        for frame in self._coming[before:]:
            nbytes = share + len(frame)
            self._free = max(self._free, self.now) + nbytes * self._byte_seconds
            self._ready.append((self._free, frame))
        self._coming.clear()

    def read(self, seconds: float) -> bytes:
        if self._ready and self._ready[0][0] <= self.now + seconds:
            at, frame = self._ready.pop(0)
            self.now = max(self.now, at)
            self._coming.append(frame)
            return super().read(0)
        self.now += seconds
        return b""


@pytest.mark.parametrize("byte_seconds", [1e-5, 1e-3, 1e-2, 0.1])
def test_a_slow_board_is_given_the_time_that_it_takes(byte_seconds: float) -> None:
    """Up to 4 s an answer, 40 times the first wait; what is sent twice in the beginning is late,
    and after that nothing is."""
    board = SlowBoard(byte_seconds, window=7)
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
    with pytest.raises(DamagedFramesError, match="bytes that came, none were its answer") as caught:
        Link(board, tries=3).open()
    assert caught.value.nbytes == 3 * len(noise)


def test_damage_to_the_bound() -> None:
    board = ScriptedBoard(lambda _, request: [damaged(ok(request))])
    with pytest.raises(DamagedFramesError) as caught:
        collect(opened(board, tries=5), 1)
    assert (caught.value.frames, caught.value.tries) == (5, 5)


def test_an_answer_that_comes_twice_counts_once() -> None:
    board = ScriptedBoard(lambda _, request: [ok(request), ok(request)])
    link = opened(board)
    assert collect(link, 600) == 600
    assert link.traffic.frames_stale >= 599  # that to the last one may not be looked at
    assert link.traffic.frames_resent == 0


def test_a_late_answer_is_not_taken_for_one_to_the_next_request() -> None:
    """The first answer comes with that to the request that was sent again."""
    held: list[bytes] = []

    def script(number: int, request: Request) -> Sequence[bytes]:
        if number == 0:
            held.append(ok(request))
            return []
        return [*(held.pop() for _ in tuple(held)), ok(request)]

    board = ScriptedBoard(script)
    link = opened(board)
    assert collect(link, 1) == collect(link, 1) == 1
    assert link.traffic.frames_stale == 1


def test_numbers_go_round() -> None:
    board = ScriptedBoard(lose(*range(0, 3000, 7)), window=64)
    link = opened(board)
    assert collect(link, 2000) == 2000
    assert {request.sequence for request in board.requests} == set(range(SEQUENCES))


def test_an_answer_of_another_kind_is_none() -> None:
    def script(_: int, request: Request) -> Sequence[bytes]:
        other = Request(op=Op.WRITE, space=Space.MEMORY, sequence=request.sequence)
        return [answer(other), to_frame(b"no answer"), ok(request)]

    link = opened(ScriptedBoard(script))
    assert collect(link, 20) == 20
    assert link.traffic.frames_stale >= 38


def test_a_board_that_was_reset_says_so() -> None:
    board = ScriptedBoard(
        lambda number, request: [ok(request) if number < 5 else answer(request, Status.NO_SESSION)]
    )
    link = opened(board)
    with pytest.raises(
        SessionLostError, match=r"was reset while it was in use.*open the device"
    ) as caught:
        collect(link, 20)
    assert caught.value.transactions[-1].endswith("-> NO_SESSION")
    with pytest.raises(LinkFailedError, match="it failed before: the board was reset") as again:
        collect(link, 1)
    assert again.value.__cause__ is caught.value
    assert board.closed


def test_a_request_that_the_board_refuses() -> None:
    link = opened(ScriptedBoard(lambda _, request: [answer(request, Status.BAD_REQUEST)]))
    with pytest.raises(AnswerError, match="must be data or an error of the bus, not BAD_REQUEST"):
        collect(link, 1)


def forged(frame: bytes, at: int, value: int) -> bytes:
    """The frame with another byte in its body, and a CRC that fits."""
    (body,) = Deframer(MOST_ANSWER).feed(frame)
    made = bytearray(body)
    made[at] = value
    return to_frame(bytes(made))


FORMS: dict[str, Callable[[Request], bytes]] = {
    "a byte less": lambda request: answer(request, data=bytes(BYTES - 1)),
    "a byte more": lambda request: answer(request, data=bytes(BYTES + 1)),
    "no data": lambda request: answer(request),
    "half an address": lambda request: answer(request, Status.SLVERR, b"abc"),
    "an error without an address": lambda request: answer(request, Status.BUS_TIMEOUT),
    "data with an error": lambda request: answer(request, Status.NO_SESSION, bytes(6)),
    "a byte that is not 0": lambda request: forged(ok(request), 3, 1),
    "an unknown status": lambda request: forged(ok(request), 2, 7),
    "another number": lambda request: forged(ok(request), 1, request.sequence ^ 1),
    "another space": lambda request: forged(ok(request), 0, 0x81),
    "another op": lambda request: forged(ok(request), 0, 0x92),
    "a request": lambda request: forged(ok(request), 0, 0x11),
    "an echo": lambda request: to_frame(request.encode()),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_of_another_form_is_dropped(form: str) -> None:
    """And with nothing else the link fails, whatever it said."""
    board = ScriptedBoard(lambda _, request: [FORMS[form](request), ok(request)], window=1)
    link = opened(board)
    assert collect(link, 20) == 20
    assert link.traffic.frames_stale == 20
    assert link.traffic.frames_resent == link.traffic.frames_dropped == 0
    link = opened(ScriptedBoard(lambda _, request: [FORMS[form](request)]), tries=2)
    with pytest.raises(NoAnswerError, match="whether it was carried out is not known"):
        collect(link, 1)


def test_another_version_of_the_protocol() -> None:
    def sync(_: int, request: Request) -> Sequence[bytes]:
        number = request.address.to_bytes(6, "little")
        return [answer(request, data=number + bytes([VERSION + 1]))]

    with pytest.raises(
        ProtocolVersionError, match=f"must be {VERSION}, not {VERSION + 1}"
    ) as caught:
        Link(ScriptedBoard(sync=sync)).open()
    assert (caught.value.expected, caught.value.actual) == (VERSION, VERSION + 1)


def test_a_greeting_that_is_cut_off() -> None:
    def sync(_: int, request: Request) -> Sequence[bytes]:
        return [answer(request, data=request.address.to_bytes(6, "little"))]

    with pytest.raises(AnswerError, match="must be a greeting"):
        Link(ScriptedBoard(sync=sync)).open()


def test_the_greeting_of_another_session_is_not_taken() -> None:
    def sync(number: int, request: Request) -> Sequence[bytes]:
        other = Request(op=Op.SYNC, sequence=request.sequence, address=request.address ^ 1)
        return [greeting(other, 9), greeting(request, 3)]

    assert Link(ScriptedBoard(sync=sync)).open().window == 3


def test_errors_of_the_bus_are_answers() -> None:
    failed = Answer.failure(0x123)
    link = opened(ScriptedBoard(lambda _, request: [answer(request, Status.DECERR, failed)]))
    found = link.ask(reads(1)[0])
    assert (found.status, found.failed_at) == (Status.DECERR, 0x123)


def interrupt(_: int, given: Answer) -> None:
    raise KeyboardInterrupt


def test_who_is_interrupted_takes_what_is_unanswered() -> None:
    """Nothing is given up, so the session goes on."""
    board = ScriptedBoard(lose(3), window=8)
    link = opened(board)
    with pytest.raises(KeyboardInterrupt):
        link.ask_all(reads(20), interrupt)
    assert board.unanswered == set()
    assert len({request.sequence for request in board.requests}) == 8
    assert collect(link, 20) == 20
    assert (link.traffic.frames_stale, link.traffic.frames_resent) == (0, 1)


@pytest.mark.parametrize("again", [KeyboardInterrupt, None])
def test_who_gives_up_has_no_session(again: type[BaseException] | None) -> None:
    """By a second interruption, or where no answer comes: nothing more is sent."""

    def script(number: int, request: Request) -> Sequence[bytes]:
        if number == 0:
            return [ok(request)]
        if again is not None and number == 9:
            raise again
        return []

    board = ScriptedBoard(script, window=8)
    link = opened(board, tries=3)
    with pytest.raises(KeyboardInterrupt):
        link.ask_all(reads(8), interrupt)
    sent = len(board.frames)
    with pytest.raises(
        LinkFailedError,
        match=r"read memory 0x10\.\.0x20.*whether it was carried out is not",
    ) as caught:
        link.ask(reads(1)[0])
    assert isinstance(caught.value.__cause__, InterruptedLinkError if again else NoAnswerError)
    assert len(board.frames) == sent
    assert board.closed


def test_each_sync_has_a_new_number_and_the_answer_to_the_newest_counts() -> None:
    held: list[Request] = []

    def sync(_: int, request: Request) -> Sequence[bytes]:
        held.append(request)
        if len(held) < 4:
            return []
        return [*(greeting(each, 9) for each in held[:-1]), greeting(request, 3)]

    board = ScriptedBoard(sync=sync, window=3)
    link = Link(board)
    assert link.open().window == 3
    assert len({request.address for request in held}) == len(held) == 4
    assert {request.sequence for request in held} == {0}
    assert link.traffic.frames_stale == 3
    assert collect(link, 20) == 20
    assert [request.sequence for request in board.requests] == list(range(1, 21))
    link.open()
    collect(link, 1)
    assert [request.sequence for _, request in board.frames[-2:]] == [0, 1]


def memory(op: Op, address: int, length: int) -> Request:
    data = bytes(length if op is Op.WRITE else 0)
    return Request(op=op, space=Space.MEMORY, address=address, length=length, data=data)


def shares(first: Request, second: Request) -> bool:
    """Whether they have a byte of memory in common, counted byte by byte."""
    if {first.space, second.space} != {Space.MEMORY}:
        return False
    return not {*range(first.address, first.address + first.length)}.isdisjoint(
        range(second.address, second.address + second.length)
    )


class StrictBoard(ScriptedBoard):
    """Refuses what must not be ahead of an answer; answers are late where they can be."""

    def __init__(self, seed: int) -> None:
        super().__init__(self._hold, window=5)
        self._random = random.Random(seed)
        self._asked: list[Request] = []
        self.most_held = 0

    def _hold(self, _: int, request: Request) -> Sequence[bytes]:
        for other in self._asked:
            both = (request, other)
            if any(each.op is Op.WRITE and each.space is not Space.MEMORY for each in both):
                raise LineError("a write of registers is not alone")
            if shares(*both) and any(each.op is Op.WRITE for each in both):
                raise LineError(f"{request} shares a byte with {other}")
        self._asked.append(request)
        self.most_held = max(self.most_held, len(self._asked))
        return []

    def read(self, seconds: float) -> bytes:
        if self._asked:
            given = self._asked.pop(0)
            self.unanswered.discard(given.sequence)
            return ok(given)
        return super().read(seconds)


def mixed(seed: int, total: int) -> list[Request]:
    """Requests of the first 64 bytes of memory, and at times of registers."""
    rng = random.Random(seed)
    made = []
    for _ in range(total):
        op = rng.choice((Op.READ, Op.WRITE))
        if rng.random() < 0.1:
            data = bytes(4 if op is Op.WRITE else 0)
            made.append(Request(op=op, address=4 * rng.randrange(9), length=4, data=data))
        else:
            made.append(memory(op, rng.randrange(64), rng.randint(1, 9)))
    return made


def test_what_shares_a_byte_with_a_write_waits_for_its_answer() -> None:
    board = StrictBoard(2)
    link = opened(board)
    found: list[int] = []
    link.ask_all(mixed(2, 600), lambda index, _: found.append(index))
    assert found == list(range(600))
    assert board.most_held == 5


@pytest.mark.parametrize("message", ["is not alone", "shares a byte"])
def test_a_host_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    monkeypatch.setattr("nearstep.serial.link._clash", lambda *_: False)
    kept = {
        "is not alone": lambda each: each.space is not Space.MEMORY or each.op is Op.READ,
        "shares a byte": lambda each: each.space is Space.MEMORY,
    }[message]
    requests = [each for each in mixed(2, 600) if kept(each)]
    with pytest.raises(LineError, match=message):
        opened(StrictBoard(2)).ask_all(requests, lambda *_: None)


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
