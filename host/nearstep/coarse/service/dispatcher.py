"""The dispatcher of the service: one thread runs the devices and handles the clients' requests."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nearstep.coarse.errors import QueueFullError, RingError, SilentLinkError
from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.rings import SLICE_CYCLES, Pending
from nearstep.coarse.service.device_exchange import DeviceExchange
from nearstep.coarse.service.errors import (
    ClientLostError,
    DeviceLostError,
    FrameError,
    JobError,
    ProxyDeadlockError,
)
from nearstep.coarse.service.job import REQUESTS, Loaded, TrainingJob
from nearstep.coarse.service.messages import (
    Get,
    Hello,
    Leave,
    Message,
    Missing,
    Open,
    Probe,
    Push,
    Put,
    Save,
    Summed,
)
from nearstep.coarse.service.order import ArrivalOrder
from nearstep.coarse.service.plan import Job
from nearstep.coarse.service.session import Session, Shard
from nearstep.coarse.service.sockets import Disconnected
from nearstep.coarse.stored import AllOf
from nearstep.errors import NearstepError, WaitTimeoutError

LOG = logging.getLogger(__name__)

Scheduling = Literal["queues", "fcfs"]

IDLE_S = 0.2
LOOK_S = 0.05
"""Seconds between checks for silent clients."""

BEFORE = (Leave, Missing)
"""Messages of a client before all clients of the job have joined."""

OF_A_DEVICE = (Open, Probe)
OF_VALUES = (Put, Get, Save, Loaded)
JOBS_A_RING = 2
"""Jobs submitted to a ring: one runs, the next one waits."""


class Event(NamedTuple):
    """A message of a client, or the end of its connection."""

    session: Session
    message: Message | Disconnected | Loaded


class Pushed(NamedTuple):
    """A shard that clients push."""

    job: TrainingJob
    exchange: DeviceExchange
    shard: int


@dataclass(eq=False)
class Task:
    """A job of the rings, or an update by the kernels of all devices, for a shard."""

    owner: TrainingJob
    exchange: DeviceExchange
    shard: Shard
    job: Job | None = None
    pending: Pending | AllOf | None = None
    slices: int = 0


class Dispatcher:
    """Handles the requests of the clients of all jobs, in one thread.

    Parameters
    ----------
    pool : used by the dispatcher's thread alone from `start` on.
    shard_bytes : least size of shards, unless the clients choose.
    queue_shards : most shards that a client has pushed and not got back.
    beat_s : seconds between signs of life.
    silence_s : seconds without one after which a client is lost.
    scheduler : `queues`: a shard is summed as soon as all its clients have pushed it. `fcfs`: a
        proxy serves the shard that arrived first until it has been summed; a deadlock of proxies
        ends the jobs whose shards they hold.
    snapshots : folder of all files; None: clients cannot save or load.

    Attributes
    ----------
    jobs : jobs by name.
    """

    def __init__(
        self,
        pool: CoarsePool,
        *,
        shard_bytes: int,
        queue_shards: int,
        beat_s: float,
        silence_s: float,
        scheduler: Scheduling = "queues",
        snapshots: Path | None = None,
    ) -> None:
        self.pool = pool
        self.snapshots = snapshots
        self._order: ArrivalOrder[Pushed] | None
        self._order = ArrivalOrder(pool.devices) if scheduler == "fcfs" else None
        self.shard_bytes = shard_bytes
        self.queue_shards = queue_shards
        self.beat_s = beat_s
        self.silence_s = silence_s
        self.jobs: dict[str, TrainingJob] = {}
        self._inbox: deque[Event] = deque()
        self._ready: deque[Task] = deque()
        self._running: list[Task] = []
        self._updates: deque[Task] = deque()
        self._failing: list[tuple[TrainingJob, JobError]] = []
        self._stopping = False
        self._turn: Callable[[float], None] = time.sleep
        self._wake: Callable[[], None] = lambda: None
        self._looked = 0.0
        self._thread = threading.Thread(target=self._run, name="coarse dispatcher", daemon=True)

    def start(self, turn: Callable[[float], None], wake: Callable[[], None]) -> None:
        """Start the thread.

        Parameters
        ----------
        turn : posts the clients' messages; waits at most so many seconds for one.
        wake : ends that wait.
        """
        self._turn, self._wake = turn, wake
        self._thread.start()

    def post(self, session: Session, message: Message | Disconnected | Loaded) -> None:
        """Queue a message; called within a turn."""
        self._inbox.append(Event(session, message))

    def post_from_thread(self, session: Session, message: Loaded) -> None:
        """Queue a message; called from any thread."""
        self.post(session, message)
        self._wake()

    def stop(self) -> None:
        """End all jobs and the thread."""
        self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._take()
                self._advance()
                self._end_failing()
            except Exception as error:
                self._end_all(error)
        for job in list(self.jobs.values()):
            self._failing.append((job, JobError("the service was stopped")))
        self._end_failing()

    def _end_all(self, error: Exception) -> None:
        """End all jobs after an error of the service itself, so that no client waits."""
        LOG.error("the service failed", exc_info=error)
        failure = JobError(f"the service failed: {type(error).__name__}: {error}")
        for job in list(self.jobs.values()):
            try:
                self._end(job, failure)
            except Exception as other:
                LOG.error("job %s could not be ended", job.name, exc_info=other)
                for session in list(job.sessions.values()):
                    session.close()
                self.jobs.pop(job.name, None)
        self._ready.clear()
        self._running.clear()
        self._updates.clear()
        self._failing.clear()
        if self._order is not None:
            self._order = ArrivalOrder(self.pool.devices)

    def _take(self) -> None:
        """Handle the queued messages; wait for one if there is nothing to do.

        Messages that arrive meanwhile are handled after the devices' next turn.
        """
        busy = self._running or self._ready or self._updates or self._inbox
        self._turn(0.0 if busy else IDLE_S)
        for _ in range(len(self._inbox)):
            self._carry_out(*self._inbox.popleft())
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        for job in self.jobs.values():
            for rank, session in job.sessions.items():
                silent = now - session.connection.heard
                if silent <= self.silence_s:
                    continue
                if session.left:
                    session.connection.end()
                else:
                    self._lose(job, rank, f"was silent for {silent:.1f} s")

    def _carry_out(self, session: Session, message: Message | Disconnected | Loaded) -> None:
        job = self.jobs.get(session.job)
        if isinstance(message, Hello):
            self._join(session)
            return
        if job is None or job.sessions.get(session.rank) is not session:
            return session.close()  # its job has ended
        if isinstance(message, Disconnected):
            if not session.left:
                return self._lose(job, session.rank, message.reason)
            job.part(session)
            if not job.sessions:
                self._end(job)
            return None
        return self._try(job, (session.rank,), self._dispatch, job, session, message)

    def _try(
        self, job: TrainingJob, ranks: Sequence[int], action: Callable[..., object], *given: Any
    ) -> None:
        """Act for clients of these ranks: an error ends this job alone, unless devices fail."""
        try:
            action(*given)
        except JobError as error:
            self._failing.append((job, error))
        except FrameError as error:
            self._lose(job, ranks[0], f"broke the protocol: {error}")
        except RingError as error:
            self._device_failed(error)
        except QueueFullError:  # the caller tries again later
            raise
        except Exception as error:
            if not isinstance(error, NearstepError):
                LOG.error("job %s failed", job.name, exc_info=error)
            said = f"{type(error).__name__}: {error}"
            self._failing.append((job, JobError(said[:8000], ranks)))

    def _dispatch(self, job: TrainingJob, session: Session, message: Message | Loaded) -> None:
        if not job.began and not isinstance(message, BEFORE):
            raise FrameError("nothing before all clients are there", type(message).__name__)
        if isinstance(message, OF_A_DEVICE):
            job.check_device(session, message.device)
        if isinstance(message, OF_VALUES):
            self._settle()
        if isinstance(message, Push):
            self._push(job, session, message)
        elif isinstance(message, REQUESTS):  # `Session.note` has handled the others
            getattr(job, type(message).__name__.lower())(session, message)
        job.check_gone()

    def _join(self, session: Session) -> None:
        name = session.job
        job = self.jobs.get(name)
        if job is None:
            post = self.post_from_thread
            job = TrainingJob(name, session.clients, self.pool, post, self.snapshots)
            self.jobs[name] = job
        job.join(session, self.shard_bytes, self.queue_shards, self.beat_s)
        if not job.sessions:
            self._forget(job)

    def _push(self, job: TrainingJob, session: Session, message: Push) -> None:
        if session.queued >= self.queue_shards:
            return job.refuse_push(session, message, self.queue_shards)
        exchange, shard = job.shard(session, message)
        session.queued += 1
        exchange.push(session.rank, shard)
        if self._order is None:
            if len(shard.pushed) == len(exchange.sessions):
                self._sum(Pushed(job, exchange, shard.number))
            return None
        pushed = Pushed(job, exchange, shard.number)
        self._go_on(self._order, self._order.push(pushed, session.rank, exchange.places))
        return None

    def _sum(self, pushed: Pushed) -> None:
        """Begin with a shard that all clients have pushed, unless it has begun."""
        shard = pushed.exchange.shards[pushed.shard]
        if not shard.left:
            shard.pushed.clear()
            self._begin(pushed.job, pushed.exchange, shard)

    def _go_on(self, order: ArrivalOrder[Pushed], ready: Sequence[Pushed]) -> None:
        """Sum shards that their proxies have taken; end the jobs of a deadlock of proxies."""
        for each in ready:
            self._sum(each)
        circle, held = order.deadlock()
        if not circle:
            return
        says = ", ".join(
            f"that of device {proxy} has shard {each.shard} of exchange {each.exchange.number} of "
            f"job {each.job.name!r}"
            for proxy, each in zip(circle, held, strict=True)
        )
        error = ProxyDeadlockError(
            f"proxies wait for each other, each for the next one to take its shard: {says}",
            devices=circle,
        )
        self._failing += [(job, error) for job in dict.fromkeys(each.job for each in held)]

    def _settle(self) -> None:
        """Wait for the running update, which may write stored values."""
        # `_look_at_update` finds the error of an update, which is not this client's.
        if self._updates and self._updates[0].pending is not None:
            with contextlib.suppress(NearstepError):
                self._updates[0].pending.wait()

    def _begin(self, owner: TrainingJob, exchange: DeviceExchange, shard: Shard) -> None:
        """Queue the jobs of the stage of a shard, or its update after the last stage."""
        if shard.stage == len(exchange.stages):
            shard.left = 1
            self._updates.append(Task(owner, exchange, shard))
            return
        stage = exchange.stages[shard.stage]
        shard.left = len(stage)
        self._ready.extend(Task(owner, exchange, shard, job) for job in stage)

    def _advance(self) -> None:
        """Submit jobs while the queues have space, and let the devices run for a while."""
        while self._ready and len(self._running) < JOBS_A_RING * self.pool.groups:
            task = self._ready[0]
            try:
                self._try(task.owner, (), self._start, task)
            except QueueFullError:
                break
            if self._ready:  # empty after a failure of the devices
                self._ready.popleft()
        if self._updates and self._updates[0].pending is None:
            first = self._updates[0]
            self._try(first.owner, (), self._start, first)
        if not self._running and not (self._updates and self._updates[0].pending):
            return
        try:
            self._wait()
            self.pool.rings.look()
            for task in list(self._running):
                self._look(task)
            self._look_at_update()
        except NearstepError as error:
            self._device_failed(error)

    def _start(self, task: Task) -> None:
        """Submit a job or an update to the devices."""
        if task.job is None:
            task.pending = task.exchange.update(task.shard)
        else:
            task.pending = task.exchange.submit(task.shard, task.job)
            self._running.append(task)

    def _wait(self) -> None:
        """Let the devices run until a task has ended, or for a while."""
        updates = [each for each in self._updates if each.pending is not None]
        under_way: list[Task] = [*self._running[:1], *updates]
        pending = [each.pending for each in under_way if each.pending is not None]
        if any(isinstance(each, AllOf) and each.ended for each in pending):
            return
        try:
            polls = [poll for each in pending for poll in each.polls]
            self.pool.rings.wait_any(polls, SLICE_CYCLES)
        except WaitTimeoutError:
            for task, each in zip(under_way, pending, strict=True):
                task.slices += 1
                if each.bound is not None and task.slices * SLICE_CYCLES > each.bound:
                    raise

    def _look(self, task: Task) -> None:
        """Go on with the shard of a job that has ended."""
        pending = task.pending
        if not isinstance(pending, Pending) or not pending.found_ended:
            return
        if pending.error is not None:
            raise pending.error
        self._running.remove(task)
        shard, exchange = task.shard, task.exchange
        shard.left -= 1
        if shard.left:
            return
        shard.stage += 1
        if shard.stage < len(exchange.stages) or exchange.stored is not None:
            self._begin(task.owner, exchange, shard)
        else:
            self._complete(task.owner, exchange, shard)

    def _look_at_update(self) -> None:
        """Complete the shard of an update that has ended."""
        if not self._updates or (pending := self._updates[0].pending) is None or not pending.ended:
            return
        if pending.error is not None:
            raise pending.error
        task = self._updates.popleft()
        task.shard.left = 0
        self._complete(task.owner, task.exchange, task.shard)

    def _complete(self, owner: TrainingJob, exchange: DeviceExchange, shard: Shard) -> None:
        """Send the result of a shard to the clients."""
        exchange.complete(shard)
        if self._order is not None:
            done = Pushed(owner, exchange, shard.number)
            self._go_on(self._order, self._order.complete(done))
        for rank, session in exchange.sessions.items():
            session.queued -= 1
            self._try(owner, (rank,), self._give, exchange, session, shard)

    def _give(self, exchange: DeviceExchange, session: Session, shard: Shard) -> None:
        data = exchange.pull(session.rank, shard)
        inline = session.inline(data.size)
        session.send(Summed(exchange.number, shard.version, shard.number, inline), data)

    def _lose(self, job: TrainingJob, rank: int, reason: str) -> None:
        error = ClientLostError(f"client {rank} of job {job.name!r} is gone: it {reason}", [rank])
        self._failing.append((job, error))

    def _device_failed(self, error: NearstepError) -> None:
        """End the jobs of all clients with tasks on the devices, and reset the pool."""
        device = getattr(error, "device", None)
        if isinstance(error, SilentLinkError):
            device = error.peer
        failed = {task.owner for task in (*self._running, *self._ready)}
        failed |= {task.owner for task in self._updates}
        lost = DeviceLostError(
            f"the memory devices failed: {type(error).__name__}: {str(error).splitlines()[0]}",
            devices=[] if device is None else [device],
        )
        self._failing += [(job, lost) for job in failed]
        self._running.clear()
        self._ready.clear()
        updates, self._updates = self._updates, deque()
        try:
            for task in updates:
                if task.pending is not None:
                    task.pending.abort()
            self.pool.reset()
        except NearstepError:
            self.pool.device.reset()
            self.pool.reset()

    def _end_failing(self) -> None:
        """End the jobs of clients that failed."""
        while self._failing:
            job, error = self._failing.pop(0)
            if self.jobs.get(job.name) is not job:
                continue
            self._end(job, error)

    def _end(self, job: TrainingJob, error: JobError | None = None) -> None:
        """End a job, after its tasks on the devices."""
        self._drain(job)
        if error is not None:
            job.fail(error)
        self._forget(job)

    def _drain(self, job: TrainingJob) -> None:
        """Wait for the tasks of a job, which read and write the clients' memory."""
        self._ready = deque(each for each in self._ready if each.owner is not job)
        all_tasks: list[Task] = [*self._running, *self._updates]
        mine = [task for task in all_tasks if task.owner is job and task.pending is not None]
        self._running = [task for task in self._running if task.owner is not job]
        self._updates = deque(task for task in self._updates if task.owner is not job)
        try:
            for task in mine:
                assert task.pending is not None
                task.pending.wait()
        except NearstepError as error:
            self._device_failed(error)

    def _forget(self, job: TrainingJob) -> None:
        if self.jobs.get(job.name) is job:
            del self.jobs[job.name]
        if self._order is not None:
            self._go_on(self._order, self._order.drop(lambda each: each.job is job))
        job.free()
