"""A board that does as a test says, on a line whose seconds pass only while it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from nearstep.errors import DeviceError
from nearstep.serial.link import Link
from nearstep_spec.serial.framing import Deframer, to_frame
from nearstep_spec.serial.protocol import MOST_REQUEST, Answer, Hello, Op, Request, Space, Status

MOST_SECONDS = 1e4
BYTES = 16
"""Of a piece that `reads` asks for."""

Script = Callable[[int, Request], Sequence[bytes]]
"""Number of the frame, of all that came, and the request: what comes on the line in return."""


class LineError(DeviceError):
    """The host did what no host may do."""


class ScriptedBoard:
    """A transport.

    Parameters
    ----------
    script : what it answers to all but SYNC. None: everything with OK.
    window : requests that it says to hold.
    sync : answers SYNC, in the place of a greeting.

    Attributes
    ----------
    frames : every request that came, with the second.
    unanswered : sequence numbers whose answer has not been given to the host.
    most_ahead : the most of these at a time.
    """

    port = "scripted"

    def __init__(
        self,
        script: Script | None = None,
        *,
        window: int = 4,
        baud: int = 0,
        sync: Script | None = None,
    ) -> None:
        self.baud = baud
        self.frames: list[tuple[float, Request]] = []
        self.window = window
        self.unanswered: set[int] = set()
        self.most_ahead = 0
        self.closed = False
        self.now = 0.0
        self._script = script or (lambda _, request: [ok(request)])
        self._sync = sync or (lambda _, request: [greeting(request, window)])
        self._deframer = Deframer(MOST_REQUEST)
        self._coming: list[bytes] = []

    @property
    def requests(self) -> list[Request]:
        """Every request but SYNC, each as often as it came."""
        return [request for _, request in self.frames if request.op is not Op.SYNC]

    @property
    def times(self) -> list[float]:
        """Seconds at which they came."""
        return [at for at, request in self.frames if request.op is not Op.SYNC]

    def write(self, data: bytes) -> None:
        if self.closed:
            raise LineError("a closed line was written to")
        for body in self._deframer.feed(data):
            request = Request.decode(body)
            script = self._sync if request.op is Op.SYNC else self._script
            if request.op is not Op.SYNC:
                self.unanswered.add(request.sequence)
                self.most_ahead = max(self.most_ahead, len(self.unanswered))
                if len(self.unanswered) > self.window:
                    raise LineError(f"{len(self.unanswered)} requests at a time")
            self._coming += script(len(self.requests), request)
            self.frames.append((self.now, request))
        if self._deframer.dropped:
            raise LineError("a damaged frame was sent")

    def read(self, seconds: float) -> bytes:
        """One frame at a time, so that a host sees each before it sends more."""
        if self.closed:
            raise LineError("a closed line was read")
        if not self._coming:
            self.now += seconds
            if self.now > MOST_SECONDS:
                raise LineError("the host waits for ever")
            return b""
        data = self._coming.pop(0)
        for body in Deframer(MOST_REQUEST).feed(data):
            self.unanswered.discard(body[1])
        return data

    def close(self) -> None:
        self.closed = True


def ok(request: Request) -> bytes:
    """A good answer: of a read, bytes that depend on the address."""
    data = bytes((request.address + at) % 251 for at in range(request.length))
    return answer(request, data=data if request.op is Op.READ else b"")


def answer(request: Request, status: Status = Status.OK, data: bytes = b"") -> bytes:
    """The frame of an answer."""
    made = Answer(
        op=request.op, space=request.space, sequence=request.sequence, status=status, data=data
    )
    return to_frame(made.encode())


def greeting(request: Request, window: int = 4, manifest_bytes: int = 0) -> bytes:
    """The frame of an answer to SYNC."""
    hello = Hello(number=request.address, window=window, manifest_bytes=manifest_bytes)
    return answer(request, data=hello.encode())


def damaged(frame: bytes) -> bytes:
    """The frame with a bit inverted that is no flag's."""
    made = bytearray(frame)
    made[len(made) // 2] ^= 1
    return bytes(made)


def reads(total: int) -> list[Request]:
    """Requests of pieces of memory, one behind the other."""
    return [
        Request(op=Op.READ, space=Space.MEMORY, address=BYTES * at, length=BYTES)
        for at in range(total)
    ]


def opened(board: ScriptedBoard, **options: float) -> Link:
    """A link in a session."""
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
