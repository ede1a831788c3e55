"""A client of the service: pushes tensors, and pulls what they are summed to."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.service.errors import (
    JOB_ERRORS,
    REFUSALS,
    FrameError,
    HandshakeError,
    JobError,
    RefusedError,
    ServiceError,
    ServiceLostError,
    StalledError,
)
from nearstep.coarse.service.messages import (
    VERSION,
    Attach,
    Barrier,
    Beat,
    Close,
    Detach,
    Done,
    Failed,
    FromService,
    Get,
    Hello,
    Leave,
    Load,
    Message,
    Open,
    Opened,
    Operation,
    Passed,
    Push,
    Put,
    Refused,
    Save,
    Seek,
    Stored,
    Summed,
    Value,
    Welcome,
)
from nearstep.coarse.service.plan import shards
from nearstep.coarse.service.segment import Segment, half
from nearstep.coarse.service.wire import Address, Connection
from nearstep.errors import ArgumentError, ShapeError

TIMEOUT_S = 1800.0
MAIL_BYTES = 1 << 16


class Client:
    """One of the clients of a job.

    It returns when all clients of the job are there.

    Parameters
    ----------
    address : of the service, `unix:PATH` or `tcp:HOST:PORT`.
    token
    job : name; clients of one name belong together.
    rank : of this client, from 0.
    clients : of the job.
    timeout_s : bound of each wait, seconds.
    silence_s : seconds without a sign of life after which the service is gone.

    Attributes
    ----------
    job
    device : URL of the memory devices.
    devices : their number.
    shard_bytes : of the shards of tensors.
    copied_bytes : that were copied into and out of the segments.

    Raises
    ------
    HandshakeError : wrong token, version, rank or number of clients.
    ServiceLostError : no service there, or it ended.
    JobError : not all clients came in time.

    Ref: COARSE paper, sections III-D and IV-B.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        job: str,
        rank: int,
        clients: int,
        timeout_s: float = TIMEOUT_S,
        silence_s: float = 60.0,
    ) -> None:
        self.job = job
        self.rank = rank
        self.clients = clients
        self.timeout_s = timeout_s
        self.silence_s = silence_s
        self.copied_bytes = 0
        self._arrived = threading.Condition()
        self._answers: dict[int, Message] = {}
        self._opened: set[int] = set()
        self._refused: dict[int, Refused] = {}
        self._welcome: Welcome | None = None
        self._error: ServiceError | None = None
        self._requests = 0
        self._segments = 0
        self._lock = threading.Lock()
        self._exchanges: dict[int, Exchange] = {}
        self._numbers = 0
        self._closed = False
        self._held: dict[int, Segment] = {}
        self._mail: list[tuple[int, Segment]] = []
        self._getting: dict[int, NDArray[np.uint8]] = {}
        self._last_beat = time.monotonic()
        try:
            sock = Address(address).connect()
        except OSError as error:
            raise ServiceLostError(f"no service at {address}: {error}") from error
        self.connection = Connection(sock, FromService, silence_s)
        self._thread = threading.Thread(target=self._read, name="coarse client", daemon=True)
        self._thread.start()
        try:
            self._send(Hello(VERSION, token, job, rank, clients))
            found = self._await(lambda: self._welcome, f"all {clients} clients of job {job!r}")
        except BaseException:
            self.close(leave=False)
            raise
        self.device: str = found.device
        self.devices: int = found.devices
        self.shard_bytes: int = found.shard_bytes
        self._beat_s: float = found.beat_s

    def exchange(self, elements: int, operation: Operation = "sum", wire: str = "fp32") -> Exchange:
        """A tensor that all clients sum; they open it in the same order.

        Parameters
        ----------
        elements : float32.
        operation : `sum`, `average` or `max`.
        wire : format on the links of the devices.

        Raises
        ------
        UnlikeError : the clients do not open the same; says who opens what.
        DeviceMemoryError : the devices have no memory for it.
        RefusedError, JobError
        """
        with self._lock:
            number = self._numbers
            self._numbers += 1
        segment_number, segment = self._attach(2 * half(elements))
        exchange = Exchange(self, number, elements, segment_number, segment)
        self._exchanges[number] = exchange
        self._send(Open(number, elements, operation, wire, segment_number))
        try:
            self._await(
                lambda: self._refused.get(number) or number in self._opened,
                f"all clients to open exchange {number}",
            )
            if number in self._refused:
                refused = self._refused.pop(number)
                self._detach(segment_number)
                raise _refusal(refused)
        except BaseException:
            self._exchanges.pop(number, None)
            raise
        return exchange

    def put(self, key: str, data: NDArray[np.uint8], *, readers: int) -> None:
        """Leave bytes in the memory of this client's device, for `readers` clients.

        Raises
        ------
        DeviceMemoryError : nothing was left.
        RefusedError, JobError
        """
        if readers < 1:
            raise ArgumentError(f"readers must be at least 1, not {readers}")
        self._put(key, data, readers)

    def _put(self, key: str, data: NDArray[np.uint8], readers: int) -> None:
        with self._mailbox(data.size) as (number, room):
            room[: data.size] = data
            request = self._request()
            inline = None if self.connection.is_shared else room[: data.size]
            self._send(Put(request, key, number, data.size, readers), inline)
            self._answer(request, f"{key!r} to be stored")
            self.copied_bytes += data.size

    def get(self, key: str, out: NDArray[np.uint8]) -> None:
        """Wait for bytes that a client leaves under a name, and copy them to `out`.

        Raises
        ------
        UnlikeError : there are more or fewer of them.
        RefusedError, JobError
        """
        with self._mailbox(out.size) as (number, room):
            request = self._request()
            self._getting[request] = room[: out.size]
            self._send(Get(request, key, number, out.size))
            try:
                self._answer(request, f"{key!r} from another client")
            finally:
                del self._getting[request]
            out[...] = room[: out.size]
            self.copied_bytes += out.size

    def keep(self, key: str, data: NDArray[np.uint8]) -> None:
        """Keep bytes under a name, in the memory of all devices: a new version of the value.

        Raises
        ------
        DeviceMemoryError : the version before it is still there.
        RefusedError, JobError
        """
        self._put(key, data, 0)

    def save(self, path: str, keys: Sequence[str]) -> str:
        """Write what is kept under these names now to the next generation of `path`.

        The devices keep that version in copies of the pages that change meanwhile.

        Returns
        -------
        str : path of the file, on the service's machine; it is whole and on the disk.

        Raises
        ------
        RefusedError : `kind` says why: no such value, no space for the copies, a full disk.
        JobError

        Ref: COARSE paper, section IV-A.
        """
        request = self._request()
        self._send(Save(request, list(keys), path))
        done = self._answer(request, f"a snapshot in {path}")
        assert isinstance(done, Done)
        return done.text

    def load(self, path: str) -> dict[str, int]:
        """Keep again what a snapshot has: a file, or the newest generation of `path`.

        Returns
        -------
        dict[str, int] : bytes of each value that is kept now, by name.

        Raises
        ------
        RefusedError : torn, or not there; names the last good one. Nothing was changed.
        JobError
        """
        request = self._request()
        self._send(Load(request, path))
        done = self._answer(request, f"the snapshot in {path}")
        assert isinstance(done, Done)
        found: dict[str, int] = json.loads(done.text)
        return found

    def seek(self, keys: list[str]) -> str:
        """The first of these names that has bytes; waits until one has. They stay.

        Raises
        ------
        RefusedError, JobError
        """
        request = self._request()
        self._send(Seek(request, keys))
        answer = self._answer(request, "a message from any client")
        assert isinstance(answer, Done)
        return answer.text

    def barrier(self) -> None:
        """Wait for all clients. Raises `JobError` if one is gone."""
        request = self._request()
        self._send(Barrier(request))
        self._answer(request, "all clients at a barrier")

    def close(self, *, leave: bool = True) -> None:
        """End, and tell the service so. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        if leave and self._error is None:
            with contextlib.suppress(OSError, StalledError):
                self.connection.send(Leave())
        self.connection.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.connection.close()
        for segment in list(self._held.values()):
            segment.close()
        self._held.clear()
        self._exchanges.clear()

    def _attach(self, size: int) -> tuple[int, Segment]:
        segment = Segment(size)
        with self._lock:
            number = self._segments
            self._segments += 1
            self._held[number] = segment
        descriptors = [segment.descriptor] if self.connection.is_shared else []
        self._send(Attach(number, size), descriptors=descriptors)
        return number, segment

    @contextlib.contextmanager
    def _mailbox(self, size: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """A segment of at least so many bytes, for one thread."""
        with self._lock:
            number, segment = self._mail.pop() if self._mail else (0, None)
        if segment is not None and segment.data.size < size:
            self._detach(number)
            segment = None
        if segment is None:
            number, segment = self._attach(max(MAIL_BYTES, 1 << max(0, size - 1).bit_length()))
        try:
            yield number, segment.data
        except RefusedError:
            self._mail.append((number, segment))
            raise
        self._mail.append((number, segment))  # after another error it may still be written to

    def _detach(self, number: int) -> None:
        """Give a segment back, here and at the service."""
        segment = self._held.pop(number, None)
        if segment is not None:
            segment.close()
            self._send(Detach(number))

    def _request(self) -> int:
        with self._lock:
            self._requests += 1
            return self._requests

    def _answer(self, request: int, what: str) -> Message:
        message: Message = self._await(lambda: self._answers.pop(request, None), what)
        if isinstance(message, Refused):
            raise _refusal(message)
        return message

    def _send(
        self,
        message: Message,
        payload: NDArray[np.uint8] | None = None,
        descriptors: list[int] | None = None,
    ) -> None:
        try:
            self.connection.send(message, payload, descriptors or [])
        except (OSError, StalledError) as error:
            if isinstance(error, OSError) and threading.current_thread() is not self._thread:
                self._thread.join(self.silence_s)  # what it said before it ended
            self._end(ServiceLostError(f"the service is gone: {error}"))
            raise self._failure() from error

    def _await(self, found: Callable[[], Any], what: str) -> Any:
        """Wait until `found` finds something.

        Raises
        ------
        JobError, HandshakeError : the job ended.
        """
        deadline = time.monotonic() + self.timeout_s
        with self._arrived:
            while not (result := found()):
                if self._error is not None:
                    raise self._failure()
                if self._closed:
                    raise JobError("the client was closed")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise JobError(f"waited {self.timeout_s} s for {what}")
                self._arrived.wait(left)
        return result

    def _failure(self) -> ServiceError:
        """A new error like the one that ended the job: each thread raises its own."""
        error = self._error
        if isinstance(error, JobError):
            return type(error)(str(error), error.ranks, error.devices)
        return HandshakeError(str(error))

    def _end(self, error: ServiceError) -> None:
        with self._arrived:
            if self._error is None:
                self._error = error
            self._arrived.notify_all()
        self.connection.end()

    def _read(self) -> None:
        """Take what the service sends, until the connection ends."""
        try:
            while True:
                self._take(self.connection.receive(self._landing, self._idle))
        except (FrameError, StalledError) as error:
            self._end(ServiceLostError(f"the service broke the protocol: {error}"))
        except EOFError:
            self._end(ServiceLostError("the service closed the connection"))
        except OSError as error:
            self._end(ServiceLostError(f"the service is gone: {error}"))
        except ServiceError as error:
            self._end(error)
        except Exception as error:
            self._end(ServiceLostError(f"what it said failed: {type(error).__name__}: {error}"))

    def _idle(self) -> None:
        """Say from time to time that this client is alive, and look whether the service is."""
        now = time.monotonic()
        if now - self.connection.heard > self.silence_s:
            raise ServiceLostError(f"the service was silent for {self.silence_s} s")
        first = self.silence_s / 4  # before the service said how often
        beat_s = min(1.0, first) if self._welcome is None else self._welcome.beat_s
        if now - self._last_beat > beat_s:
            self._last_beat = now
            with contextlib.suppress(OSError):  # found when the last frames have been received
                self.connection.send_if_free(Beat())

    def _landing(self, message: Message) -> NDArray[np.uint8] | None:
        if self.connection.is_shared:
            return None
        if isinstance(message, Summed):
            exchange = self._exchanges.get(message.exchange)
            if exchange is not None and message.shard < len(exchange.shards):
                return exchange.pulled_shard(message.shard).view(np.uint8)
        elif isinstance(message, Value):
            return self._getting.get(message.request)
        return None

    def _take(self, message: Message) -> None:
        with self._arrived:
            match message:
                case Welcome():
                    self._welcome = message
                case Opened():
                    self._opened.add(message.exchange)
                case Summed():
                    exchange = self._exchanges.get(message.exchange)
                    if exchange is not None:
                        exchange.summed[message.shard] = message.version
                case Refused(exchange=int(number)):
                    self._refused[number] = message
                case Stored() | Value() | Passed() | Done() | Refused(request=int()):
                    assert message.request is not None
                    self._answers[message.request] = message
                case Failed():
                    if message.kind == HandshakeError.__name__:
                        raise HandshakeError(message.detail)
                    kind = JOB_ERRORS.get(message.kind, JobError)
                    raise kind(message.detail, message.ranks, message.devices)
            self._arrived.notify_all()
        if time.monotonic() - self._last_beat > 1:
            self._idle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(leave=kind is None)


class Exchange:
    """A tensor that all clients of a job sum, as often as they like.

    Each client pushes every shard, in any order, and pulls it when it has been summed. The bits
    depend on the numbers of clients, devices and rings, the size of shards and the wire alone.

    Attributes
    ----------
    elements
    shards : elements [start, stop) of each.
    version : how often it was pushed.
    summed : version of each shard that has come back.
    """

    def __init__(
        self, client: Client, number: int, elements: int, segment_number: int, segment: Segment
    ) -> None:
        self.client = client
        self.number = number
        self.elements = elements
        self.segment_number = segment_number
        self.segment = segment
        self.version = 0
        self.shards = shards(elements, client.shard_bytes) if elements else []
        self.summed = [0] * len(self.shards)
        self.pushed: NDArray[np.float32] = segment.data[: 4 * elements].view(np.float32)
        start = half(elements)
        self.pulled: NDArray[np.float32] = segment.data[start : start + 4 * elements].view(
            np.float32
        )

    def pulled_shard(self, shard: int) -> NDArray[np.float32]:
        """Where a shard comes back."""
        start, stop = self.shards[shard]
        return self.pulled[start:stop]

    def begin(self) -> None:
        """The next version: all shards are to be pushed once."""
        self.version += 1

    def push(self, shard: int) -> None:
        """A shard is in `pushed`: tell the service.

        Raises
        ------
        JobError
        """
        start, stop = self.shards[shard]
        inline = not self.client.connection.is_shared
        data = self.pushed[start:stop].view(np.uint8) if inline else None
        nbytes = 0 if data is None else data.size
        self.client._send(Push(self.number, self.version, shard, nbytes), data)

    def ready(self, shard: int) -> bool:
        """Whether a shard of this version is in `pulled`."""
        return self.summed[shard] == self.version

    def wait(self, shard: int) -> None:
        """Wait until it is.

        Raises
        ------
        FullError : the queue at the proxy was full.
        JobError
        """
        client = self.client
        client._await(
            lambda: self.ready(shard) or client._refused.get(self.number),
            f"shard {shard} of exchange {self.number}",
        )
        refused = client._refused.pop(self.number, None)
        if refused is not None:
            raise _refusal(refused)

    def reduce(self, array: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Push an array, and pull what all clients' arrays are summed to.

        Parameters
        ----------
        array, out : float32, of `elements` elements, contiguous; they may be one.

        Raises
        ------
        ShapeError
        JobError : `out` is in part written.
        """
        for each in (array, out):
            if each.shape != (self.elements,) or each.dtype != np.float32:
                raise ShapeError("array", (self.elements,), each.shape)
        self.run(
            lambda start, stop: np.copyto(self.pushed[start:stop], array[start:stop]),
            lambda start, stop: np.copyto(out[start:stop], self.pulled[start:stop]),
        )

    def run(self, fill: Callable[[int, int], object], take: Callable[[int, int], object]) -> None:
        """One version, shard by shard: what has come back is taken while others are on their way.

        Parameters
        ----------
        fill : puts elements [start, stop) into `pushed`.
        take : takes them from `pulled`.
        """
        self.begin()
        taken = 0
        for shard, (start, stop) in enumerate(self.shards):
            fill(start, stop)
            self.push(shard)
            while taken < shard and self.ready(taken):
                take(*self.shards[taken])
                taken += 1
        for shard in range(taken, len(self.shards)):
            self.wait(shard)
            take(*self.shards[shard])
        self.client.copied_bytes += 8 * self.elements

    def close(self) -> None:
        """Give its memory back, here and, when all clients have, on the devices."""
        self.client._exchanges.pop(self.number, None)
        try:
            self.client._send(Close(self.number))
        finally:
            self.client._detach(self.segment_number)


def _refusal(message: Refused) -> RefusedError:
    return REFUSALS.get(message.kind, RefusedError)(message.kind, message.detail)
