"""One memory device of `golden:coarse`: its registers, queues of jobs, snapshot and memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.registers import Answer, RegisterFile
from nearstep_sim.models.memory import EmulatedMemory
from nearstep_sim.updater.golden_channel import GoldenChannel
from nearstep_sim.updater.golden_kernel import Engine
from nearstep_spec.coarse.config import (
    BEAT_BYTES,
    MAX_ADDENDS,
    PAGE_BYTES,
    TAG_BITS,
    WIRE_FORMATS,
    CoarseConfig,
)
from nearstep_spec.coarse.registers import (
    UPDATER,
    ErrorCause,
    ReduceOp,
    Stream,
    Wire,
    device_maps,
)
from nearstep_spec.csr.model import BLOCK_BYTES

COPIED_BITS = 32
"""Pages in one read of `snapshot_copied`."""

OPERATIONS = frozenset(map(int, ReduceOp))

SHOWN_TAG_BITS = 15
"""Bits of `jobs.tag`."""


@dataclass(frozen=True)
class GoldenJob:
    """A job as in the registers at START."""

    source: int
    destination: int
    elements: int
    scale_bits: int
    tag: int
    operation: int
    wire: int
    stride: int = 0
    count: int = 1
    divisor: int = 0

    @property
    def sources(self) -> list[int]:
        """Address of each array of the device."""
        return [self.source + index * self.stride for index in range(self.count)]

    @property
    def nbytes(self) -> int:
        """Bytes of the beats that hold the elements."""
        return -(-4 * self.elements // BEAT_BYTES) * BEAT_BYTES

    @property
    def scale(self) -> np.float32:
        """Factor of an average."""
        return np.uint32(self.scale_bits).view(np.float32)

    def description(self, members: int) -> tuple[int, ...]:
        """Return the fields that must be equal on all devices of a ring."""
        same = self.elements, self.scale_bits, self.tag, self.operation, self.wire
        return (*same, members, self.count, self.divisor)


@dataclass(frozen=True)
class Finding:
    """Error registers of a device."""

    cause: ErrorCause
    stream: Stream = Stream.NONE
    address: int = 0
    response: int = 0
    port: int = 0


class GoldenCore:
    """Registers and queue of one sync core."""

    def __init__(self, registers: RegisterFile, config: CoarseConfig) -> None:
        self.registers = registers
        self.config = config
        self.formats = {int(Wire[name.upper()]) for name in config.wire_formats}
        self.exact = {int(Wire[name.upper()]) for name in config.exact}
        self.queue: deque[GoldenJob] = deque()
        self.current: GoldenJob | None = None

    @property
    def members(self) -> int:
        return self.registers["ring.members"]

    @property
    def position(self) -> int:
        return self.registers["ring.position"]

    def push(self) -> None:
        """START: queue the job in the registers, or drop it if the queue is full."""
        if len(self.queue) == self.config.queue_jobs:
            self.registers["jobs.overflow"] = 1
            return
        read = self.registers
        addends = ("stride.value", "addends.count", "addends.divisor")
        is_exact = bool(self.exact and read["addends.divisor"])
        self.queue.append(
            GoldenJob(
                read["source.value"],
                read["destination.value"],
                read["elements.value"],
                read["scale.value"],
                read["job.tag"] & ((1 << TAG_BITS) - 1),
                read["job.operation"],
                read["job.wire"],
                *((read[name] for name in addends) if is_exact else ()),
            )
        )
        if not read["status.error"]:
            self.registers["status.busy"] = 1
            self.registers["status.done"] = 0
        self._show()

    def take(self) -> bool:
        """Begin the next job; return whether there was one."""
        if self.current is not None or not self.queue:
            return False
        self.current = self.queue.popleft()
        self.registers["jobs.tag"] = self.current.tag & ((1 << SHOWN_TAG_BITS) - 1)
        self._show()
        return True

    def complete(self) -> None:
        """End the current job without an error."""
        self.current = None
        done = (self.registers["completed.value"] + 1) & 0xFFFFFFFF
        self.registers["completed.value"] = done
        if not self.queue:
            self.registers["status.done"] = 1
            self.registers["status.busy"] = 0

    def fail(self) -> None:
        """End the current job because of an error of the device."""
        self.current = None
        self.registers["status.error"] = 1
        self.registers["status.done"] = 0
        self.registers["status.busy"] = 0

    def abort(self) -> None:
        """Clear all jobs and errors."""
        self.current = None
        self.queue.clear()
        for path in ("status.busy", "status.done", "jobs.overflow", "completed.value"):
            self.registers[path] = 0
        self._show()

    def refusal(self, base: int, limit: int) -> Finding | None:
        """Return why the current job cannot be run in the window [base, limit); None if it can."""
        job = self.current
        assert job is not None
        if (
            job.operation not in OPERATIONS
            or job.wire not in self.formats
            or self.members < (1 if job.divisor else 2)
            or self.position >= self.members
            or (job.divisor and not self._is_exact(job))
        ):
            return Finding(ErrorCause.UNSUPPORTED)
        ends = [(Stream.SOURCE, source) for source in job.sources]
        ends.append((Stream.DESTINATION, job.destination))
        for stream, address in ends:
            if address % BEAT_BYTES:
                return Finding(ErrorCause.ALIGNMENT, stream, address)
        for stream, address in ends:
            if not base <= address <= address + job.nbytes <= limit:
                return Finding(ErrorCause.WINDOW, stream, address)
        if job.nbytes and any(abs(each - job.destination) < job.nbytes for each in job.sources):
            return Finding(ErrorCause.OVERLAP, Stream.DESTINATION, job.destination)
        return None

    def _is_exact(self, job: GoldenJob) -> bool:
        """Whether the device can do an exact sum: its accumulators are wide enough."""
        addends = job.count * self.members
        fits = 1 <= addends <= MAX_ADDENDS and job.divisor <= MAX_ADDENDS
        return fits and job.wire in self.exact and job.operation == ReduceOp.SUM

    def wire(self) -> str:
        """Name of the wire format of the job in work."""
        assert self.current is not None
        return list(WIRE_FORMATS)[self.current.wire]

    def _show(self) -> None:
        self.registers["jobs.waiting"] = len(self.queue)


@dataclass
class GoldenSnapshot:
    """A frozen range and its copied pages."""

    base: int
    area: int
    pages: int
    copied: set[int] = field(default_factory=set)

    def touched(self, address: int, nbytes: int) -> range:
        """Pages of the snapshot that a range touches."""
        first = max(0, (address - self.base) // PAGE_BYTES)
        last = min(self.pages, -(-(address + nbytes - self.base) // PAGE_BYTES))
        return range(first, last)


class GoldenDevice:
    """A memory device: the state visible to software, without cycles.

    Counters of links count entries of ended jobs, without retransmissions; counters of cycles and
    of the ALUs are 0.

    Parameters
    ----------
    refuses : (local address, bytes, writes) to whether memory responds other than OKAY.
    base : address of the device's memory in the pool.
    log : takes a line for each burst of the update kernel.
    engines : the arithmetic of each rule of the update kernel.

    Attributes
    ----------
    updater : the update kernel as a channel; None if the device has none.
    """

    def __init__(
        self,
        config: CoarseConfig,
        refuses: Callable[[int, int, bool], bool] = lambda address, nbytes, write: False,
        *,
        base: int = 0,
        log: Callable[[str], None] = lambda line: None,
        engines: Sequence[Engine] = (),
    ) -> None:
        self.config = config
        self.refuses = refuses
        self.memory = EmulatedMemory(config.memory_bytes)
        self.updater: GoldenChannel | None = None
        if config.updater is not None:
            self.updater = GoldenChannel(
                config.updater,
                base,
                config.memory_bytes,
                device_maps(config)[UPDATER],
                engines,
                log,
                config.memory_bytes,
                memory=self.memory,
                before_write=self._before_write,
            )
        self.dead = False
        self.reset()

    def reset(self) -> None:
        """Reset all registers, queues and the snapshot; memory is kept."""
        maps = device_maps(self.config)
        maps.pop(UPDATER, None)
        files = {name: RegisterFile(each) for name, (_, each) in maps.items()}
        self.pool = files.pop("pool")
        self._copied_offset = self.pool.register_map["snapshot_copied"].offset
        self.cores = [GoldenCore(each, self.config) for each in files.values()]
        self.epoch = 0
        self.snapshot: GoldenSnapshot | None = None
        if self.updater is not None:
            self.updater.reset()

    @property
    def failed(self) -> bool:
        return bool(self.pool["status.error"])

    @property
    def working(self) -> bool:
        """Whether a job is in work."""
        return any(core.current is not None for core in self.cores)

    def used(self, port: int) -> bool:
        return bool(self.pool["link.used"] >> port & 1)

    def read_register(self, offset: int) -> Answer:
        block, address = divmod(offset, BLOCK_BYTES)
        if self.updater is not None and self.updater.holds(offset):
            return self.updater.read_register(offset)
        if block > len(self.cores):
            return Answer(error=True)
        if block:
            return self.cores[block - 1].registers.read(address)
        if address == self._copied_offset:
            self._show_copied()
        return self.pool.read(address)

    def write_register(self, offset: int, value: int) -> tuple[Answer, bool]:
        """Write a register; return the response, and whether the device's jobs end with ABORTED."""
        block, address = divmod(offset, BLOCK_BYTES)
        if self.updater is not None and self.updater.holds(offset):
            return self.updater.write_register(offset, value)._replace(pulses=()), False
        if block > len(self.cores):
            return Answer(error=True), False
        if not block:
            answer = self.pool.write(address, value)
            self._pool_pulses(answer.pulses)
            return answer, False
        core = self.cores[block - 1]
        answer = core.registers.write(address, value)
        if "start.go" in answer.pulses:
            core.push()
            self.update_busy()
        return answer, "control.abort" in answer.pulses

    def fail(self, finding: Finding, device: int, cause: ErrorCause, port: int) -> None:
        """End all jobs. `device` found the first fault, `cause`, at its link `port`."""
        for core in self.cores:
            core.fail()
        for registers in (self.pool, *(core.registers for core in self.cores)):
            registers["error.cause"] = int(finding.cause)
            registers["error.stream"] = int(finding.stream)
            registers["error.response"] = finding.response
            registers["error_address.value"] = finding.address
        self.pool["status.error"] = 1
        self.pool["status.done"] = 0
        self.pool["status.busy"] = 0
        self.pool["error_link.cause"] = int(cause)
        self.pool["error_link.device"] = device
        self.pool["error_link.port"] = port

    def update_busy(self) -> None:
        """Set busy and done of the pool block as the cores' states require."""
        busy = any(core.registers["status.busy"] for core in self.cores)
        if busy:
            self.pool["status.done"] = 0
        elif self.pool["status.busy"]:
            self.pool["status.done"] = 1
        self.pool["status.busy"] = int(busy)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        """Write, after copying frozen pages of a snapshot."""
        self._before_write(address, data.size)
        self.memory.write(address, data)

    def place(self, address: int, nbytes: int, form: str | None) -> NDArray[np.uint8] | None:
        """Return `EmulatedMemory.place`, after copying frozen pages of a snapshot."""
        self._before_write(address, nbytes)
        return self.memory.place(address, nbytes, form)

    def _before_write(self, address: int, nbytes: int) -> None:
        """Copy the frozen pages of these bytes."""
        if self.snapshot is not None and nbytes:
            self._copy_pages(self.snapshot, address, nbytes)

    def count_entries(self, port_out: int, port_in: int, entries: int, payload: int) -> None:
        """Count sent and received entries; `payload` is their phits in one direction."""
        sent = payload + entries * 2
        for name, number in (("sent_phits", sent), ("payload_phits", payload)):
            self.pool[f"link{port_out}_{name}.value"] += number
        self.pool[f"link{port_in}_received_entries.value"] += entries
        self.pool.capture()

    def _copy_pages(self, snapshot: GoldenSnapshot, address: int, nbytes: int) -> None:
        for page in snapshot.touched(address, nbytes):
            if page in snapshot.copied:
                continue
            start, area = (each + page * PAGE_BYTES for each in (snapshot.base, snapshot.area))
            if self.refuses(start, PAGE_BYTES, False) or self.refuses(area, PAGE_BYTES, True):
                self.pool["snapshot.failed"] = 1
                continue
            self.memory.write(area, self.memory.view(start, PAGE_BYTES).copy())
            snapshot.copied.add(page)
            self.pool["snapshot_pages_copied.value"] += 1

    def _pool_pulses(self, pulses: tuple[str, ...]) -> None:
        if "start.go" in pulses:
            self._open_snapshot()
        if "snapshot_control.close" in pulses:
            self.snapshot = None
        self.pool["snapshot.open"] = int(self.snapshot is not None)
        if "control.abort" in pulses:
            self._abort()

    def _abort(self) -> None:
        for core in self.cores:
            core.abort()
        for registers in (self.pool, *(core.registers for core in self.cores)):
            for path in ("status.busy", "status.done", "status.error"):
                registers[path] = 0
            for name in ("cause", "stream", "response"):
                registers[f"error.{name}"] = 0
            registers["error_address.value"] = 0
        for name in ("cause", "device", "port"):
            self.pool[f"error_link.{name}"] = 0
        self.epoch = self.pool["link.epoch"]

    def _open_snapshot(self) -> None:
        """Open a snapshot, unless one is open or the ranges are invalid: then `snapshot.open`
        remains 0.
        """
        read = self.pool
        base, area = read["snapshot_base.value"], read["snapshot_area.value"]
        pages = read["snapshot_pages.value"]
        size = pages * PAGE_BYTES
        if self.snapshot is not None:
            return
        if base % PAGE_BYTES or area % PAGE_BYTES or not 0 < pages <= self.config.snapshot_pages:
            return
        if max(base, area) + size > self.memory.data.size or abs(base - area) < size:
            return
        self.snapshot = GoldenSnapshot(base, area, pages)
        read["snapshot_pages_copied.value"] = 0
        read["snapshot.failed"] = 0

    def _show_copied(self) -> None:
        first = self.pool["page.number"] * COPIED_BITS
        copied = () if self.snapshot is None else self.snapshot.copied
        self.pool["snapshot_copied.value"] = sum(
            1 << bit for bit in range(COPIED_BITS) if first + bit in copied
        )
