"""What the link holds back: requests that must not be ahead of an answer to another."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from nearstep_spec.serial.protocol import Op, Request, Space

from .scripted import LineError, ScriptedBoard, ok, opened


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
