"""A job of clients: who belongs to it, what it has open, and what it keeps in the devices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nearstep.buffer import Buffer
from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.service.errors import FullError, JobError
from nearstep.coarse.service.exchange import Exchange, Identities
from nearstep.coarse.service.messages import (
    Barrier,
    Close,
    Done,
    Failed,
    Get,
    Open,
    Opened,
    Passed,
    Push,
    Put,
    Refused,
    Seek,
    Stored,
    Value,
    Welcome,
)
from nearstep.coarse.service.session import Session, Shard
from nearstep.errors import NearstepError, OutOfDeviceMemoryError


@dataclass(eq=False)
class Kept:
    """Bytes in the memory of a device.

    Attributes
    ----------
    buffer
    readers : that have not read them yet.
    """

    buffer: Buffer
    readers: int


@dataclass(eq=False)
class Waiting:
    """A client that waits for a value."""

    session: Session
    get: Get


@dataclass(eq=False)
class TrainingJob:
    """Clients that synchronize with each other.

    Parameters
    ----------
    name
    clients : that belong to it.
    pool

    Attributes
    ----------
    sessions : of those that are there, by rank.
    """

    name: str
    clients: int
    pool: CoarsePool
    sessions: dict[int, Session] = field(default_factory=dict)
    began: bool = False
    _opening: dict[int, dict[int, Open]] = field(default_factory=dict)
    _exchanges: dict[int, Exchange] = field(default_factory=dict)
    _refused: set[int] = field(default_factory=set)
    _closing: dict[int, set[int]] = field(default_factory=dict)
    _kept: dict[str, Kept] = field(default_factory=dict)
    _waiting: dict[str, list[Waiting]] = field(default_factory=dict)
    _seeking: list[tuple[Session, Seek]] = field(default_factory=list)
    _arrived: list[tuple[Session, Barrier]] = field(default_factory=list)
    _gone: set[int] = field(default_factory=set)

    def join(self, session: Session, shard_bytes: int, beat_s: float) -> None:
        """Take a client in, or tell it why not; when all are there they begin."""
        rank = session.rank
        reason = None
        if session.clients != self.clients:
            reason = f"job {self.name!r} has {self.clients} clients, not {session.clients}"
        elif not 0 <= rank < self.clients:
            reason = f"rank must be from 0 to {self.clients - 1}, not {rank}"
        elif rank in self.sessions:
            reason = f"job {self.name!r} has a client {rank}"
        elif self.began:
            reason = f"job {self.name!r} has begun"
        if reason is not None:
            session.send(Failed("HandshakeError", reason, [], []))
            return session.close()
        self.sessions[rank] = session
        if len(self.sessions) == self.clients:
            self.began = True
            welcome = Welcome(self.pool.device.url, self.pool.devices, shard_bytes, beat_s)
            for each in self.sessions.values():
                each.send(welcome)
        return None

    def open(
        self, session: Session, message: Open, shard_bytes: int, identities: Identities
    ) -> None:
        """A client opens an exchange; when all have, it is made."""
        said = self._opening.setdefault(message.exchange, {})
        said[session.rank] = message
        if len(said) < self.clients:
            return
        del self._opening[message.exchange]
        kinds: dict[tuple[int, str, str], list[int]] = {}
        for rank, each in sorted(said.items()):
            kinds.setdefault((each.elements, each.operation, each.wire), []).append(rank)
        if len(kinds) > 1:
            texts = [
                f"clients {ranks}: {operation} of {elements} elements, wire {wire}"
                for (elements, operation, wire), ranks in kinds.items()
            ]
            return self._refuse_all(message.exchange, "UnlikeError", "; ".join(texts))
        try:
            self.pool.check_wire(message.wire)
            self._exchanges[message.exchange] = Exchange(
                self.pool, said, self.sessions, shard_bytes, identities
            )
        except OutOfDeviceMemoryError as error:
            return self._refuse_all(message.exchange, "DeviceMemoryError", str(error))
        except NearstepError as error:
            return self._refuse_all(message.exchange, "RefusedError", str(error))
        for each_session in self.sessions.values():
            each_session.send(Opened(message.exchange))
        return None

    def _refuse_all(self, exchange: int, kind: str, detail: str) -> None:
        self._refused.add(exchange)
        for session in self.sessions.values():
            session.send(Refused(None, exchange, kind, detail))

    def shard(self, session: Session, message: Push) -> tuple[Exchange, Shard] | None:
        """The shard that a client pushes, and its exchange; None if that was refused.

        Raises
        ------
        JobError : there is none, it is another version's turn, or it was pushed before.
        """
        exchange = self._exchanges.get(message.exchange)
        if exchange is None or message.shard >= len(exchange.shards):
            raise JobError(
                f"client {session.rank} pushed shard {message.shard} of exchange "
                f"{message.exchange}, which is not there",
                [session.rank],
            )
        shard = exchange.shards[message.shard]
        if message.version != shard.version + 1 or session.rank in shard.pushed or shard.left:
            raise JobError(
                f"client {session.rank} pushed version {message.version} of a shard that waits "
                f"for version {shard.version + 1}",
                [session.rank],
            )
        return exchange, shard

    def refuse_push(self, session: Session, message: Push, places: int) -> None:
        """A client's queue is full."""
        detail = f"all {places} places of the queue of client {session.rank} are taken"
        session.send(Refused(None, message.exchange, FullError.__name__, detail))

    def close(self, session: Session, message: Close) -> None:
        """A client needs an exchange no more; when none does, its memory is free."""
        ranks = self._closing.setdefault(message.exchange, set())
        ranks.add(session.rank)
        if len(ranks) == self.clients:
            del self._closing[message.exchange]
            exchange = self._exchanges.pop(message.exchange, None)
            if exchange is not None:
                exchange.free()

    def put(self, session: Session, message: Put) -> None:
        """Bytes of a client go to the memory of its device."""
        data = session.segment(message.segment).data[: message.nbytes]
        device = session.rank % self.pool.devices
        old = self._kept.get(message.key)
        if old is not None and old.readers:
            raise JobError(f"{message.key!r} was put twice", [session.rank])
        try:
            buffer = self.pool.device.alloc(max(1, message.nbytes), np.uint8, channel=device)
        except OutOfDeviceMemoryError as error:
            session.send(Refused(message.request, None, "DeviceMemoryError", str(error)))
            return
        if message.nbytes:
            buffer.write(data)
        if old is not None:
            old.buffer.free()
        self._kept[message.key] = Kept(buffer, message.readers)
        session.send(Stored(message.request))
        for waiting in self._waiting.pop(message.key, []):
            self.get(waiting.session, waiting.get)
        seeking, self._seeking = self._seeking, []
        for seeker, seek in seeking:
            self.seek(seeker, seek)

    def get(self, session: Session, message: Get) -> None:
        """Bytes go to a client, when they are there."""
        kept = self._kept.get(message.key)
        if kept is None:
            self._waiting.setdefault(message.key, []).append(Waiting(session, message))
            return
        if max(1, message.nbytes) != len(kept.buffer):
            detail = f"{message.key!r} has {len(kept.buffer)} bytes, not {message.nbytes}"
            session.send(Refused(message.request, None, "UnlikeError", detail))
            return
        out = session.segment(message.segment).data[: message.nbytes]
        if message.nbytes:
            kept.buffer.read(out)
        inline = 0 if session.connection.is_shared else message.nbytes
        session.send(Value(message.request, inline), out if inline else None)
        if kept.readers:
            kept.readers -= 1
            if not kept.readers:
                del self._kept[message.key]
                kept.buffer.free()

    def seek(self, session: Session, message: Seek) -> None:
        """A client learns which of several values is there, when one is."""
        found = next((key for key in message.keys if key in self._kept), None)
        if found is None:
            self._seeking.append((session, message))
        else:
            session.send(Done(message.request, found))

    def barrier(self, session: Session, message: Barrier) -> None:
        """A client waits for all others."""
        self._arrived.append((session, message))
        if len(self._arrived) == self.clients:
            for each, request in self._arrived:
                each.send(Passed(request.request))
            self._arrived.clear()

    def leave(self, session: Session) -> None:
        """A client ends well. What others still want of it they will not get.

        Raises
        ------
        JobError : somebody waits for it.
        """
        self._gone.add(session.rank)
        self.check_gone()

    def check_gone(self) -> None:
        """Raise `JobError` if somebody waits for all, and one has left."""
        waits = bool(self._arrived or self._opening)
        waits |= any(shard.pushed for each in self._exchanges.values() for shard in each.shards)
        if self._gone and waits:
            ranks = sorted(self._gone)
            raise JobError(f"clients {ranks} have left, and others wait for them", ranks)

    def part(self, session: Session) -> None:
        """A client that left has closed its connection."""
        self.sessions.pop(session.rank, None)
        session.close()

    def fail(self, error: JobError) -> None:
        """Tell all clients what the job ended with."""
        message = Failed(
            type(error).__name__, str(error)[:8000], list(error.ranks), list(error.devices)
        )
        for session in self.sessions.values():
            session.send(message)

    def free(self) -> None:
        """Give back what the job has, and end its connections."""
        for exchange in self._exchanges.values():
            exchange.free()
        self._exchanges.clear()
        for kept in self._kept.values():
            kept.buffer.free()
        self._kept.clear()
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()
