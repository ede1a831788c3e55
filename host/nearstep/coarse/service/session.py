"""The service's state of one client, and of the shards on the devices."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.routing import SHARD_ALIGNMENT
from nearstep.coarse.service import messages
from nearstep.coarse.service.errors import FrameError
from nearstep.coarse.service.plan import Layout
from nearstep.coarse.service.shared_memory import PAGE_BYTES, SharedMemory
from nearstep.coarse.service.wire import Connection

MAX_SEGMENTS = 4096
MAX_SHARDS = 1 << 17
"""Maximum number of shards of a tensor."""


class Session:
    """The service's state of a client.

    `Sockets` reads messages, checks them with `note` and finds their payloads' places; the thread
    of `Dispatcher` handles them.

    Parameters
    ----------
    digest : the service's proof that it knows the token.

    Attributes
    ----------
    segments : the client's memory, by number.
    queued : number of pushed shards whose result was not sent back.
    left : whether the client has sent `Leave`.
    """

    def __init__(self, connection: Connection, hello: messages.Hello, digest: bytes) -> None:
        self.connection = connection
        self.hello = hello
        self.digest = digest
        self.job, self.rank, self.clients = hello.job, hello.rank, hello.clients
        self.segments: dict[int, SharedMemory] = {}
        self.queued = 0
        self.left = False
        self._opened: dict[int, tuple[messages.Open, Layout]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def note(self, message: messages.Message) -> None:
        """Check a message when it is read, and record segments and exchanges.

        Raises
        ------
        FrameError : a second handshake, an invalid segment or number of shards, or stray
            descriptors.
        """
        if isinstance(message, messages.Hello | messages.Proof | messages.Stay):
            raise FrameError("one handshake", "another one")
        if isinstance(message, messages.Attach):
            if message.segment in self.segments:
                raise FrameError("a new segment", f"segment {message.segment} again")
            if len(self.segments) >= MAX_SEGMENTS:
                raise FrameError(f"at most {MAX_SEGMENTS} segments", "one more")
            shared = self.connection.is_shared
            descriptor = self.connection.take_descriptor() if shared else None
            segment = SharedMemory(message.size, descriptor)
            segment.close()
            with self._lock:
                if not self._closed:  # the job may have ended meanwhile
                    self.segments[message.segment] = segment
        elif isinstance(message, messages.Open):
            if message.shard_bytes % SHARD_ALIGNMENT:
                raise FrameError(
                    f"shards of multiples of {SHARD_ALIGNMENT} bytes", f"{message.shard_bytes}"
                )
            if 4 * message.elements > MAX_SHARDS * message.shard_bytes:
                raise FrameError(
                    f"at most {MAX_SHARDS} shards",
                    f"{message.elements} elements in shards of {message.shard_bytes} bytes",
                )
            layout = Layout.opened(message, self.clients)
            self.memory(message, layout.nbytes)
            if not self.connection.is_shared:
                self._opened[message.exchange] = message, layout
        elif isinstance(message, messages.Close):
            self._opened.pop(message.exchange, None)
        elif isinstance(message, messages.Access | messages.Probe):
            self.memory(message, message.nbytes)
        self.connection.check_descriptors()

    def buffer_of(self, message: messages.Message) -> NDArray[np.uint8] | None:
        """Return the destination of a message's payload; None with shared memory.

        Raises
        ------
        FrameError : the payload has another size than the shard.
        """
        if self.connection.is_shared:
            return None
        if isinstance(message, messages.Push):
            opened, layout = self._opened.get(message.exchange, (None, None))
            if opened is not None and layout is not None and message.shard < len(layout.shards):
                memory = self.memory(opened, layout.nbytes)
                place = layout.payload(memory, message.shard)
                if message.nbytes != place.size:
                    raise FrameError(f"a shard of {place.size} bytes", f"{message.nbytes}")
                return place
        elif isinstance(message, messages.Put | messages.Probe):
            return self.memory(message, message.nbytes)
        return None

    def memory(self, message: messages.Located, nbytes: int) -> NDArray[np.uint8]:
        """Return the `nbytes` bytes of the client's memory that a message names.

        Raises
        ------
        FrameError : no such segment, the segment is too small, or the offset is not that of a page.
        """
        segment = self.segments.get(message.segment)
        if segment is None:
            raise FrameError("a segment that was attached", f"segment {message.segment}")
        if message.offset % PAGE_BYTES or message.offset + nbytes > segment.data.size:
            raise FrameError(
                f"{nbytes} bytes at a page of segment {message.segment} of {segment.data.size}",
                f"some at {message.offset}",
            )
        return segment.data[message.offset : message.offset + nbytes]

    def detach(self, message: messages.Detach) -> None:
        """Drop a segment."""
        with self._lock:
            self.segments.pop(message.segment, None)

    @property
    def is_shared(self) -> bool:
        """Whether the client shares memory with the service."""
        return self.connection.is_shared

    def inline(self, nbytes: int) -> int:
        """Return the size of a message's payload: 0 where memory is shared."""
        return 0 if self.connection.is_shared else nbytes

    def send(
        self,
        message: messages.Message,
        payload: NDArray[np.uint8] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Queue a message, with its payload unless memory is shared; does not wait.

        A lost client is detected when its connection is read.
        """
        data = None if self.connection.is_shared else payload
        self.connection.post(message, data, descriptors)

    def close(self) -> None:
        """End the connection once all posts have been sent, and drop the segments."""
        self.connection.finish()
        with self._lock:
            self._closed = True
            self.segments.clear()
