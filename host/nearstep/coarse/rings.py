"""The rings of a pool: they queue jobs on all devices and find out how the jobs ended."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from nearstep.backends.base import Backend, Completion, Poll
from nearstep.coarse import errors
from nearstep.coarse.device import CoarseDevice
from nearstep.coarse.split import Part
from nearstep.errors import ArgumentError, WaitTimeoutError
from nearstep.registers import WORD_MASK, BlockRegisters
from nearstep.run import check_bound
from nearstep.scalars import is_whole
from nearstep_spec.coarse.config import BEAT_BYTES, PORTS
from nearstep_spec.coarse.registers import ErrorCause, ReduceOp, Stream, Wire
from nearstep_spec.csr.model import WORD_BITS, WORD_BYTES

IDLE_CYCLES = 1 << 18
"""Bound, in device cycles, of waits that depend on no job, such as for an idle device."""

KEEPALIVE_CYCLES = 1 << 10
"""Cycles without a frame to send after which a device sends a keepalive; less if the limit of
silence is below eight times as long."""

SLOWEST_CYCLES_PER_BEAT = 64

SLICE_CYCLES = 1 << 12
"""A wait releases the backend after so many device cycles, for other threads."""

COMPLETED_BITS = 32
DIVISOR_LSB = 16  # of `addends`

ERRORS: Mapping[ErrorCause, type[errors.RingError]] = {
    **dict.fromkeys(
        (ErrorCause.READ_RESPONSE, ErrorCause.WRITE_RESPONSE), errors.MemoryResponseError
    ),
    **dict.fromkeys((ErrorCause.WINDOW, ErrorCause.ALIGNMENT), errors.JobRefusedError),
    **dict.fromkeys((ErrorCause.OVERLAP, ErrorCause.UNSUPPORTED), errors.JobRefusedError),
    ErrorCause.MISMATCH: errors.JobMismatchError,
    ErrorCause.ABORTED: errors.PoolAbortedError,
}


class Addends(NamedTuple):
    """Addends of an exact sum.

    Attributes
    ----------
    arrays : number of arrays of each device.
    stride : bytes from an array to the next, a multiple of 64.
    divisor : the sum is divided by it.
    """

    arrays: int = 1
    stride: int = 0
    divisor: int = 1


@dataclass(kw_only=True)
class RingJob:
    """A part of an array that one ring reduces.

    Attributes
    ----------
    sources, destinations : address of the part on each device, local to the device.
    scale : factor of the sum, applied only by the operation `AVERAGE`.
    addends : arrays of each device, of an exact sum; None: a sum in the order of the ring.
    targets : for each device that was given the job, the value of its counter of completed jobs at
        which the job is complete.
    incomplete : devices not yet known to have completed the job.
    """

    part: Part
    operation: ReduceOp
    wire: Wire
    sources: Sequence[int]
    destinations: Sequence[int]
    scale: np.float32
    tag: int
    addends: Addends | None
    targets: dict[int, int] = field(default_factory=dict)
    incomplete: set[int]

    @property
    def beats(self) -> int:
        return -(-4 * self.part.elements // BEAT_BYTES)

    def __str__(self) -> str:
        return f"job {self.tag} of {self.part.elements} elements on group {self.part.group}"


class Pending(Completion):
    """Jobs whose end, on all devices, is one completion.

    Attributes
    ----------
    parts : elements that each ring reduces; they determine the order of additions.
    jobs : tuple[RingJob, ...]. One for each part.
    found_ended : whether the end of all jobs is known already.
    error : the error that ended the jobs, or None.
    cycles : device cycles from the creation of this object until the host found the jobs ended.
    """

    backend: Backend
    found_ended = False
    error: errors.RingError | None = None
    cycles: int | None = None

    def __init__(self, rings: Rings, jobs: Sequence[RingJob]) -> None:
        self.parts: tuple[Part, ...] = tuple(job.part for job in jobs)
        self.jobs = tuple(jobs)
        self.backend = rings.device.backend
        self._rings = rings
        self._begun = self.backend.cycles

    @property
    def ended(self) -> bool:
        """Whether all jobs have ended or failed; reads the devices' counters without waiting."""
        if not self.found_ended:
            self._rings.look()
        return self.found_ended

    @property
    def polls(self) -> Sequence[Poll]:
        if self.found_ended:
            return ()
        return self._rings.polls(self)

    @property
    def bound(self) -> int:
        return self._rings.bound()

    def wait(self, max_cycles: int | None = None) -> Self:
        """Run the devices until all jobs have ended, and return self.

        Parameters
        ----------
        max_cycles : bound in device cycles (steps, on devices without a clock). None: enough for
            all queued jobs at 64 cycles a beat, and for the detection of a dead peer.
        """
        if not self.found_ended:
            self._rings.wait(self, max_cycles)
        if self.error is not None:
            raise self.error
        return self

    def begin(self) -> None:
        """Called by the rings before the first job is given to a device."""

    def end(self, error: errors.RingError | None) -> None:
        """Record the end of the jobs and their error; called by the rings."""
        now = self.backend.cycles
        self.cycles = None if now is None or self._begun is None else now - self._begun
        self.found_ended = True
        self.error = error


JOB_REGISTERS = (
    *("source", "destination", "elements", "scale", "job"),
    *("stride", "addends", "start"),
)
"""Registers that start a job, in the order of their writes; some devices have no exact sums, and
neither `stride` nor `addends`."""


class JobPort:
    """Addresses of the registers of a sync core that every job writes or polls.

    A job takes 8 words on each device; they are encoded here because `RegisterHandle` would look up
    every name and check every value again.
    """

    def __init__(self, core: BlockRegisters) -> None:
        found = {each.name for each in core.map}
        self._words = [
            (core.base + core.map[name].offset + index * WORD_BYTES, number, index * WORD_BITS)
            for number, name in enumerate(JOB_REGISTERS)
            if name in found
            for index in range(core.map[name].words)
        ]
        self._lsb = {each.name: each.lsb for each in core.map["job"].fields}
        self._go = 1 << core.map.lookup("start.go")[1].lsb
        self.waiting = core.jobs.poll(waiting=0)
        self.completed = core.completed.poll(value=0)

    def words(self, job: RingJob, device: int) -> list[tuple[int, int]]:
        """Return the addresses and words of the writes that start a job on a device, in order."""
        average = job.operation is ReduceOp.AVERAGE
        lsb = self._lsb
        bits = job.operation << lsb["operation"] | job.wire << lsb["wire"] | job.tag << lsb["tag"]
        scale = int(np.float32(job.scale if average else 1.0).view(np.uint32))
        source, destination = job.sources[device], job.destinations[device]
        exact = job.addends or Addends(1, 0, 0)
        numbers = exact.arrays | exact.divisor << DIVISOR_LSB
        values = (
            *(source, destination, job.part.elements, scale, bits),
            *(exact.stride, numbers, self._go),
        )
        return [
            (address, values[number] >> shift & WORD_MASK) for address, number, shift in self._words
        ]


class Rings:
    """The sync cores of all devices and their queued jobs.

    Parameters
    ----------
    silence_cycles : device cycles without a valid frame after which a link counts as dead; 0:
        never.
    """

    def __init__(self, device: CoarseDevice, silence_cycles: int) -> None:
        self.device = device
        self.devices = len(device.nodes)
        self.silence_cycles = silence_cycles
        self.failure: errors.RingError | None = None
        self.lock = threading.RLock()
        self._pushed: list[list[int]] = []
        self._pending: list[Pending] = []
        self._tag = 0
        self._giving = 0  # calls that give something to devices; more where one was interrupted
        pool, core = device.nodes[0].pool, device.nodes[0].sync0
        self._epochs = 1 << pool.map.lookup("link.epoch")[1].width
        self._tags = 1 << core.map.lookup("job.tag")[1].width
        self._epoch = int(pool.link.epoch)
        self._ports = [
            [JobPort(self.core(device, group)) for group in self._groups]
            for device in range(self.devices)
        ]
        self._errors = [node.pool.status.poll(error=1) for node in device.nodes]
        self.reset()

    def check_device(self, device: int) -> None:
        """Raise `ArgumentError` unless the device exists."""
        if not is_whole(device) or not 0 <= device < self.devices:
            raise ArgumentError(f"device must be from 0 to {self.devices - 1}, not {device!r}")

    def core(self, device: int, group: int) -> BlockRegisters:
        """Return the registers of a sync core."""
        return self.device.nodes[device][f"sync{group}"]

    def reset(self) -> None:
        """Abort all jobs on all devices and start the next epoch; tensors keep their values."""
        with self.lock:
            self._giving += 1
            aborted = self._outcome(ErrorCause.ABORTED, 0) if self._pending else None
            self._epoch = (self._epoch + 1) % self._epochs
            for number, node in enumerate(self.device.nodes):
                node.pool.silence_limit.value = self.silence_cycles
                if self.silence_cycles:  # several frames, so that some of them may be lost
                    keepalive = min(KEEPALIVE_CYCLES, max(1, self.silence_cycles // 8))
                    node.pool.keepalive.value = keepalive
                node.pool.link.set(device=number, epoch=self._epoch, used=self._used(number))
                node.pool.control.abort = 1
            for number, node in enumerate(self.device.nodes):
                for block in (node.pool, *(self.core(number, g) for g in self._groups)):
                    self._wait_idle(number, block)
                self._configure(number)
            self._pushed = [[0] * self.device.config.groups for _ in range(self.devices)]
            self.failure = None
            self._end_pending(aborted)
            self._giving = 0

    def _wait_idle(self, device: int, block: BlockRegisters) -> None:
        try:
            self.wait_any([block.status.poll(busy=0)], IDLE_CYCLES)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(
                f"device {device} to become idle; if its memory does not answer, device.reset() of "
                "the pool resets that as well, then reset() again",
                error.max_cycles,
                unit=error.unit,
                registers=error.registers,
                transactions=error.transactions,
            ) from None

    def make_job(
        self,
        part: Part,
        operation: ReduceOp,
        wire: Wire,
        sources: Sequence[int],
        destinations: Sequence[int],
        scale: np.float32 | None = None,
        addends: Addends | None = None,
    ) -> RingJob:
        """Return a job with the next tag, given to no device yet.

        Parameters
        ----------
        sources, destinations : for each device, the pool address of the whole array that is read,
            and of the one that is written.
        scale : factor of an average; None: 1 / devices.
        addends : of an exact sum.
        """
        self._tag = (self._tag + 1) % self._tags

        def local(addresses: Sequence[int]) -> list[int]:
            offset = 4 * part.start
            return [self.device.local_address(a, d) + offset for d, a in enumerate(addresses)]

        return RingJob(
            part=part,
            operation=operation,
            wire=wire,
            sources=local(sources),
            destinations=local(destinations),
            scale=np.float32(1 / self.devices) if scale is None else scale,
            tag=self._tag,
            addends=addends,
            incomplete=set(range(self.devices)),
        )

    def check_ready(self) -> None:
        """Raise `ResetNeededError` if, since the last reset, an error ended jobs or a call that
        gave a job to devices was interrupted."""
        with self.lock:  # another thread may be submitting a job
            if self._giving:
                raise errors.ResetNeededError(
                    "a call was interrupted while it gave a job to devices: reset() the pool first"
                )
        if self.failure is not None:
            raise errors.ResetNeededError(
                "a device ended all jobs: reset() the pool first"
            ) from self.failure

    def check_space(self, groups: Sequence[int]) -> None:
        """Raise `QueueFullError` unless the queue of each group has space on every device."""
        capacity = self.device.config.queue_jobs
        for group in groups:
            for device in range(self.devices):
                place = self._ports[device][group].waiting
                if self._read(place.address) & place.mask >= capacity:  # its lowest field
                    raise errors.QueueFullError(device, group, capacity)

    def begin(self, pending: Pending) -> None:
        """Include these jobs in `look` and `reset`, before any device has them."""
        pending.begin()
        self._pending.append(pending)

    def submit(self, pending: Pending) -> None:
        """Give the jobs to all devices; a reset is needed if that is interrupted, as by Ctrl-C."""
        with self.lock:
            self._giving += 1
            self.begin(pending)
            for job in pending.jobs:
                for device in range(self.devices):
                    self.push(job, device)
            self._giving -= 1

    def push(self, job: RingJob, device: int) -> None:
        """Give a job to one device."""
        group = job.part.group
        self._giving += 1
        self.device.backend.write_registers(self._ports[device][group].words(job, device))
        self._pushed[device][group] += 1
        job.targets[device] = self._pushed[device][group]
        self._giving -= 1

    def look(self) -> None:
        """Read the devices' counters and end the completed jobs, or all jobs on an error."""
        with self.lock:
            for each in list(self._pending):
                if all(self.completed(job) for job in each.jobs):
                    self._pending.remove(each)
                    each.end(None)
            failure = self._look_for_errors() if self._pending else None
            if failure is not None:
                self._end_pending(failure)

    def completed(self, job: RingJob) -> bool:
        """Return whether all devices have completed a job; reads counters without waiting."""
        for device in sorted(job.incomplete & job.targets.keys()):
            count = self._read(self._ports[device][job.part.group].completed.address)
            over = (count - job.targets[device]) % (1 << COMPLETED_BITS)
            if over < 1 << (COMPLETED_BITS - 1):
                job.incomplete.discard(device)
        return not job.incomplete

    def _look_for_errors(self) -> errors.RingError | None:
        """Return the error that ended all jobs, if any; the pool then needs a reset."""
        found = (each.holds(self._read(each.address)) for each in self._errors)
        if self.failure is None and any(found):
            self.failure = self._gather()
        return self.failure

    def wait(self, pending: Pending, max_cycles: int | None) -> None:
        """Run the devices until the jobs have ended.

        Raises
        ------
        RingTimeoutError
        """
        check_bound(max_cycles)
        self.device.check_open(f"wait for {pending!r}")
        remaining = self.bound() if max_cycles is None else max_cycles
        bound = remaining
        while True:
            with self.lock:  # another thread may find the end of the jobs meanwhile
                if pending.ended:
                    return
                polls = self.polls(pending)
            spent = min(remaining, SLICE_CYCLES)
            try:
                self.wait_any(polls, spent)
            except WaitTimeoutError as error:
                remaining -= spent
                if remaining <= 0 and not pending.ended:
                    raise errors.RingTimeoutError(
                        f"the end of {', '.join(map(str, pending.jobs))}",
                        bound,
                        self.waits(),
                        unit=error.unit,
                        transactions=error.transactions,
                    ) from None

    def polls(self, pending: Pending) -> list[Poll]:
        """Return polls of which one holds when a device has completed one of the jobs, or on an
        error.

        The polls also accept counts of jobs that were queued later on the same core.
        """
        for job in pending.jobs:
            if devices := job.incomplete & job.targets.keys():
                device, group = min(devices), job.part.group
                place = self._ports[device][group].completed
                counts = range(job.targets[device], self._pushed[device][group] + 1)
                return [
                    *(replace(place, value=count % (1 << COMPLETED_BITS)) for count in counts),
                    *self._errors,
                ]
        return list(self._errors)

    def _read(self, address: int) -> int:
        return self.device.backend.read_register(address)

    def wait_any(self, polls: Sequence[Poll], max_cycles: int) -> None:
        """Run the devices until a poll holds, or raise `WaitTimeoutError`."""
        self.device.backend.wait(polls, max_cycles)

    def waits(self) -> tuple[errors.Waiting, ...]:
        """Return, for each device with a running job, the devices without the same job."""
        found = []
        for group in self._groups:
            jobs = {
                device: f"job {self.core(device, group).jobs.tag} of group {group}"
                for device in range(self.devices)
                if self.core(device, group).status.busy
            }
            for device, job in jobs.items():
                peers = {
                    peer: f"with {jobs[peer]}"
                    if peer in jobs
                    else f"without a job of group {group}"
                    for peer in range(self.devices)
                    if jobs.get(peer) != job
                }
                found.append(errors.Waiting(device, job, peers))
        return tuple(found)

    @property
    def _groups(self) -> range:
        return range(self.device.config.groups)

    def bound(self) -> int:
        """Return a bound, in device cycles, for all queued jobs."""
        jobs = [job for each in self._pending for job in each.jobs]
        beats = sum(job.beats * (job.addends or Addends()).arrays for job in jobs)
        return IDLE_CYCLES + 2 * self.silence_cycles + SLOWEST_CYCLES_PER_BEAT * 2 * beats

    def _used(self, device: int) -> int:
        """Return the mask of used links: of two devices, only the link between 0 and 1; of one,
        none."""
        if self.devices == 1:
            return 0
        return (1 << PORTS) - 1 if self.devices > 2 else 1 << (1 - device)

    def _configure(self, device: int) -> None:
        """Set a device's position in its rings, and allow jobs to access all of its memory."""
        pool = self.device.nodes[device].pool
        pool.window_base.value = 0
        pool.window_limit.value = self.device.config.memory_bytes
        for group in self._groups:
            odd = group % 2
            send, receive = (0, 1) if odd else (1, 0)
            if self.devices == 2:
                send = receive = 1 - device
            self.core(device, group).ring.set(
                members=self.devices,
                position=(self.devices - device) % self.devices if odd else device,
                send_port=send,
                receive_port=receive,
            )

    def _end_pending(self, error: errors.RingError | None) -> None:
        for each in self._pending:
            each.end(error)
        self._pending.clear()

    def _gather(self) -> errors.RingError:
        """Wait for the error reports of all devices that get one, and return the first fault."""
        for node in self.device.nodes:
            try:
                self.wait_any([node.pool.status.poll(error=1)], SLICE_CYCLES)
            except WaitTimeoutError:
                continue  # the device is dead, or cut off by the dead one
        causes = {
            number: ErrorCause(node.pool.error.cause)
            for number, node in enumerate(self.device.nodes)
        }
        quiet = (ErrorCause.PEER, ErrorCause.NONE)
        first = [number for number, cause in causes.items() if cause not in quiet]
        if not first:  # the device that found the fault was aborted; the others report its cause
            number = next(number for number, cause in causes.items() if cause is ErrorCause.PEER)
            link = self.device.nodes[number].pool.error_link.get()
            causes[link["device"]] = ErrorCause(link["cause"])
            first = [link["device"]]
        # Both neighbours of a dead device report it; the dead device, cut off, reports them. The
        # fault reported by other devices is the real one.
        reported = [
            int(self.device.nodes[number].pool.error_link.device)
            for number, cause in causes.items()
            if cause is ErrorCause.PEER
        ]
        device = next((number for number in reported if number in first), first[0])
        return self._outcome(causes[device], device, causes)

    def _outcome(
        self, cause: ErrorCause, device: int, causes: Mapping[int, ErrorCause] | None = None
    ) -> errors.RingError:
        pool = self.device.nodes[device].pool
        error = pool.error.get()
        names = {
            number: each.name
            for number, each in (causes or dict.fromkeys(range(self.devices), cause)).items()
        }
        found: dict[str, Any] = {
            "device": device,
            "causes": names,
            "stream": Stream(error["stream"]).name,
            "transactions": self.device.backend.transactions(),
            "registers": pool.dump(),
        }
        if cause is ErrorCause.SILENT:
            port = int(error["stream"] == Stream.LINK1)
            peer = (device + (1 if port else -1)) % self.devices
            return errors.SilentLinkError(**found, address=0, port=port, peer=peer)
        return ERRORS[cause](**found, address=pool.error_address.value)
