"""A job: its clients, their exchanges, and the values that it stores in the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.service import errors, messages
from nearstep.coarse.service.device_exchange import DeviceExchange, Shard
from nearstep.coarse.service.key_value import KeyValueStore, hyper_of
from nearstep.coarse.service.session import Session
from nearstep.coarse.service.wire import MAX_MESSAGE_BYTES, check_message
from nearstep.coarse.stored import StoredParameters
from nearstep.errors import ArgumentError, NearstepError, OutOfDeviceMemoryError
from nearstep.storage.snapshot_file import Arrays


@dataclass(frozen=True)
class Loaded:
    """The contents of a file for a client, or the error."""

    request: int
    found: Arrays | Exception


UNREADABLE = (NearstepError, OSError, ValueError, KeyError, TypeError, RuntimeError)
"""Errors of paths, and of files of other formats."""

REFUSALS: Mapping[type, tuple[type[Exception], ...]] = {
    **dict.fromkeys((messages.Open, messages.Close, messages.Barrier), ()),
    **dict.fromkeys((messages.Missing, messages.Detach, messages.Leave), ()),
    **dict.fromkeys((messages.Save, messages.Load, Loaded), UNREADABLE),
    **dict.fromkeys((messages.Put, messages.Probe), (OutOfDeviceMemoryError,)),
    messages.Check: (ArgumentError,),
    messages.Get: (errors.UnlikeError,),
}
"""For each message that `TrainingJob.handle` accepts, the errors that refuse the request alone."""


class Turn(NamedTuple):
    """The current or last sum of a client: its number, and the exchange, if it is open."""

    number: int
    exchange: int | None


@dataclass(eq=False)
class TrainingJob:
    """Clients that synchronize with each other.

    Parameters
    ----------
    clients : number of clients.
    post : queues loaded contents; called from the thread that loaded them.
    snapshots : folder of all files; None: clients cannot save or load.

    Attributes
    ----------
    sessions : of the clients that have joined, by rank.
    """

    name: str
    clients: int
    pool: CoarsePool
    post: Callable[[Session, Loaded], None]
    snapshots: Path | None = None
    sessions: dict[int, Session] = field(default_factory=dict)
    began: bool = False
    _opening: dict[int, dict[int, messages.Open]] = field(default_factory=dict)
    _exchanges: dict[int, DeviceExchange] = field(default_factory=dict)
    _closing: dict[int, set[int]] = field(default_factory=dict)
    _values: KeyValueStore = field(init=False)
    _arrived: list[tuple[Session, messages.Barrier]] = field(default_factory=list)
    _gone: set[int] = field(default_factory=set)
    _turns: dict[int, Turn] = field(default_factory=dict)
    _waiting: dict[str, list[tuple[Session, messages.Get]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._values = KeyValueStore(self.pool, self.snapshots)

    def join(self, session: Session, shard_bytes: int, queue_shards: int, beat_s: float) -> None:
        """Add a client, or refuse it; welcome all when the last one has joined."""
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
            session.send(messages.Failed("HandshakeError", reason, [], []))
            return session.close()
        self.sessions[rank] = session
        if len(self.sessions) == self.clients:
            self.began = True
            device = self.pool.device
            says = device.url, self.pool.devices, shard_bytes, queue_shards, beat_s
            for each in self.sessions.values():
                each.send(messages.Welcome(*says, each.digest))
        return None

    def handle(self, session: Session, message: Any) -> None:
        """Call the method for a message; send the error of a refusal to the client."""
        try:
            getattr(self, type(message).__name__.lower())(session, message)
        except REFUSALS[type(message)] as error:
            session.send(_refused(message.request, error))

    def check_device(self, session: Session, device: int) -> None:
        """Raise `ClientLostError` if the client names a device that does not exist."""
        if device >= self.pool.devices:
            raise self._broken(session.rank, f"asked for device {device} of {self.pool.devices}")

    def open(self, session: Session, message: messages.Open) -> None:
        """Note that a client opens an exchange; make it when all clients have."""
        said = self._opening.setdefault(message.exchange, {})
        if session.rank in said or message.exchange in self._exchanges:
            raise self._broken(session.rank, f"opened exchange {message.exchange} twice")
        said[session.rank] = message
        self._check_turn(session.rank, message)
        self.check_gone()  # a client may have opened the exchange and left
        if len(said) < self.clients:
            return
        del self._opening[message.exchange]
        kinds: dict[str, list[int]] = {}
        for rank, each in sorted(said.items()):
            text = f"{each.operation} of {each.amount}, wire {each.wire}, "
            text += f"shards of {each.shard_bytes} bytes"
            if each.form != "fp32":
                text += f", in {each.form}"
            if each.addends:
                text += f", exact of {each.addends} addends each"
            if each.kind:
                text += f", {each.kind}"
            if each.update is not None:
                text += f", for {each.update.optimizer}({each.update.hyper}) of {each.update.key}"
            kinds.setdefault(text, []).append(rank)
        if len(kinds) > 1:
            texts = [f"clients {ranks}: {text}" for text, ranks in kinds.items()]
            return self._refuse_all(message.exchange, "UnlikeError", "; ".join(texts))
        if message.operation == "gather":
            unshared = [rank for rank, each in self.sessions.items() if not each.is_shared]
            if unshared:
                what = f"clients {sorted(unshared)} do not share memory with the service"
                return self._refuse_all(message.exchange, errors.UnsharedError.__name__, what)
        try:
            self.pool.check_wire(message.wire)
            if message.addends:
                addends = self.clients * message.addends
                self.pool.check_exact(message.operation, message.wire, addends)
            stored, kept = None, []
            if message.update is not None:
                stored = self._values.parameters(message.update, message.elements)
                kept = [f"{message.update.key}/{name}" for name in stored.tensors]
            made = DeviceExchange(self.pool, said, self.sessions, stored)
            self._exchanges[message.exchange] = made
        except OutOfDeviceMemoryError as error:
            return self._refuse_all(message.exchange, "DeviceMemoryError", str(error))
        except NearstepError as error:
            return self._refuse_all(message.exchange, "RefusedError", str(error))
        common, descriptors = 0, []
        if made.common is not None:
            common, descriptors = made.common.data.size, [made.common.descriptor]
        answer = messages.Opened(message.exchange, kept, common)
        for each_session in self.sessions.values():
            each_session.send(answer, descriptors=descriptors)
        if made.common is not None:
            made.common.close()
        return None

    def _refuse_all(self, exchange: int, kind: str, detail: str) -> None:
        for rank, turn in self._turns.items():
            if turn.exchange == exchange:  # the clients may open another one in this turn
                self._turns[rank] = turn._replace(exchange=None)
        for session in self.sessions.values():
            session.send(messages.Refused(None, exchange, kind, detail))

    def _broken(self, rank: int, what: str) -> errors.ClientLostError:
        return errors.ClientLostError(
            f"client {rank} of job {self.name!r} broke the protocol: it {what}", [rank]
        )

    def shard(self, session: Session, message: messages.Push) -> Shard:
        """Return the shard that a client pushes."""
        exchange = self._exchanges.get(message.exchange)
        if exchange is None or message.shard >= len(exchange.shards):
            what = f"pushed shard {message.shard} of exchange {message.exchange}"
            raise self._broken(session.rank, f"{what}, which does not exist")
        shard = exchange.shards[message.shard]
        if message.version != shard.version + 1 or session.rank in shard.pushed or shard.left:
            what = f"pushed version {message.version} of a shard that waits for"
            raise self._broken(session.rank, f"{what} version {shard.version + 1} once")
        if (holder := shard.room.holder) not in (None, shard):
            what = f"pushed shard {shard.number} in the place of shard {holder.number}"
            raise self._broken(session.rank, f"{what}, which was not returned")
        self._check_closed(exchange)
        self._check_turn(session.rank, message)
        if exchange.stored is not None:
            self._check_step(exchange.stored, shard, message)
        return shard

    def _check_turn(self, rank: int, message: messages.Open | messages.Push) -> None:
        """Check that clients that count their turns sum the same in each turn.

        Raises
        ------
        OrderError : another client sums a different exchange in this turn.
        """
        turn = Turn(message.turn, message.exchange)
        if not turn.number or turn == self._turns.get(rank):
            return
        self._turns[rank] = turn
        for other, its in self._turns.items():
            if its.number == turn.number and its.exchange not in (None, turn.exchange):
                raise errors.OrderError(
                    f"clients of job {self.name!r} must make the same sums in one order: client "
                    f"{other} makes sum {its.number} in {self._told(its)}, and client {rank} in "
                    f"{self._told(turn)}",
                    sorted((rank, other)),
                )

    def _told(self, turn: Turn) -> str:
        """Describe an exchange."""
        if turn.exchange is None:
            return "none"
        found = self._exchanges.get(turn.exchange)
        opened = found.opened if found is not None else self._opening.get(turn.exchange, {})
        first = next(iter(opened.values()), None)
        if first is None:
            return f"exchange {turn.exchange}"
        kind = f" of {first.kind}" if first.kind else ""
        return f"exchange {turn.exchange} ({first.operation} of {first.amount}{kind})"

    def _check_step(self, stored: StoredParameters, shard: Shard, message: messages.Push) -> None:
        """Note the step that the first client of a shard gives; check that others give the same.

        Raises
        ------
        JobError : the clients give different steps or hyper-parameters.
        """
        said = message.step, message.hyper
        if not shard.pushed:
            stored.check(message.step, hyper_of(message.hyper))
            shard.step, shard.hyper = said
        if said != (shard.step, shard.hyper):
            ranks = sorted(shard.pushed)
            raise errors.JobError(
                f"clients {ranks} of job {self.name!r} push step {shard.step} ({shard.hyper}), "
                f"and another step {message.step} ({message.hyper})"
            )

    def check(self, session: Session, message: messages.Check) -> None:
        """Answer whether a step can have these hyper-parameters."""
        exchange = self._exchanges.get(message.exchange)
        if exchange is None or exchange.stored is None:
            what = f"asked for a step of exchange {message.exchange}, which updates nothing"
            raise self._broken(session.rank, what)
        exchange.stored.check(message.step, hyper_of(message.hyper))
        session.send(messages.Done(message.request))

    def close(self, session: Session, message: messages.Close) -> None:
        """Note that a client closes an exchange; free its memory when all have."""
        if message.exchange not in self._exchanges:
            what = f"closed exchange {message.exchange}, which does not exist"
            raise self._broken(session.rank, what)
        ranks = self._closing.setdefault(message.exchange, set())
        ranks.add(session.rank)
        exchange = self._exchanges[message.exchange]
        if any(shard.left or shard.pushed for shard in exchange.shards):
            self._check_closed(exchange)
        if len(ranks) == self.clients:
            del self._closing[message.exchange]
            del self._exchanges[message.exchange]
            exchange.free()

    def _check_closed(self, exchange: DeviceExchange) -> None:
        """Raise `ClientLostError` if clients have closed an exchange that others push to."""
        ranks = sorted(self._closing.get(exchange.number, ()))
        if ranks:
            raise errors.ClientLostError(
                f"clients {ranks} have closed exchange {exchange.number}, which is being summed",
                ranks,
            )

    def put(self, session: Session, message: messages.Put) -> None:
        """Store bytes of a client, and send them to clients that wait for them."""
        self._values.put(message.key, session.memory(message, message.nbytes))
        session.send(messages.Done(message.request))
        for waiting, get in self._waiting.pop(message.key, []):
            self.handle(waiting, get)

    def probe(self, session: Session, message: messages.Probe) -> None:
        """Write a client's bytes to the memory of a device, and read them back."""
        data = session.memory(message, message.nbytes)
        nbytes = max(1, message.nbytes)
        buffer = self.pool.device.alloc(nbytes, np.uint8, channel=message.device)
        if message.nbytes:
            buffer.write(data)
            buffer.read(data)
        buffer.free()
        session.send(messages.Done(message.request, nbytes=session.inline(message.nbytes)), data)

    def save(self, session: Session, message: messages.Save) -> None:
        """Save stored values in a thread, which then answers the client."""
        self._check_no_step()

        def done(found: Path | NearstepError) -> None:
            if isinstance(found, Path):
                session.send(messages.Done(message.request, str(found)))
            else:
                session.send(_refused(message.request, found))

        self._values.save(message.path, message.keys, done)

    def _check_no_step(self) -> None:
        """Raise `ArgumentError` while only some shards of a step are updated."""
        for exchange in self._exchanges.values():
            if exchange.stored is not None and not exchange.is_between_versions:
                raise ArgumentError(
                    f"exchange {exchange.number} must be between two steps, not within one"
                )

    def load(self, session: Session, message: messages.Load) -> None:
        """Read a file in a thread, which then posts the contents."""
        self._values.load(
            message.path, lambda found: self.post(session, Loaded(message.request, found))
        )

    def loaded(self, session: Session, message: Loaded) -> None:
        """Store the contents of a file, unless the client cannot be sent their names and sizes."""
        self._check_no_step()
        if isinstance(message.found, Exception):
            raise message.found
        sizes = {key: each[0].nbytes for key, each in message.found.items()}
        check_message(answer := messages.Done(message.request, sizes=sizes), MAX_MESSAGE_BYTES)
        self._values.restore(message.found)
        session.send(answer)

    def get(self, session: Session, message: messages.Get) -> None:
        """Send bytes to a client, when they are stored."""
        if message.key not in self._values:
            return self._waiting.setdefault(message.key, []).append((session, message))
        nbytes = self._values.sizes[message.key]
        if message.nbytes != nbytes:
            detail = f"{message.key!r} has {nbytes} bytes, not {message.nbytes}"
            raise errors.UnlikeError(errors.UnlikeError.__name__, detail)
        out = session.memory(message, nbytes)
        self._values.read(message.key, session.rank % self.pool.devices, out)
        return session.send(messages.Done(message.request, nbytes=session.inline(nbytes)), out)

    def barrier(self, session: Session, message: messages.Barrier) -> None:
        """Answer all clients when each has reached the barrier."""
        self._arrived.append((session, message))
        first: dict[int, tuple[Session, messages.Barrier]] = {}
        for each in self._arrived:
            first.setdefault(each[0].rank, each)
        if len(first) == self.clients:
            for arrived in first.values():
                self._arrived.remove(arrived)
                arrived[0].send(messages.Done(arrived[1].request))

    def missing(self, session: Session, message: messages.Missing) -> None:
        """Answer a client whose wait has timed out with the ranks of the clients it waits for."""
        rank, ranks = session.rank, set(range(self.clients))
        missing = ranks - set(self.sessions) | self._gone
        for said in self._opening.values():
            if rank in said:
                missing |= ranks - set(said)
        for exchange in self._exchanges.values():
            for shard in exchange.shards:
                if rank in shard.pushed:
                    missing |= ranks - shard.pushed
        arrived = {each.rank for each, _ in self._arrived}
        if rank in arrived:
            missing |= ranks - arrived
        session.send(messages.Done(message.request, " ".join(map(str, sorted(missing)))))

    def detach(self, session: Session, message: messages.Detach) -> None:
        """Unmap a segment of a client."""
        session.detach(message)

    def leave(self, session: Session, message: messages.Leave) -> None:
        """Note that a client leaves without an error; clients that wait for it get one."""
        session.left = True
        self._gone.add(session.rank)

    def check_gone(self) -> None:
        """Raise `ClientLostError` if a client waits for clients that have left.

        That is: a client waits for all and one has left, or for a value and all others have left.
        """
        if not self._gone:
            return
        waits = bool(self._arrived or self._opening) or not self.began
        waits |= any(
            0 < len(shard.pushed) < self.clients
            for each in self._exchanges.values()
            for shard in each.shards
        )
        waits |= bool(self._waiting) and len(self._gone) >= self.clients - 1
        if waits:
            ranks = sorted(self._gone)
            raise errors.ClientLostError(
                f"clients {ranks} have left, and others wait for them", ranks
            )

    def part(self, session: Session) -> None:
        """Remove a client that left and has closed its connection."""
        self.sessions.pop(session.rank, None)
        session.close()

    def fail(self, error: errors.JobError) -> None:
        """Send the error of the job to all clients."""
        message = messages.Failed(
            type(error).__name__, str(error)[:8000], list(error.ranks), list(error.devices)
        )
        for session in self.sessions.values():
            session.send(message)

    def free(self) -> None:
        """Free the memory of the job, and end its connections."""
        for exchange in self._exchanges.values():
            exchange.free()
        self._exchanges.clear()
        self._values.free()
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()


def _refused(request: int, error: Exception) -> messages.Refused:
    if isinstance(error, errors.RefusedError):
        return messages.Refused(request, None, error.kind, error.detail)
    kind = errors.DeviceMemoryError if isinstance(error, OutOfDeviceMemoryError) else type(error)
    return messages.Refused(request, None, kind.__name__, str(error)[:8000])
