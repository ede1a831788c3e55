"""Proxies: what decides when a tensor that clients push is summed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from nearstep.coarse.policies import (
    Policy,
    QueueState,
    deadlock,
    first_come_first_served,
    queue_per_client,
    waits,
)
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
    pool
    tensors : in the order of the program; a tensor is known by its number in it.
    clients : any number, more than devices, too.
    scheduler : policy of `nearstep.coarse.policies`. `queues`: a proxy has a queue for each client,
        and a tensor is summed as soon as it is at the head of a queue at every proxy. `fcfs`: a
        proxy takes the tensor that came first and waits until it has been summed. Proxies can then
        wait for each other for ever: this is there to show that, and that it is detected.
    op, wire : as in `CoarsePool.submit`.

    Attributes
    ----------
    summed : tensors that have been summed, in the order in which they ended.

    Raises
    ------
    ArgumentError : there is no such scheduler, clients are not a whole number from 1 on, or a
        tensor cannot be used or is there twice.

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
        self._returned = 0
        self._last = [-1] * clients
        self._pushed: set[tuple[int, int]] = set()
        applied, policy = SCHEDULERS[scheduler]
        self._scheduler = applied(pool, self.tensors, policy, op, wire)

    def push(self, client: int, proxy: int, tensor: int) -> None:
        """A client pushes a tensor, by its number, to a proxy.

        Raises
        ------
        PushOrderError : the client pushed a later tensor of the program before.
        PushedTwiceError : the proxy has got that tensor from a client.
        ArgumentError : there is no such client, proxy or tensor.
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
        max_cycles : bound of the time without progress, in device cycles (steps, without a clock).
            None: enough for all tensors if each beat took 64 cycles.

        Returns
        -------
        tuple[int, ...] : tensors that have been summed and that no call has returned yet, in the
            order in which they ended. What was not pushed to every proxy, or is behind such a
            tensor, stays for the next call.

        Raises
        ------
        DeadlockError : proxies wait for each other. The jobs are still there: `CoarsePool.reset`
            makes the pool usable again, and the proxies are to be made anew.
        RingTimeoutError, RingError, ResetNeededError, BusyError, ClosedDeviceError : as
            `CoarsePool.all_reduce`.
        """
        check_bound(max_cycles)
        if max_cycles is None:
            beats = sum(-(-tensor.nbytes // 64) for tensor in self.tensors)
            max_cycles = IDLE_CYCLES + 2 * SLOWEST_CYCLES_PER_BEAT * beats
        for tensor in self._scheduler.run(max_cycles):
            self.summed.append(tensor)
        found = tuple(self.summed[self._returned :])
        self._returned = len(self.summed)
        return found


@dataclass(eq=False)
class Scheduler(ABC):
    """Applies a policy: what it chooses is given to the devices, and summed.

    Parameters
    ----------
    pool
    tensors
    policy
    op, wire

    Attributes
    ----------
    state : what the policy is a function of.
    events : of tensors that are being summed.
    """

    pool: CoarsePool
    tensors: Sequence[PoolTensor]
    policy: Policy
    op: str
    wire: str
    state: QueueState = field(init=False)
    events: dict[int, Event] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.state = QueueState.empty(self.pool.devices)
        self.pool.check_wire(self.wire)
        self.pool.check_operation(self.op)

    def group(self, tensor: int) -> int:
        """Ring of a tensor: all proxies must choose the same."""
        return tensor % self.pool.groups

    def arrive(self, client: int, proxy: int, tensor: int) -> None:
        """A tensor has come to a proxy."""
        self.state = self.state.arrive(client, proxy, tensor)

    @abstractmethod
    def run(self, max_cycles: int) -> Iterator[int]:
        """Sum what can be summed; tensors as they end."""


class CollectiveScheduler(Scheduler):
    """Of a policy that chooses the same for all proxies: a tensor starts on all devices at once, as
    a reduction of the pool."""

    def run(self, max_cycles: int) -> Iterator[int]:
        events = self.events
        while True:
            error = self._start()
            if not events:
                if error is not None:
                    raise error
                return
            ended = [number for number, event in events.items() if event.ended]
            if not ended:
                next(iter(events.values())).wait(max_cycles)
            for number in ended:
                for proxy in self.state.proxies:
                    self.state = self.state.complete(proxy, number)
                events.pop(number).wait(max_cycles)
                yield number

    def _start(self) -> NearstepError | None:
        """Start what the policy chooses, while there is space; or why a tensor cannot start."""
        while chosen := self.policy(self.state)[0]:
            for tensor in chosen:
                try:
                    event = self.pool.submit(
                        self.tensors[tensor], self.op, self.wire, group=self.group(tensor)
                    )
                except NearstepError as error:
                    return error
                self.events[tensor] = event
                for proxy in self.state.proxies:
                    self.state = self.state.start(proxy, tensor)
        return None


@dataclass(eq=False)
class IndependentScheduler(Scheduler):
    """Of a policy under which each proxy starts a tensor on its own device, whatever others do.

    A job is in the queue of a device from there on, and in no other device's before their proxies
    start the tensor. Each proxy has one tensor under way at a time.
    """

    _ended: set[int] = field(init=False, default_factory=set)

    def run(self, max_cycles: int) -> Iterator[int]:
        rings = self.pool.rings
        while True:
            self._start()
            progress, ended = self._complete()
            yield from ended
            if progress:
                continue
            circle = deadlock(self.state)
            if not circle and all(waits(self.state).values()):
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

    def _start(self) -> None:
        """Start what the policy chooses."""
        rings = self.pool.rings
        rings.check_ready()
        for proxy, chosen in enumerate(self.policy(self.state)):
            for tensor in chosen:
                rings.check_space([self.group(tensor)])
                if tensor not in self.events:
                    self.events[tensor] = self.pool.prepare(
                        self.tensors[tensor], self.op, self.wire, group=self.group(tensor)
                    )
                self.state = self.state.start(proxy, tensor)
                rings.push(self._job(tensor), proxy)

    def _job(self, tensor: int) -> RingJob:
        """The only job of a tensor that a proxy has started."""
        return self.events[tensor].jobs[0]

    def _complete(self) -> tuple[bool, list[int]]:
        """Find out what devices have completed.

        Whether there was something, and tensors that all devices have completed.
        """
        completed = [
            each
            for each in self.state.under_way
            if self.pool.rings.completed_on(self._job(each.tensor), each.proxy)
        ]
        for proxy, tensor in completed:
            self.state = self.state.complete(proxy, tensor)
        tensors = {each.tensor for each in completed} - self._ended
        ended = [tensor for tensor in sorted(tensors) if self.events[tensor].done]
        self._ended.update(ended)
        return bool(completed), ended

    def _polls(self) -> list[Poll]:
        rings = self.pool.rings
        polls = rings.error_polls()
        for proxy, tensor in self.state.under_way:
            polls += rings.completed_polls(self._job(tensor), proxy)
        return polls

    def _waits(self) -> tuple[Waiting, ...]:
        tensors = dict(self.state.under_way)
        found = []
        for device, absent in sorted(waits(self.state).items()):
            peers = {
                peer: f"with tensor {tensors[peer]}" if peer in tensors else "idle"
                for peer in absent
            }
            found.append(Waiting(device, f"tensor {tensors[device]}", peers))
        return tuple(found)

    def _expired(
        self, circle: tuple[int, ...], max_cycles: int, error: WaitTimeoutError
    ) -> RingTimeoutError:
        what = "proxies to be done with a tensor"
        options = {"unit": error.unit, "transactions": error.transactions}
        if circle:
            return DeadlockError(circle, what, max_cycles, self._waits(), **options)
        return RingTimeoutError(what, max_cycles, self._waits(), unit=error.unit)


SCHEDULERS: Mapping[str, tuple[type[Scheduler], Policy]] = {
    "queues": (CollectiveScheduler, queue_per_client),
    "fcfs": (IndependentScheduler, first_come_first_served),
}
