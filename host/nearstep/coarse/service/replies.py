"""A client's connection: requests, and the service's replies."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.service import errors, messages
from nearstep.coarse.service.shared_memory import SharedMemory
from nearstep.coarse.service.wire import (
    MAX_REQUEST_BYTES,
    SLICE_S,
    Address,
    Connection,
    check_message,
)

ANSWER_S = 5.0
"""Limit of the wait for the service's answer to `Missing`."""


@dataclass(eq=False)
class Sums:
    """The results of an exchange that have arrived.

    Attributes
    ----------
    places : destination of each shard's result.
    versions : last version of each shard that was received.
    kept : names of the parameters and states that the exchange updates.
    refused : refusal of the exchange or of a push, until it is raised.
    common : memory that all clients of a gather share.
    """

    places: list[NDArray[np.uint8]]
    versions: list[int] = field(init=False)
    opened: bool = False
    kept: tuple[str, ...] = ()
    refused: messages.Refused | None = None
    common: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        self.versions = [0] * len(self.places)


class Replies:
    """The client's end of a connection: one waiting thread at a time receives for all.

    A background thread sends signs of life, and receives while no other thread waits.

    Parameters
    ----------
    address : address of the service.
    timeout_s : limit of each wait, in seconds.
    silence_s : seconds without a sign of life after which the service counts as lost.

    Attributes
    ----------
    challenge : the service's challenge, once received.
    nearby : the service's Unix socket, if this client is on its machine.
    welcome : the service's settings, once all clients are connected.
    sums : results of each exchange, by its number.
    pushed : number of pushed shards that were not returned.

    Raises
    ------
    ServiceLostError : no service at the address.
    """

    def __init__(self, address: str, *, timeout_s: float, silence_s: float) -> None:
        self.timeout_s = timeout_s
        self.silence_s = silence_s
        self.challenge: messages.Challenge | None = None
        self.nearby: messages.Nearby | None = None
        self.welcome: messages.Welcome | None = None
        self.sums: dict[int, Sums] = {}
        self.pushed = 0
        self._arrived = threading.Condition()
        self._answers: dict[int, messages.Done | messages.Refused] = {}
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        self._error: errors.ServiceError | None = None
        self._requests = itertools.count(1)
        self._closed = False
        try:
            sock = Address(address).connect()
        except OSError as error:
            raise errors.ServiceLostError(f"no service at {address}: {error}") from error
        self.connection = Connection(sock, messages.FromService, silence_s)
        self.connection.meanwhile = self.poll
        self._reading = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="coarse client", daemon=True)
        self._thread.start()

    @property
    def is_shared(self) -> bool:
        """Whether payloads are in shared memory."""
        return self.connection.is_shared

    def send(
        self,
        message: messages.Message,
        payload: NDArray[np.uint8] | None = None,
        descriptors: list[int] | None = None,
    ) -> None:
        """Send a message, with its payload unless memory is shared."""
        try:
            self.connection.send(message, None if self.is_shared else payload, descriptors or [])
        except (OSError, errors.StalledError) as error:
            if isinstance(error, OSError):  # receive the service's last messages
                with contextlib.suppress(errors.ServiceError):
                    self._wait(lambda: False, self.silence_s)
            self._end(errors.ServiceLostError(f"the service is gone: {error}"))
            raise self._failure() from error

    @property
    def queue_shards(self) -> int:
        """Maximum number of pushed shards that were not returned."""
        return 0 if self.welcome is None else self.welcome.queue_shards

    def take_place(self) -> bool:
        """Count a shard to be pushed; return False if `queue_shards` shards were not returned."""
        with self._arrived:
            if self.pushed >= self.queue_shards:
                return False
            self.pushed += 1
            return True

    def ask(
        self,
        what: str,
        kind: Callable[..., messages.Message],
        *fields: Any,
        payload: NDArray[np.uint8] | None = None,
        into: NDArray[np.uint8] | None = None,
    ) -> messages.Done:
        """Send a request, and return the answer.

        Parameters
        ----------
        what : name, in errors, of what the client waits for.
        kind, fields : class of the request, and its fields after the number.
        into : destination of the answer's payload.

        Raises
        ------
        ArgumentError : the service would not accept the request, such as a long name.
        """
        request = next(self._requests)
        message = kind(request, *fields)
        check_message(message, MAX_REQUEST_BYTES)
        if into is not None:
            self._buffers[request] = into
        try:
            self.send(message, payload)
            return self.answer(request, what)
        finally:
            self._buffers.pop(request, None)

    def answer(self, request: int, what: str) -> messages.Done:
        """Wait for the answer to a request, and return it; raise the error of a refusal."""
        message: messages.Done | messages.Refused = self.wait(
            lambda: self._answers.pop(request, None), what
        )
        if isinstance(message, messages.Refused):
            raise errors.refusal(message.kind, message.detail)
        return message

    def wait(self, found: Callable[[], Any], what: str) -> Any:
        """Wait until `found` returns a true value, and return it.

        Raises
        ------
        JobError : the job ended, or the limit was exceeded; names the clients that are waited for.
        """
        result = self._wait(found, self.timeout_s)
        if result:
            return result
        request = next(self._requests)
        self.send(messages.Missing(request))
        said = self._wait(lambda: self._answers.pop(request, None), ANSWER_S)
        text = f"waited {self.timeout_s} s for {what}"
        if not isinstance(said, messages.Done):
            raise errors.JobError(f"{text}; the service does not answer")
        ranks = [int(each) for each in said.text.split()]
        missing = f"{text}; clients {ranks} are missing" if ranks else text
        raise errors.JobError(missing, ranks)

    def _wait(self, found: Callable[[], Any], seconds: float) -> Any:
        """Return the first true value of `found` within a time, or else its last value."""
        deadline = time.monotonic() + seconds
        with self._arrived:
            while not (result := found()):
                if self._error is not None:
                    raise self._failure()
                if self._closed:
                    raise errors.JobError("the client was closed")
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                if self._reading:
                    self._arrived.wait(left)
                else:
                    self._read(min(left, SLICE_S))
        return result

    def poll(self) -> None:
        """Receive available messages, unless another thread is receiving."""
        with self._arrived:
            if not self._reading and self._error is None:
                self._read(0.0)

    def _read(self, seconds: float) -> None:
        """Receive messages for at most `seconds`, as the only thread; the caller holds
        `_arrived`."""
        self._reading = True
        self._arrived.release()
        try:
            self._receive(seconds)
        except (errors.FrameError, errors.StalledError) as error:
            self._end(errors.ServiceLostError(f"the service broke the protocol: {error}"))
        except EOFError:
            self._end(errors.ServiceLostError("the service closed the connection"))
        except OSError as error:
            self._end(errors.ServiceLostError(f"the service is gone: {error}"))
        except errors.ServiceError as error:
            self._end(error)
        except Exception as error:
            self._end(
                errors.ServiceLostError(f"its message failed: {type(error).__name__}: {error}")
            )
        finally:
            self._arrived.acquire()
            self._reading = False
            self._arrived.notify_all()

    def _receive(self, seconds: float) -> None:
        """Handle available messages; wait at most `seconds` for the first one."""
        connection = self.connection
        message = connection.take(self._buffer_of) if connection.has_ahead else None
        if message is None and connection.await_input(seconds):
            message = connection.take(self._buffer_of)
        while message is not None:
            self._take(message)
            message = connection.take(self._buffer_of) if connection.has_ahead else None

    def close(self, *, leave: bool) -> None:
        """End the connection; with `leave`, send `Leave` first."""
        self._closed = True
        self._ended.set()
        if leave and self._error is None:
            with contextlib.suppress(OSError, errors.StalledError):
                self.connection.send(messages.Leave())
        self.connection.end()
        self._thread.join()
        with self._arrived:
            self._arrived.wait_for(lambda: not self._reading)
        self.connection.close()

    def _failure(self) -> errors.ServiceError:
        """Return a copy of the error that ended the job: each thread raises its own."""
        error = self._error
        if isinstance(error, errors.JobError):
            return type(error)(str(error), error.ranks, error.devices)
        return errors.HandshakeError(str(error))

    def _end(self, error: errors.ServiceError) -> None:
        with self._arrived:
            if self._error is None:
                self._error = error
            self._arrived.notify_all()
        self.connection.end()

    def _live(self) -> None:
        """Send signs of life, and check for those of the service, until the end."""
        try:
            while self._error is None and not self._ended.wait(self._beat_s / 2):
                now = time.monotonic()
                with contextlib.suppress(OSError):  # reported when the last frames are received
                    self.connection.send_if_free(messages.Beat())
                self.poll()
                if now - self.connection.heard > self.silence_s:
                    raise errors.ServiceLostError(f"the service was silent for {self.silence_s} s")
        except errors.ServiceError as error:
            self._end(error)

    @property
    def _beat_s(self) -> float:
        if self.welcome is not None:
            return self.welcome.beat_s
        return min(SLICE_S, self.silence_s / 4)  # the service's interval is not known yet

    def _buffer_of(self, message: messages.Message) -> NDArray[np.uint8] | None:
        if self.is_shared:
            return None
        if isinstance(message, messages.Summed):
            sums = self.sums.get(message.exchange)
            if sums is not None and message.shard < len(sums.places):
                return sums.places[message.shard]
        elif isinstance(message, messages.Done):
            return self._buffers.get(message.request)
        return None

    def _take(self, message: messages.Message) -> None:
        with self._arrived:
            match message:
                case messages.Challenge() | messages.Nearby() | messages.Welcome():
                    setattr(self, type(message).__name__.lower(), message)
                case messages.Opened():
                    if (sums := self.sums.get(message.exchange)) is not None:
                        sums.opened, sums.kept = True, tuple(message.kept)
                        if message.common:
                            descriptor = self.connection.take_descriptor()
                            sums.common = SharedMemory(message.common, descriptor).data
                case messages.Summed():
                    self.pushed -= 1
                    if message.exchange in self.sums:
                        self.sums[message.exchange].versions[message.shard] = message.version
                case messages.Refused(exchange=int(number)):
                    if number in self.sums:
                        self.sums[number].refused = message
                case messages.Done(request=int(number)) | messages.Refused(request=int(number)):
                    self._answers[number] = message
                case messages.Failed():
                    if message.kind == errors.HandshakeError.__name__:
                        raise errors.HandshakeError(message.detail)
                    kind = errors.named(errors.JobError, message.kind)
                    raise kind(message.detail, message.ranks, message.devices)
            self._arrived.notify_all()
