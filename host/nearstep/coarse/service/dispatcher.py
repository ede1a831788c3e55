"""The dispatcher of the service: one thread runs the devices and handles the clients' requests."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nearstep.coarse.errors import QueueFullError, RingError, SilentLinkError
from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.rings import SLICE_CYCLES, Pending
from nearstep.coarse.service import errors, messages
from nearstep.coarse.service.device_exchange import Shard
from nearstep.coarse.service.job import REFUSALS, Loaded, TrainingJob
from nearstep.coarse.service.order import ArrivalOrder
from nearstep.coarse.service.plan import Job
from nearstep.coarse.service.session import Session
from nearstep.coarse.service.sockets import Disconnected
from nearstep.coarse.stored import AllOf
from nearstep.errors import NearstepError, WaitTimeoutError

LOG = logging.getLogger(__name__)

Scheduling = Literal["queues", "fcfs"]
Input = messages.Message | Disconnected | Loaded
"""Input from a client: a message, the end of its connection, or the contents of a file."""

IDLE_S = 0.2
LOOK_S = 0.05
"""Seconds between checks for silent clients."""

BEFORE = (messages.Leave, messages.Missing)
"""Messages allowed before all clients of the job have joined."""

OF_A_DEVICE = (messages.Open, messages.Probe)
OF_VALUES = (messages.Put, messages.Get, messages.Save, Loaded)
JOBS_A_RING = 2
"""Jobs submitted to a ring: one runs, the next one waits."""


@dataclass(eq=False)
class Task:
    """A job of the rings for a shard, or, without a job, an update by the kernels of all devices.

    Attributes
    ----------
    pending : the work on the devices, once submitted.
    """

    shard: Shard
    job: Job | None = None
    pending: Pending | AllOf = field(init=False)
    slices: int = 0


class Dispatcher:
    """Handles the requests of the clients of all jobs, in one thread.

    Parameters
    ----------
    pool : used by the dispatcher's thread alone from `start` on.
    scheduler : `queues`: a shard is summed as soon as all its clients have pushed it. `fcfs`: a
        proxy serves the shard that arrived first until it has been summed; a deadlock of proxies
        ends the jobs whose shards they hold.
    shard_bytes, queue_shards, beat_s, silence_s, snapshots : as of `Server`.

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
        scheduler: Scheduling,
        snapshots: Path | None,
    ) -> None:
        self.pool = pool
        self.snapshots = snapshots
        self._order: ArrivalOrder[Shard] | None
        self._order = ArrivalOrder(pool.devices) if scheduler == "fcfs" else None
        self.shard_bytes = shard_bytes
        self.queue_shards = queue_shards
        self.beat_s = beat_s
        self.silence_s = silence_s
        self.jobs: dict[str, TrainingJob] = {}
        self._inbox: deque[tuple[Session, Input]] = deque()
        self._ready: deque[Task] = deque()  # jobs of the rings
        self._updates: deque[Task] = deque()
        self._running: list[Task] = []  # with one update at most
        self._failing: list[tuple[TrainingJob, errors.JobError]] = []
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

    def post(self, session: Session, message: Input) -> None:
        """Queue a message; called within a turn."""
        self._inbox.append((session, message))

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
            self._failing.append((job, errors.JobError("the service was stopped")))
        self._end_failing()

    def _end_all(self, error: Exception) -> None:
        """End all jobs after an error of the service itself, so that no client waits."""
        LOG.error("the service failed", exc_info=error)
        failure = errors.JobError(f"the service failed: {type(error).__name__}: {error}")
        for job in list(self.jobs.values()):
            try:
                self._end(job, failure)
            except Exception as other:
                LOG.error("job %s could not be ended", job.name, exc_info=other)
                for session in list(job.sessions.values()):
                    session.close()
                self.jobs.pop(job.name, None)
        for queue in (self._running, self._ready, self._updates, self._failing):
            queue.clear()
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

    def _carry_out(self, session: Session, message: Input) -> None:
        job = self.jobs.get(session.job)
        if isinstance(message, messages.Hello):
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
        except errors.JobError as error:
            self._failing.append((job, error))
        except errors.FrameError as error:
            self._lose(job, ranks[0], f"broke the protocol: {error}")
        except RingError as error:
            self._device_failed(error)
        except QueueFullError:  # the caller tries again later
            raise
        except Exception as error:
            if not isinstance(error, NearstepError):
                LOG.error("job %s failed", job.name, exc_info=error)
            said = f"{type(error).__name__}: {error}"
            self._failing.append((job, errors.JobError(said[:8000], ranks)))

    def _dispatch(self, job: TrainingJob, session: Session, message: Input) -> None:
        if not job.began and not isinstance(message, BEFORE):
            raise errors.FrameError("nothing before all clients are there", type(message).__name__)
        if isinstance(message, OF_A_DEVICE):
            job.check_device(session, message.device)
        if isinstance(message, OF_VALUES):
            self._wait_for_update()
        if isinstance(message, messages.Push):
            self._push(job, session, message)
        elif type(message) in REFUSALS:  # `Session.note` has handled the others
            job.handle(session, message)
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

    def _push(self, job: TrainingJob, session: Session, message: messages.Push) -> None:
        if session.queued >= self.queue_shards:
            queue = f"all {self.queue_shards} places of the queue of client {session.rank}"
            detail = f"{queue} are taken"
            return session.send(messages.Refused(None, message.exchange, "FullError", detail))
        shard = job.shard(session, message)
        session.queued += 1
        shard.exchange.push(session.rank, shard)
        if shard.exchange.common is not None:
            if len(shard.pushed) == len(shard.exchange.sessions):
                shard.pushed.clear()
                self._complete(shard)
            return None
        if self._order is not None:
            places = shard.exchange.places
            return self._sum_ready(self._order, self._order.push(shard, session.rank, places))
        if len(shard.pushed) == len(shard.exchange.sessions):
            self._sum(shard)
        return None

    def _sum(self, shard: Shard) -> None:
        """Begin to sum a shard that all clients have pushed, unless its sum has begun."""
        if not shard.left:
            shard.pushed.clear()
            self._begin(shard)

    def _sum_ready(self, order: ArrivalOrder[Shard], ready: Sequence[Shard]) -> None:
        """Sum shards that their proxies have taken; end the jobs of a deadlock of proxies."""
        for each in ready:
            self._sum(each)
        circle, held = order.deadlock()
        if not circle:
            return
        says = ", ".join(
            f"that of device {proxy} has shard {each.number} of exchange {each.exchange.number} of "
            f"job {each.exchange.job!r}"
            for proxy, each in zip(circle, held, strict=True)
        )
        error = errors.ProxyDeadlockError(
            f"proxies wait for each other, each for the next one to take its shard: {says}",
            devices=circle,
        )
        self._failing += [(job, error) for job in dict.fromkeys(map(self._owner, held))]

    def _owner(self, shard: Shard) -> TrainingJob:
        return self.jobs[shard.exchange.job]

    def _wait_for_update(self) -> None:
        """Wait for the running update, which may write stored values."""
        for task in self._running:
            if task.job is None:  # `_look` finds an error of the update
                with contextlib.suppress(NearstepError):
                    task.pending.wait()

    def _begin(self, shard: Shard) -> None:
        """Queue the jobs of the stage of a shard, or its update after the last stage."""
        stages = shard.exchange.stages
        if shard.stage == len(stages):
            shard.left = 1
            self._updates.append(Task(shard))
            return
        shard.left = len(stages[shard.stage])
        self._ready.extend(Task(shard, job) for job in stages[shard.stage])

    def _advance(self) -> None:
        """Submit jobs while the queues have space, and let the devices run for a while."""
        most = JOBS_A_RING * self.pool.groups
        while self._ready and sum(each.job is not None for each in self._running) < most:
            if not self._submit(self._ready):
                break
        if self._updates and all(each.job is not None for each in self._running):
            self._submit(self._updates)
        if not self._running:
            return
        try:
            self._wait()
            self.pool.rings.look()
            for task in list(self._running):
                self._look(task)
        except NearstepError as error:
            self._device_failed(error)

    def _submit(self, queue: deque[Task]) -> bool:
        """Submit the first task of a queue; return False if the devices' queues have no space."""
        try:
            self._try(self._owner(queue[0].shard), (), self._start, queue[0])
        except QueueFullError:
            return False
        if queue:  # empty after a failure of the devices
            queue.popleft()
        return True

    def _start(self, task: Task) -> None:
        """Submit a job or an update to the devices."""
        shard, job = task.shard, task.job
        exchange = shard.exchange
        task.pending = exchange.update(shard) if job is None else exchange.submit(shard, job)
        self._running.append(task)

    def _wait(self) -> None:
        """Let the devices run until a task has ended, or for a while."""
        jobs = [task for task in self._running if task.job is not None]
        under_way = [*jobs[:1], *(task for task in self._running if task.job is None)]
        if any(task.job is None and task.pending.ended for task in under_way):
            return
        try:
            polls = [poll for task in under_way for poll in task.pending.polls]
            self.pool.rings.wait_any(polls, SLICE_CYCLES)
        except WaitTimeoutError:
            for task in under_way:
                task.slices += 1
                bound = task.pending.bound
                if bound is not None and task.slices * SLICE_CYCLES > bound:
                    raise

    def _look(self, task: Task) -> None:
        """Continue with the shard of a task that has ended."""
        pending, shard = task.pending, task.shard
        if not (pending.found_ended if isinstance(pending, Pending) else pending.ended):
            return
        if pending.error is not None:
            raise pending.error
        self._running.remove(task)
        shard.left -= 1
        if shard.left:
            return
        shard.stage += task.job is not None
        stages, stored = shard.exchange.stages, shard.exchange.stored
        if task.job is None or (shard.stage == len(stages) and stored is None):
            self._complete(shard)
        else:
            self._begin(shard)

    def _complete(self, shard: Shard) -> None:
        """Send the result of a shard to the clients."""
        owner, exchange = self._owner(shard), shard.exchange
        exchange.complete(shard)
        if self._order is not None:
            self._sum_ready(self._order, self._order.complete(shard))
        for rank, session in exchange.sessions.items():
            session.queued -= 1
            self._try(owner, (rank,), self._send_result, session, shard)

    def _send_result(self, session: Session, shard: Shard) -> None:
        data = shard.exchange.pull(session.rank, shard)
        numbers = shard.exchange.number, shard.version, shard.number
        session.send(messages.Summed(*numbers, session.inline(data.size)), data)

    def _lose(self, job: TrainingJob, rank: int, reason: str) -> None:
        error = errors.ClientLostError(
            f"client {rank} of job {job.name!r} is lost: it {reason}", [rank]
        )
        self._failing.append((job, error))

    def _device_failed(self, error: NearstepError) -> None:
        """End the jobs of all clients with tasks on the devices, and reset the pool."""
        device = getattr(error, "device", None)
        if isinstance(error, SilentLinkError):
            device = error.peer
        tasks = (*self._running, *self._ready, *self._updates)
        failed = {self._owner(task.shard) for task in tasks}
        lost = errors.DeviceLostError(
            f"the memory devices failed: {type(error).__name__}: {str(error).splitlines()[0]}",
            devices=[] if device is None else [device],
        )
        self._failing += [(job, lost) for job in failed]
        updates = [task for task in self._running if task.job is None]
        for queue in (self._running, self._ready, self._updates):
            queue.clear()
        try:
            for task in updates:
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

    def _end(self, job: TrainingJob, error: errors.JobError | None = None) -> None:
        """End a job, after its tasks on the devices."""
        self._drain(job)
        if error is not None:
            job.fail(error)
        self._forget(job)

    def _drain(self, job: TrainingJob) -> None:
        """Wait for the tasks of a job, which read and write the clients' memory."""
        mine = [task for task in self._running if task.shard.exchange.job == job.name]
        for queue in (self._running, self._ready, self._updates):
            kept = [task for task in queue if task.shard.exchange.job != job.name]
            queue.clear()
            queue.extend(kept)
        try:
            for task in mine:
                task.pending.wait()
        except NearstepError as error:
            self._device_failed(error)

    def _forget(self, job: TrainingJob) -> None:
        if self.jobs.get(job.name) is job:
            del self.jobs[job.name]
        if self._order is not None:
            dropped = self._order.drop(lambda each: each.exchange.job == job.name)
            self._sum_ready(self._order, dropped)
        job.free()
