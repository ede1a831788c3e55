"""Proxies: what decides when a tensor that clients push is summed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from nearstep.backends.base import Poll
from nearstep.coarse.errors import (
    DeadlockError,
    JobMismatchError,
    PushedTwiceError,
    PushOrderError,
    RingTimeoutError,
    Waiting,
)
from nearstep.coarse.event import Event
from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.rings import IDLE_CYCLES, SLOWEST_CYCLES_PER_BEAT, RingJob
from nearstep.coarse.tensor import PoolTensor
from nearstep.errors import ArgumentError, NearstepError, WaitTimeoutError
from nearstep.run import check_bound
from nearstep.scalars import is_whole


class Proxies:
    """Tensors of a program that clients push to proxies, one proxy on each device.

    A tensor is summed when every proxy has it. Each client pushes tensors in the order of the
    program, each of them to any proxies; with several clients they arrive at a proxy in any order.

    Parameters
    ----------
    pool: CoarsePool
    tensors: Sequence[PoolTensor]
        In the order of the program; a tensor is known by its number in it.
    clients: int
        Any number, more than devices, too.
    scheduler: str
        ``queues``: a proxy has a queue for each client, and a tensor is summed as soon as it is at
        the head of a queue at every proxy. ``fcfs``: a proxy takes the tensor that came first and
        waits until it has been summed. Proxies can then wait for each other for ever: this is
        there to show that, and that it is found out.
    op, wire: str
        As in :meth:`CoarsePool.submit`.

    Attributes
    ----------
    summed: list[int]
        Tensors that have been summed, in the order in which they ended.

    Raises
    ------
    ArgumentError

    Ref: COARSE paper, section III-F and figure 10.
    """

    def __init__(
        self,
        pool: CoarsePool,
        tensors: Sequence[PoolTensor],
        clients: int,
        *,
        scheduler: Literal["queues", "fcfs"] = "queues",
        op: str = "sum",
        wire: str = "fp32",
    ) -> None:
        if not isinstance(scheduler, str) or scheduler not in SCHEDULERS:
            raise ArgumentError(
                f"scheduler must be one of {', '.join(SCHEDULERS)}, not {scheduler!r}"
            )
        if not is_whole(clients) or clients < 1:
            raise ArgumentError(f"clients must be a whole number, at least 1, not {clients!r}")
        tensors = pool.check_tensors(tensors)
        if len(set(map(id, tensors))) != len(tensors):
            raise ArgumentError("tensors of a program must be different")
        self.pool = pool
        self.tensors = tensors
        self.clients = clients
        self.summed: list[int] = []
        self._told = 0
        self._last = [-1] * clients
        self._pushed: set[tuple[int, int]] = set()
        self._scheduler = SCHEDULERS[scheduler](pool, self.tensors, clients, op, wire)

    def push(self, client: int, proxy: int, tensor: int) -> None:
        """A client pushes a tensor, by its number, to a proxy.

        Raises
        ------
        PushOrderError
            The client pushed a later tensor of the program before.
        PushedTwiceError
            The proxy has got that tensor from a client.
        ArgumentError
            There is no such client, proxy or tensor.
        """
        names = {"client": (client, self.clients), "proxy": (proxy, self.pool.devices)}
        for what, (value, limit) in {**names, "tensor": (tensor, len(self.tensors))}.items():
            if not is_whole(value) or not 0 <= value < limit:
                raise ArgumentError(f"{what} must be from 0 to {limit - 1}, not {value!r}")
        if tensor < self._last[client]:
            raise PushOrderError(client, tensor, self._last[client])
        if (proxy, tensor) in self._pushed:
            raise PushedTwiceError(proxy, tensor)
        self._last[client] = tensor
        self._pushed.add((proxy, tensor))
        self._scheduler.arrive(client, proxy, tensor)

    def run(self, max_cycles: int | None = None) -> tuple[int, ...]:
        """Sum what can be summed of the tensors that were pushed to every proxy.

        Parameters
        ----------
        max_cycles: int, optional
            Bound of the time without progress, in device cycles (steps, without a clock). None:
            enough for all tensors if each beat took 64 cycles.

        Returns
        -------
        tuple[int, ...]
            Tensors that have been summed and that no call has returned yet, in the order in which
            they ended. What was not pushed to every proxy, or is behind such a tensor, stays for
            the next call.

        Raises
        ------
        DeadlockError
            Proxies wait for each other. The jobs are still there: :meth:`CoarsePool.reset` makes
            the pool usable again, and the proxies are to be made anew.
        RingTimeoutError, RingError, ResetNeededError, BusyError, ClosedDeviceError
            As :meth:`CoarsePool.all_reduce`.
        """
        check_bound(max_cycles)
        if max_cycles is None:
            beats = sum(-(-tensor.nbytes // 64) for tensor in self.tensors)
            max_cycles = IDLE_CYCLES + 2 * SLOWEST_CYCLES_PER_BEAT * beats
        for tensor in self._scheduler.run(max_cycles):
            self.summed.append(tensor)
        found = tuple(self.summed[self._told :])
        self._told = len(self.summed)
        return found


class Scheduler(ABC):
    """Order in which tensors that arrive at proxies are summed.

    Parameters
    ----------
    pool: CoarsePool
    tensors: Sequence[PoolTensor]
    clients: int
    op, wire: str
    """

    def __init__(
        self,
        pool: CoarsePool,
        tensors: Sequence[PoolTensor],
        clients: int,
        op: str,
        wire: str,
    ) -> None:
        self.pool = pool
        self.tensors = tensors
        self.clients = clients
        self.op = op
        self.wire = wire
        pool.check_wire(wire)
        pool.check_operation(op)

    def group(self, tensor: int) -> int:
        """Ring of a tensor: all proxies must choose the same."""
        return tensor % self.pool.groups

    @abstractmethod
    def arrive(self, client: int, proxy: int, tensor: int) -> None:
        """A tensor has come to a proxy."""

    @abstractmethod
    def run(self, max_cycles: int) -> Iterator[int]:
        """Sum what can be summed; tensors as they end."""


class QueueScheduler(Scheduler):
    """A queue for each client at each proxy; all their heads are candidates.

    There is no deadlock: of the tensors that every proxy has got and that are not summed, take the
    first of the program. What is before it in a queue came earlier in the program; if every proxy
    has got that, too, it has been summed.
    """

    def __init__(
        self, pool: CoarsePool, tensors: Sequence[PoolTensor], clients: int, op: str, wire: str
    ) -> None:
        super().__init__(pool, tensors, clients, op, wire)
        self.queues: list[list[deque[int]]] = [
            [deque() for _ in range(clients)] for _ in range(pool.devices)
        ]
        self.in_work: dict[int, Event] = {}

    def arrive(self, client: int, proxy: int, tensor: int) -> None:
        self.queues[proxy][client].append(tensor)

    def run(self, max_cycles: int) -> Iterator[int]:
        in_work = self.in_work
        while True:
            error = self._begin()
            if not in_work:
                if error is not None:
                    raise error
                return
            ended = [number for number, event in in_work.items() if event.ended]
            if not ended:
                next(iter(in_work.values())).wait(max_cycles)
            for number in ended:
                in_work.pop(number).wait(max_cycles)
                yield number

    def _begin(self) -> NearstepError | None:
        """Begin with all tensors that are at the head everywhere, while there is space; or why one
        cannot begin."""
        while ready := self._ready():
            for tensor in ready:
                try:
                    event = self.pool.submit(
                        self.tensors[tensor], self.op, self.wire, group=self.group(tensor)
                    )
                except NearstepError as error:
                    return error
                self.in_work[tensor] = event
                for queues in self.queues:
                    next(queue for queue in queues if queue and queue[0] == tensor).popleft()
        return None

    def _ready(self) -> list[int]:
        heads = [{queue[0] for queue in queues if queue} for queues in self.queues]
        return sorted(set.intersection(*heads))


class FcfsScheduler(Scheduler):
    """First come, first served: a proxy is busy with the tensor that came first until it is done.

    Its job is in the queue of the proxy's device all that time, and in no other device's before
    their proxies come to it.
    """

    def __init__(
        self, pool: CoarsePool, tensors: Sequence[PoolTensor], clients: int, op: str, wire: str
    ) -> None:
        super().__init__(pool, tensors, clients, op, wire)
        self.waiting: list[deque[int]] = [deque() for _ in range(pool.devices)]
        self.current: dict[int, int] = {}
        self.events: dict[int, Event] = {}
        self._ended: set[int] = set()

    def arrive(self, client: int, proxy: int, tensor: int) -> None:
        self.waiting[proxy].append(tensor)

    def run(self, max_cycles: int) -> Iterator[int]:
        rings = self.pool.rings
        while True:
            self._take()
            left, ended = self._leave()
            yield from ended
            if left:
                continue
            circle = self._circle()
            moving = any(not self._absent(tensor) for tensor in self.current.values())
            if not circle and not moving:
                return  # nothing to do before further pushes
            try:
                rings.wait_any(self._polls(), max_cycles)
            except WaitTimeoutError as error:
                raise self._expired(circle, max_cycles, error) from None
            failure = rings.look_for_errors()
            if isinstance(failure, JobMismatchError) and circle:
                # Their tensors have the same ring: the devices find out before the time is over.
                raise DeadlockError(
                    circle,
                    "proxies with different jobs",
                    max_cycles,
                    self._waits(),
                    transactions=failure.transactions,
                ) from failure
            if failure is not None:
                rings.look()
                raise failure

    def _take(self) -> None:
        """Idle proxies take the first tensor that came."""
        rings = self.pool.rings
        rings.check_ready()
        for device, queue in enumerate(self.waiting):
            if device in self.current or not queue:
                continue
            tensor = queue[0]
            rings.check_space([self.group(tensor)])
            if tensor not in self.events:
                self.events[tensor] = self.pool.prepare(
                    self.tensors[tensor], self.op, self.wire, group=self.group(tensor)
                )
            self.current[device] = queue.popleft()
            rings.push(self.job(tensor), device)

    def job(self, tensor: int) -> RingJob:
        """The only job of a tensor that a proxy has taken."""
        return self.events[tensor].jobs[0]

    def _leave(self) -> tuple[bool, list[int]]:
        """Proxies whose tensor has been summed are idle again.

        Whether there was one, and tensors that all proxies are done with.
        """
        left = [
            device
            for device, tensor in self.current.items()
            if self.pool.rings.completed_on(self.job(tensor), device)
        ]
        tensors = {self.current.pop(device) for device in left} - self._ended
        ended = [tensor for tensor in sorted(tensors) if self.events[tensor].done]
        self._ended.update(ended)
        return bool(left), ended

    def _polls(self) -> list[Poll]:
        rings = self.pool.rings
        polls = rings.error_polls()
        for device, tensor in self.current.items():
            polls += rings.completed_polls(self.job(tensor), device)
        return polls

    def _absent(self, tensor: int) -> list[int]:
        """Proxies that have not come to a tensor."""
        return [d for d in range(self.pool.devices) if d not in self.job(tensor).targets]

    def _circle(self) -> tuple[int, ...]:
        """Devices of which each waits for the next, and the last for the first; or none.

        A proxy waits for all that have not come to its tensor; those of them that wait themselves
        have another one, so two are a circle.
        """
        blocked = {d: self._absent(tensor) for d, tensor in self.current.items()}
        for device, absent in blocked.items():
            for peer in absent:
                if device in blocked.get(peer, ()):
                    return (device, peer)
        return ()

    def _waits(self) -> tuple[Waiting, ...]:
        found = []
        for device, tensor in sorted(self.current.items()):
            peers = {
                peer: f"with tensor {self.current[peer]}" if peer in self.current else "idle"
                for peer in self._absent(tensor)
            }
            found.append(Waiting(device, f"tensor {tensor}", peers))
        return tuple(found)

    def _expired(
        self, circle: tuple[int, ...], max_cycles: int, error: WaitTimeoutError
    ) -> RingTimeoutError:
        what = "proxies to be done with a tensor"
        options = {"unit": error.unit, "transactions": error.transactions}
        if circle:
            return DeadlockError(circle, what, max_cycles, self._waits(), **options)
        return RingTimeoutError(what, max_cycles, self._waits(), unit=error.unit)


SCHEDULERS: Mapping[str, type[Scheduler]] = {"queues": QueueScheduler, "fcfs": FcfsScheduler}
