"""Bytes that clients of a job leave for each other in the memory of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearstep.buffer import Buffer
from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.service.errors import FrameError
from nearstep.coarse.service.messages import Done, Get, Put, Refused, Seek, Stored, Value
from nearstep.coarse.service.session import Session
from nearstep.errors import OutOfDeviceMemoryError


@dataclass(eq=False)
class Left:
    """Bytes in the memory of a device.

    Attributes
    ----------
    buffer
    readers : that have not read them yet.
    """

    buffer: Buffer
    readers: int


@dataclass(eq=False)
class Lacking:
    """Bytes that the memory of a device has no place for.

    Attributes
    ----------
    readers : that have not been told.
    detail : how much there was.
    """

    readers: int
    detail: str


@dataclass(eq=False)
class Waiting:
    """A client that waits for bytes."""

    session: Session
    get: Get


class Mail:
    """What clients have left, and who waits for it.

    Parameters
    ----------
    pool
    """

    def __init__(self, pool: CoarsePool) -> None:
        self.pool = pool
        self._left: dict[str, Left] = {}
        self._lacking: dict[str, Lacking] = {}
        self._waiting: dict[str, list[Waiting]] = {}
        self._seeking: list[tuple[Session, Seek]] = []

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for bytes."""
        return bool(self._waiting)

    def put(self, session: Session, message: Put, data: NDArray[np.uint8]) -> None:
        """Bytes of a client go to the memory of a device.

        If that has no place for them, their readers get the same answer as the client: there will
        be none.

        Raises
        ------
        FrameError : there are some of that name.
        """
        self._lacking.pop(message.key, None)
        if message.key in self._left:
            raise FrameError("a name once", f"put of {message.key!r} twice")
        try:
            buffer = self.pool.device.alloc(
                max(1, message.nbytes), np.uint8, channel=message.device
            )
        except OutOfDeviceMemoryError as error:
            session.send(Refused(message.request, None, "DeviceMemoryError", str(error)))
            self._lacking[message.key] = Lacking(message.readers, str(error))
        else:
            if message.nbytes:
                buffer.write(data)
            self._left[message.key] = Left(buffer, message.readers)
            session.send(Stored(message.request))
        for waiting in self.waiting_for(message.key):
            self.get(waiting.session, waiting.get)
        seeking, self._seeking = self._seeking, []
        for seeker, seek in seeking:
            self.seek(seeker, seek)

    def waiting_for(self, key: str) -> Sequence[Waiting]:
        """Who waits for bytes of a name; they do no more."""
        return self._waiting.pop(key, [])

    def get(self, session: Session, message: Get) -> None:
        """Bytes go to a client, when they are there."""
        if (lacking := self._lacking.get(message.key)) is not None:
            lacking.readers -= 1
            if not lacking.readers:
                del self._lacking[message.key]
            refusal = Refused(message.request, None, "DeviceMemoryError", lacking.detail)
            return session.send(refusal)
        left = self._left.get(message.key)
        if left is None:
            self._waiting.setdefault(message.key, []).append(Waiting(session, message))
            return None
        if max(1, message.nbytes) != len(left.buffer):
            detail = f"{message.key!r} has {len(left.buffer)} bytes, not {message.nbytes}"
            return session.send(Refused(message.request, None, "UnlikeError", detail))
        out = session.memory(message, message.nbytes)
        if message.nbytes:
            left.buffer.read(out)
        session.send(Value(message.request, session.inline(message.nbytes)), out)
        left.readers -= 1
        if not left.readers:
            del self._left[message.key]
            left.buffer.free()
        return None

    def seek(self, session: Session, message: Seek) -> None:
        """A client learns which of several names has bytes, or is known to get none."""
        known = (key for key in message.keys if key in self._left or key in self._lacking)
        found = next(known, None)
        if found is None:
            self._seeking.append((session, message))
        else:
            session.send(Done(message.request, found))

    def free(self) -> None:
        """Give the memory back."""
        for left in self._left.values():
            left.buffer.free()
        self._left.clear()
        self._lacking.clear()
