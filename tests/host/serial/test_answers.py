"""Which answers the link takes from a scripted board, and how sessions begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from nearstep.serial.errors import (
    AnswerError,
    InterruptedLinkError,
    LinkFailedError,
    NoAnswerError,
    ProtocolVersionError,
    SessionLostError,
)
from nearstep.serial.link import SEQUENCES, Link
from nearstep_spec.serial.framing import Deframer, to_frame
from nearstep_spec.serial.protocol import MOST_ANSWER, VERSION, Answer, Op, Request, Space, Status

from .scripted import BYTES, ScriptedBoard, answer, collect, greeting, lose, ok, opened, reads


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
        SessionLostError, match=r"was reset while in use.*open the device"
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
    with pytest.raises(NoAnswerError, match="the board may have executed it"):
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
        LinkFailedError, match=r"read memory 0x10\.\.0x20.*the board may have executed it"
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
