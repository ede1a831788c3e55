"""Requests to a board and their answers: a session, a window of requests, and retries."""

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
    UNKNOWN,
    AnswerError,
    DamagedFramesError,
    InterruptedLinkError,
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
    FAILED,
    MOST_AHEAD,
    MOST_ANSWER,
    MOST_REQUEST,
    REQUEST_BYTES,
    VERSION,
    Answer,
    Hello,
    MessageError,
    Op,
    Request,
    Space,
    Status,
)

SEQUENCES = 256
WAIT_SECONDS = 0.1
WAIT_GROWTH = 2.0
MOST_GROWTHS = 3
"""Most increases of the wait for one request, so that a lost board is detected soon."""

KEPT_GROWTHS = 8
"""Most increases of the wait after requests that were all retried: up to 25.6 s."""

TRIES = 10
KEPT_TRANSACTIONS = 32
FRAME_BYTES = 6
"""Flags and CRC of a frame."""

Take = Callable[[int, Answer], None]


@dataclass
class LinkTraffic:
    """Traffic of the link since it was opened.

    Attributes
    ----------
    bytes_sent, bytes_received : on the line, including framing.
    bodies_sent, bodies_received : bytes of requests and of answers among these. Six bytes of each
        frame are framing, the rest escapes.
    frames_sent, frames_received : whole frames.
    frames_resent : retries among the frames sent.
    frames_dropped : damaged frames received.
    frames_stale : whole frames received that answer no open request.
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
    """A request without an answer.

    Attributes
    ----------
    index : of the request in the call.
    tries : number of times that the request was sent.
    growths : increases of the wait.
    sent_at : number of the request's last frame, among all frames of the link.
    begun, last : times of the first and the last frame.
    received, dropped : bytes and damaged frames that the link had received at `begun`.
    """

    index: int
    request: Request
    tries: int = 0
    growths: int = 0
    sent_at: int = 0
    begun: float = 0.0
    last: float = 0.0
    received: int = 0
    dropped: int = 0

    @property
    def nbytes(self) -> int:
        """Return the approximate bytes of the request and its answer on the line."""
        data = len(self.request.data) if self.request.op is Op.WRITE else self.request.length
        return data + REQUEST_BYTES + ANSWER_BYTES + 2 * FRAME_BYTES


class Link:
    """A session with a board.

    Requests of a call are sent ahead of their answers, as many as the board holds. Board and line
    keep the order, so an answer shows that every unanswered request whose frame was sent before was
    lost, or its answer was: that request is retried at once. If no answer arrives, the oldest
    request is retried, after waits that grow, until a request that was sent once is answered. Some
    requests wait for earlier answers: writes of registers, and the second of two requests that
    share a byte of memory and do not both read it. Methods may be called from several threads.

    A session cannot skip a request. So the link fails if a request is never answered; and an
    interrupted call receives outstanding answers before it ends, unless it is interrupted again.

    Parameters
    ----------
    wait : seconds before the first retry of a request, added to the time of the bytes on the line.
    tries : number of times that a request is sent before the link fails.
    window : most requests sent ahead of their answers. None: as many as the board holds.
    number : returns a new session number of 48 bits at each call.

    Attributes
    ----------
    port : name of the line.
    hello : the board's greeting; None before `open`.
    history : the last requests and their outcomes, oldest first.
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
        self._deframer = Deframer(max(MOST_ANSWER, MOST_REQUEST))  # a line may echo
        self._bodies: deque[bytes] = deque()
        self._sequence = 0
        self._pending: deque[_Pending] = deque()
        self._growths = 0  # of waits, since something that was sent once was answered
        self._syncs: dict[int, float] = {}  # numbers, and when they were sent
        self._byte_seconds = 0.0
        self._answered_at = 0.0
        self._failed: LinkError | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._process = os.getpid()

    @property
    def window(self) -> int:
        """Most requests in flight."""
        held = 1 if self.hello is None else max(1, self.hello.window)
        return min(held, self._most_ahead, MOST_AHEAD)

    def open(self) -> Hello:
        """Begin a session.

        Raises
        ------
        ProtocolVersionError : the board has another version of the protocol.
        """
        with self._lock:
            found: list[Hello] = []
            self._sequence = 0
            self._syncs.clear()

            def take(_: int, answer: Answer) -> None:
                found.append(self._hello(answer))

            self._exchange([Request(op=Op.SYNC)], take)
            self.hello = found[0]
            return self.hello

    def ask(self, request: Request) -> Answer:
        """Send a request and return its answer, which may be one of `FAILED`."""
        found: list[Answer] = []
        self.ask_all([request], lambda _, answer: found.append(answer))
        return found[0]

    def ask_all(self, requests: Iterable[Request], take: Take) -> None:
        """Send requests, several ahead of the answers where that is allowed.

        Parameters
        ----------
        requests : without sequence numbers, which the link sets.
        take : called with index and answer of each request, in any order.

        Raises
        ------
        LinkError : some requests may have been executed.
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
        """Close the port. Closing twice does nothing."""
        self._closed = True
        self._transport.close()

    def _exchange(self, requests: Iterable[Request], take: Take) -> None:
        try:
            self._run(iter(requests), take)
        except LinkError as error:
            self._fail(error)
            raise
        except BaseException as error:
            self._settle(error)
            raise

    def _settle(self, cause: BaseException) -> None:
        """Receive outstanding answers after an interrupt; a second interrupt fails the link."""
        try:
            self._run(iter(()), lambda index, answer: None)
        except LinkError as error:
            self._fail(error)
        except BaseException:
            asked = ", ".join(_text(each.request) for each in self._pending)
            reason = f"{asked} had no answer when {type(cause).__name__} ended the call; {UNKNOWN}"
            transactions = tuple(self.history)
            self._fail(InterruptedLinkError(self.port, reason, transactions=transactions))
            raise

    def _fail(self, error: LinkError) -> None:
        self._failed = error
        self._pending.clear()
        self._transport.close()

    def _run(self, requests: Iterator[Request], take: Take) -> None:
        """Send all requests, and receive all answers."""
        pending = self._pending
        index = 0
        request = next(requests, None)
        while True:
            fresh = []
            while request is not None and self._may_go(request):
                fresh.append(_Pending(index, replace(request, sequence=self._sequence)))
                pending.append(fresh[-1])
                self._sequence = (self._sequence + 1) % SEQUENCES
                index += 1
                request = next(requests, None)
            self._send(fresh)
            if not pending:
                return
            answered = self._await()
            if answered is None:
                oldest = pending[0]
                if oldest.growths < MOST_GROWTHS:
                    oldest.growths += 1
                    self._growths = min(self._growths + 1, KEPT_GROWTHS)
                self._send([oldest])
                continue
            which, answer = answered
            self._learn(which)
            pending.remove(which)
            self.history.append(_said(which, answer))
            take(which.index, answer)
            self._send([each for each in pending if each.sent_at < which.sent_at])

    def _may_go(self, request: Request) -> bool:
        """Return whether the next request may be sent."""
        if not self._pending:
            return True
        oldest = self._pending[0].request.sequence
        if (self._sequence - oldest) % SEQUENCES >= self.window:
            return False
        return not any(_clash(request, each.request) for each in self._pending)

    def _send(self, requests: Sequence[_Pending]) -> None:
        """Send requests for the first time, or resend them."""
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
            if each.request.op is Op.SYNC:
                each.request = replace(each.request, address=self._number())
                self._syncs[each.request.address] = self._transport.now
            body = each.request.encode()
            traffic.bodies_sent += len(body)
            data += to_frame(body)
        if data:
            self._transport.write(bytes(data))
            self.traffic.bytes_sent += len(data)

    def _learn(self, answered: _Pending) -> None:
        """Update the time per byte from an answer, and reset the wait's increases.

        If several frames were sent, the answered frame is unknown and the answer may have taken
        longer, so the increases remain.
        """
        now = self._transport.now
        took = now - max(answered.last, self._answered_at)
        self._answered_at = now
        self._byte_seconds = max(took / answered.nbytes, self._byte_seconds / 2)
        if answered.tries == 1:
            self._growths = 0

    @property
    def _patience(self) -> float:
        """Return the seconds within which an open request should be answered."""
        baud = self._transport.baud
        line = BITS_A_BYTE / baud if baud else 0.0
        nbytes = sum(each.nbytes for each in self._pending)
        wait = self._wait * WAIT_GROWTH**self._growths + nbytes * line
        return wait + (nbytes + self._pending[0].nbytes) * self._byte_seconds

    def _await(self) -> tuple[_Pending, Answer] | None:
        """Receive the next answer to an open request; None after a timeout."""
        begun = self._transport.now
        while True:
            while self._bodies:
                found = self._match(self._bodies.popleft())
                if found is not None:
                    return found
            left = begun + self._patience - self._transport.now
            if left <= 0:
                return None
            data = self._transport.read(left)
            self.traffic.bytes_received += len(data)
            self._bodies.extend(self._deframer.feed(data))
            self.traffic.frames_dropped = self._deframer.dropped

    def _match(self, body: bytes) -> tuple[_Pending, Answer] | None:
        """Return the open request that a frame answers; None if there is none."""
        self.traffic.frames_received += 1
        self.traffic.bodies_received += len(body)
        try:
            answer = Answer.decode(body)
        except MessageError:
            self.traffic.frames_stale += 1
            return None
        for each in self._pending:
            if answer.answers(each.request):
                self._check(each, answer)
                return each, answer
        self.traffic.frames_stale += 1
        if answer.op is Op.SYNC:
            self._learn_late(answer)
        return None

    def _learn_late(self, greeting: Answer) -> None:
        """Increase the wait after an answer to a SYNC before the newest: the board is slow."""
        sent = self._syncs.get(int.from_bytes(greeting.data[:ADDRESS_BYTES], "little"))
        if sent is not None:
            took = self._transport.now - sent
            while self._wait * WAIT_GROWTH**self._growths < WAIT_GROWTH * took:
                if self._growths == KEPT_GROWTHS:
                    return
                self._growths += 1

    def _check(self, pending: _Pending, answer: Answer) -> None:
        """Raise unless the request was executed, or failed on the board's bus."""
        if answer.status is Status.OK or answer.status in FAILED:
            return
        self.history.append(_said(pending, answer))
        transactions = tuple(self.history)
        if answer.status is Status.NO_SESSION:
            reason = "the board was reset while in use: the contents of its registers are lost"
            raise SessionLostError(self.port, reason, transactions=transactions)
        expected, actual = "data or an error of the bus", answer.status.name
        asked = _text(pending.request)
        raise AnswerError(self.port, asked, expected, actual, transactions=transactions)

    def _hello(self, answer: Answer) -> Hello:
        """Decode the greeting in an answer to SYNC."""
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


def _clash(first: Request, second: Request) -> bool:
    """Return whether the second request must wait for the answer to the first."""
    both = (first, second)
    writes = [each for each in both if each.op is not Op.READ]
    if any(each.space is not Space.MEMORY for each in writes):
        return True
    if not writes or any(each.space is not Space.MEMORY for each in both):
        return False
    begin = max(each.address for each in both)
    return begin < min(each.address + each.length for each in both)


def _text(request: Request) -> str:
    """Describe a request for messages."""
    if request.op is Op.SYNC:
        return "SYNC"
    first, last = request.address, request.address + request.length
    return f"{request.op.name.lower()} {request.space.name.lower()} {first:#x}..{last:#x}"


def _said(pending: _Pending, answer: Answer) -> str:
    """Describe a request and its outcome for reports."""
    more = f", sent {pending.tries} times" if pending.tries > 1 else ""
    return f"{_text(pending.request)} -> {answer.status.name}{more}"
