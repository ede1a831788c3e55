"""Requests to a board and their answers: a session, what is ahead, and what is sent again."""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nearstep.errors import ClosedDeviceError, ForkedDeviceError
from nearstep.serial.errors import (
    AnswerError,
    DamagedFramesError,
    LinkError,
    LinkFailedError,
    NoAnswerError,
    ProtocolVersionError,
    SessionLostError,
)
from nearstep.serial.transport import BITS_A_BYTE, Transport
from nearstep_spec.serial.framing import Deframer, to_frame
from nearstep_spec.serial.protocol import (
    ADDRESS_BYTES,
    ANSWER_BYTES,
    MOST_ANSWER,
    REQUEST_BYTES,
    VERSION,
    Answer,
    Hello,
    MessageError,
    Op,
    Request,
    Status,
)

SEQUENCES = 256
MOST_AHEAD = SEQUENCES // 2
"""Requests in a row of which the first is not answered, at most: a late answer is never taken for
that of a request with the same number."""

WAIT_SECONDS = 0.1
WAIT_GROWTH = 2
LONGEST_WAIT = 8
"""The wait for an answer grows to so many times the first one."""

TRIES = 10
KEPT_TRANSACTIONS = 32
FRAME_BYTES = 6
"""Flags and CRC of a frame."""

FAILED = (Status.SLVERR, Status.DECERR, Status.BUS_TIMEOUT)
"""How a request ends that the board's bus did not carry out; its answer tells the address."""

Take = Callable[[int, Answer], None]


@dataclass
class LinkTraffic:
    """What has crossed the link since it was opened.

    Attributes
    ----------
    bytes_sent, bytes_received : on the line, framing included.
    bodies_sent, bodies_received : of them, bytes of requests and of answers. With six for each
        frame, what is missing are escapes.
    frames_sent, frames_received : whole ones.
    frames_resent : of those sent, the ones that were sent before.
    frames_dropped : received and damaged.
    frames_stale : received, and no answer to anything that still had none.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    bodies_sent: int = 0
    bodies_received: int = 0
    frames_sent: int = 0
    frames_received: int = 0
    frames_resent: int = 0
    frames_dropped: int = 0
    frames_stale: int = 0


@dataclass
class _Pending:
    """A request that is not answered yet.

    Attributes
    ----------
    index : its place among those of the call.
    request
    tries : times that it was sent.
    sent_at : number of its last frame, of all frames of the link.
    begun, last : time at which it was sent first, and last.
    received, dropped : bytes and damaged frames that had come by then.
    """

    index: int
    request: Request
    tries: int = 0
    sent_at: int = 0
    begun: float = 0.0
    last: float = 0.0
    received: int = 0
    dropped: int = 0

    @property
    def nbytes(self) -> int:
        """Of it and its answer on the line, about."""
        data = len(self.request.data) if self.request.op is Op.WRITE else self.request.length
        return data + REQUEST_BYTES + ANSWER_BYTES + 2 * FRAME_BYTES


class Link:
    """A session with a board.

    Requests of a call go out ahead of their answers, as many as the board holds. Board and line
    keep the order, so an answer shows that every request whose frame went out before its own, and
    which has none, was lost, or its answer was: that is sent again at once. If nothing comes, the
    oldest is sent again, after waits that grow. Methods may be called from several threads.

    Parameters
    ----------
    transport
    wait : seconds before a request is sent again, the first time; what the line needs for the bytes
        is added.
    tries : times that a request is sent before the link has failed.
    window : requests ahead, at most. None: as many as the board holds.
    number : gives what tells one session from another, of 48 bits.

    Attributes
    ----------
    port : name of the line.
    traffic
    hello : what the board said of itself; None before `open`.
    history : the last requests and how they ended, oldest first.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        wait: float = WAIT_SECONDS,
        tries: int = TRIES,
        window: int | None = None,
        number: Callable[[], int] = lambda: secrets.randbits(8 * ADDRESS_BYTES),
    ) -> None:
        self.port = transport.port
        self.traffic = LinkTraffic()
        self.hello: Hello | None = None
        self.history: deque[str] = deque(maxlen=KEPT_TRANSACTIONS)
        self._transport = transport
        self._wait = wait
        self._tries = tries
        self._most_ahead = window or MOST_AHEAD
        self._number = number
        self._deframer = Deframer(MOST_ANSWER)
        self._bodies: deque[bytes] = deque()
        self._sequence = 0
        self._pending: deque[_Pending] = deque()
        self._quiet = 0  # waits in vain since something that was sent once was answered
        self._byte_seconds = 0.0
        self._answered_at = 0.0
        self._failed: LinkError | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._process = os.getpid()

    @property
    def window(self) -> int:
        """Requests that are sent before the first of them is answered, at most."""
        held = 1 if self.hello is None else max(1, self.hello.window)
        return min(held, self._most_ahead, MOST_AHEAD)

    def open(self) -> Hello:
        """Begin a session.

        Raises
        ------
        NoAnswerError, PortLostError
        ProtocolVersionError : of another version of the protocol.
        AnswerError
        """
        with self._lock:
            number = self._number()
            found: list[Hello] = []

            def take(_: int, answer: Answer) -> None:
                found.append(self._hello(answer))

            self._exchange([Request(op=Op.SYNC, address=number)], take)
            self.hello = found[0]
            return self.hello

    def ask(self, request: Request) -> Answer:
        """Send one request and wait for its answer, which may be one of `FAILED`.

        Raises
        ------
        LinkError
        ForkedDeviceError
        """
        found: list[Answer] = []
        self.ask_all([request], lambda _, answer: found.append(answer))
        return found[0]

    def ask_all(self, requests: Iterable[Request], take: Take) -> None:
        """Send requests, several ahead of the answers.

        Writes of registers are to be sent alone.

        Parameters
        ----------
        requests : the sequence number is the link's.
        take : gets the place of each among them and its answer, in any order.

        Raises
        ------
        LinkError : some may have been carried out.
        ClosedDeviceError, ForkedDeviceError
        """
        if os.getpid() != self._process:
            raise ForkedDeviceError(f"on {self.port}", "use it", self._process)
        with self._lock:
            if self._closed:
                raise ClosedDeviceError(f"on {self.port}", "use it")
            if self._failed is not None:
                reason = f"it failed before: {self._failed.reason}"
                raise LinkFailedError(self.port, reason) from self._failed
            self._exchange(requests, take)

    def close(self) -> None:
        """Give the port back. Closing twice does nothing."""
        self._closed = True
        self._transport.close()

    def _exchange(self, requests: Iterable[Request], take: Take) -> None:
        try:
            self._run(iter(requests), take)
        except LinkError as error:
            self._failed = error
            self._transport.close()
            raise
        finally:
            self._pending.clear()  # what is answered later is stale

    def _run(self, requests: Iterator[Request], take: Take) -> None:
        """Send everything, and take every answer."""
        pending = self._pending
        index, more = 0, True
        while True:
            fresh = []
            while more and self._room():
                request = next(requests, None)
                if request is None:
                    more = False
                    break
                fresh.append(_Pending(index, replace(request, sequence=self._sequence)))
                pending.append(fresh[-1])
                self._sequence = (self._sequence + 1) % SEQUENCES
                index += 1
            self._send(fresh)
            if not pending:
                return
            answered = self._await()
            if answered is None:
                self._quiet += 1
                self._send([pending[0]])
                continue
            which, answer = answered
            self._learn(which)
            pending.remove(which)
            self.history.append(_said(which, answer))
            take(which.index, answer)
            self._send([each for each in pending if each.sent_at < which.sent_at])

    def _room(self) -> bool:
        """Whether the next request may be sent."""
        if not self._pending:
            return True
        oldest = self._pending[0].request.sequence
        return (self._sequence - oldest) % SEQUENCES < self.window

    def _send(self, requests: Sequence[_Pending]) -> None:
        """Send them, for the first time or again."""
        data = bytearray()
        for each in requests:
            if each.tries >= self._tries:
                raise self._no_answer(each)
            traffic = self.traffic
            if each.tries == 0:
                each.begun = self._transport.now
                each.received, each.dropped = traffic.bytes_received, traffic.frames_dropped
            traffic.frames_resent += each.tries > 0
            each.tries += 1
            each.last = self._transport.now
            traffic.frames_sent += 1
            each.sent_at = traffic.frames_sent
            body = each.request.encode()
            traffic.bodies_sent += len(body)
            data += to_frame(body)
        if data:
            self._transport.write(bytes(data))
            self.traffic.bytes_sent += len(data)

    def _learn(self, answered: _Pending) -> None:
        """Keep in mind how long an answer took.

        To which of several frames it came cannot be known: it may have taken longer, so waits stay
        as long as they are.
        """
        now = self._transport.now
        took = now - max(answered.last, self._answered_at)
        self._answered_at = now
        self._byte_seconds = max(took / answered.nbytes, self._byte_seconds / 2)
        if answered.tries == 1:
            self._quiet = 0

    def _await(self) -> tuple[_Pending, Answer] | None:
        """The next answer to something pending; None if it does not come in time."""
        baud = self._transport.baud
        line = BITS_A_BYTE / baud if baud else 0.0
        nbytes = sum(each.nbytes for each in self._pending)
        wait = self._wait * min(WAIT_GROWTH**self._quiet, LONGEST_WAIT) + nbytes * line
        wait += (nbytes + self._pending[0].nbytes) * self._byte_seconds
        deadline = self._transport.now + wait
        while True:
            while self._bodies:
                found = self._match(self._bodies.popleft())
                if found is not None:
                    return found
            left = deadline - self._transport.now
            if left <= 0:
                return None
            data = self._transport.read(left)
            self.traffic.bytes_received += len(data)
            self._bodies.extend(self._deframer.feed(data))
            self.traffic.frames_dropped = self._deframer.dropped

    def _match(self, body: bytes) -> tuple[_Pending, Answer] | None:
        """What a frame answers; None if that has been answered before, or was never asked."""
        self.traffic.frames_received += 1
        self.traffic.bodies_received += len(body)
        try:
            answer = Answer.decode(body)
        except MessageError:
            self.traffic.frames_stale += 1
            return None
        for each in self._pending:
            asked = each.request
            if answer.sequence != asked.sequence or not _answers(answer, asked):
                continue
            self._check(each, answer)
            return each, answer
        self.traffic.frames_stale += 1
        return None

    def _check(self, pending: _Pending, answer: Answer) -> None:
        """Raise unless the answer is one that the request can have."""
        asked, status = pending.request, answer.status
        if status is Status.NO_SESSION:
            self.history.append(_said(pending, answer))
            reason = "the board was reset while it was in use: what its registers held is gone"
            raise SessionLostError(self.port, reason, transactions=tuple(self.history))
        if status is Status.OK:
            wanted = asked.length if asked.op is Op.READ else 0
            if asked.op is Op.SYNC or len(answer.data) == wanted:
                return
            expected, actual = f"{wanted} bytes", f"{len(answer.data)}"
        elif status in FAILED and len(answer.data) == ADDRESS_BYTES and asked.op is not Op.SYNC:
            return
        else:
            expected = "data or an error of the bus"
            actual = f"{status.name} with {len(answer.data)} bytes"
        self.history.append(_said(pending, answer))
        raise AnswerError(
            self.port, _text(asked), expected, actual, transactions=tuple(self.history)
        )

    def _hello(self, answer: Answer) -> Hello:
        """What a board says in its answer to SYNC."""
        data = answer.data
        if len(data) > ADDRESS_BYTES and data[ADDRESS_BYTES] != VERSION:
            what = f"version of the protocol on {self.port}"
            raise ProtocolVersionError(what, VERSION, data[ADDRESS_BYTES])
        try:
            return Hello.decode(data)
        except MessageError as error:
            raise AnswerError(self.port, "SYNC", "a greeting", str(error)) from error

    def _no_answer(self, pending: _Pending) -> NoAnswerError:
        asked = _text(pending.request)
        seconds = self._transport.now - pending.begun
        frames = self.traffic.frames_dropped - pending.dropped
        nbytes = self.traffic.bytes_received - pending.received
        transactions = (*self.history, f"{asked} -> nothing")
        common: dict[str, Any] = {
            "seconds": seconds,
            "tries": pending.tries,
            "transactions": transactions,
        }
        if frames or (nbytes and self.hello is None):
            return DamagedFramesError(self.port, asked, frames=frames, nbytes=nbytes, **common)
        return NoAnswerError(self.port, asked, **common)


def _answers(answer: Answer, asked: Request) -> bool:
    """Whether an answer with the number of a request is one to it."""
    if (answer.op, answer.space) != (asked.op, asked.space):
        return False
    if asked.op is not Op.SYNC:
        return True
    number = asked.address.to_bytes(ADDRESS_BYTES, "little")
    return answer.data[:ADDRESS_BYTES] == number


def _text(request: Request) -> str:
    """A request, for messages."""
    if request.op is Op.SYNC:
        return "SYNC"
    first, last = request.address, request.address + request.length
    return f"{request.op.name.lower()} {request.space.name.lower()} {first:#x}..{last:#x}"


def _said(pending: _Pending, answer: Answer) -> str:
    """A request and how it ended, for reports."""
    more = f", sent {pending.tries} times" if pending.tries > 1 else ""
    return f"{_text(pending.request)} -> {answer.status.name}{more}"
