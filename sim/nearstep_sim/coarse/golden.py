"""`golden:coarse`: registers and results of a pool of memory devices, without cycles."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Poll
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.errors import (
    ArgumentError,
    BusError,
    ClosedDeviceError,
    GuardError,
    MemoryFaultError,
    OutOfBoundsError,
    UninitialisedError,
    WaitTimeoutError,
)
from nearstep.scalars import is_whole
from nearstep.threads import shared, simulation_threads
from nearstep_sim.coarse.golden_device import Finding, GoldenDevice, GoldenJob
from nearstep_sim.coarse.options import CoarseOptions
from nearstep_sim.golden import coarse_cpp
from nearstep_sim.golden.coarse import ring_all_reduce
from nearstep_sim.models.memory import GUARD, LINE_BYTES, UNWRITTEN, WRITTEN
from nearstep_sim.updater.golden import STEP_ELEMENTS, make_engines
from nearstep_sim.updater.golden_port import RESPONSES, ArmedInjection
from nearstep_spec.coarse.config import PORTS, WIRE_FORMATS, CoarseConfig
from nearstep_spec.coarse.registers import ErrorCause, ReduceOp, Stream, register_bytes
from nearstep_spec.csr.block import Response

STEP_BYTES = 1 << 14
STEPS = 4
"""A step writes `STEP_BYTES` of results on each device, or 1 / `STEPS` of all if that is more."""

WAIT_BYTES = 1 << 16
"""Replaces `STEP_BYTES` while the host waits and no memory fault is injected."""

ACCESSES_PER_STEP = 32
"""Register accesses in the time of a step."""

KEPT_TRANSACTIONS = 32

MEMORY_CAUSES = {False: ErrorCause.READ_RESPONSE, True: ErrorCause.WRITE_RESPONSE}


@dataclass
class GoldenRing:
    """A job active on all devices of a ring.

    Attributes
    ----------
    nbytes : of the results, on every device.
    sources : arrays of all devices; sums in fp32, and exact ones, are computed when they are
        written.
    form : format of sources and results that are lent in 16 bits, if sums are computed so.
    result : result of all devices, if computed in full before the first write.
    written : bytes, on every device.
    least_bytes : of a step.
    """

    nbytes: int
    sources: Sequence[coarse_cpp.Array]
    form: str | None = None
    result: NDArray[np.uint8] | None = None
    written: int = 0
    least_bytes: int = STEP_BYTES

    @property
    def step(self) -> slice:
        """Return the next range to write."""
        nbytes = max(self.least_bytes, -(-self.nbytes // STEPS // LINE_BYTES) * LINE_BYTES)
        return slice(self.written, min(self.nbytes, self.written + nbytes))


def _sums_as_written(job: GoldenJob) -> bool:
    """Whether results of a job, a sum in fp32 or exact, are computed when they are written.

    Results never overlap sources: a step can be repeated.
    """
    if job.divisor:
        return True
    return job.wire == list(WIRE_FORMATS).index("fp32") and job.operation != ReduceOp.MAX


def _elements(data: NDArray[np.uint8], elements: int) -> coarse_cpp.Array:
    """Bytes as elements: patterns, if there are two for each."""
    return data.view(np.float32 if data.size == 4 * elements else np.uint16)


class GoldenPool(EmulatedBackend):
    """Memory devices in a ring, without a clock.

    Time is counted in steps, as in `golden:axdimm`: every 32 register accesses are one. A job is
    computed when it is active on every device of its ring, and written step by step. A device that
    is dead, or has another epoch, is silent: its neighbours detect the silence in the first step in
    which they have an active job, if `silence_limit` is not 0.
    """

    family = "coarse"
    config: CoarseConfig

    def __init__(self, options: CoarseOptions) -> None:
        coarse_cpp.load()
        self.config = config = options.config()
        self.devices = devices = options.devices
        self.capacity_bytes = devices * config.memory_bytes
        self._register_bytes = register_bytes(config)
        self._log: deque[str] = deque(maxlen=KEPT_TRANSACTIONS)
        self._nodes = [
            GoldenDevice(
                config,
                partial(self._refuses, number),
                base=number * config.memory_bytes,
                log=self._log.append,
                engines=() if config.updater is None else make_engines(config.updater, "cpp"),
            )
            for number in range(devices)
        ]
        self._threads = simulation_threads()
        self._rings: dict[int, GoldenRing] = {}
        self._rooms: dict[int, NDArray[np.float32]] = {}
        self._injections: list[ArmedInjection] = []
        self._accesses = 0
        self._stuck = False
        self._closed = False
        self._changed = True  # state that determines whether rings can advance
        self._joined: list[bool] = []
        self._links: list[list[bool]] = []
        self._shown = False  # state visible in registers

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        size = self.config.memory_bytes
        return tuple((device * size, size) for device in range(self.devices))

    @property
    def cycles(self) -> int | None:
        return None

    def kill(self, device: int) -> None:
        """Silence a device: its links carry no data in either direction.

        The host can still access its registers and memory.
        """
        self._check_device(device).dead = True
        self._changed = True

    def revive(self, device: int) -> None:
        """Restore the links of a silenced device."""
        self._check_device(device).dead = False
        self._changed = True

    def read_register(self, address: int) -> int:
        self._take_time()
        device, offset = divmod(address, self._register_bytes)
        if not 0 <= device < self.devices:
            raise BusError(address, Response.DECERR, write=False)
        answer = self._nodes[device].read_register(offset)
        if answer.error:
            raise BusError(address, Response.SLVERR, write=False)
        return answer.value

    def write_register(self, address: int, value: int) -> None:
        self._write(address, value)

    def write_registers(self, words: Iterable[tuple[int, int]]) -> None:
        for address, value in words:
            self._write(address, value)

    def _write(self, address: int, value: int) -> None:
        self._take_time()
        device, offset = divmod(address, self._register_bytes)
        if not 0 <= device < self.devices:
            raise BusError(address, Response.DECERR, write=True)
        self._changed = True
        answer, aborted = self._nodes[device].write_register(offset, value)
        if answer.error:
            raise BusError(address, Response.SLVERR, write=True)
        if aborted:
            self._fail({device: Finding(ErrorCause.ABORTED)})
        elif "control.abort" in answer.pulses:
            self._rings.clear()

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        node, local = self._place(address, out.size)
        node.memory.read(local, out)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        node, local = self._place(address, data.size)
        node.write_memory(local, data)

    def lend_memory(self, address: int, data: NDArray[np.uint8], *, writes: bool) -> bool:
        node, local = self._place(address, data.size)
        return node.memory.lend(local, data, writes=writes)

    def lend_patterns(
        self, address: int, data: NDArray[np.uint8], form: str, *, writes: bool
    ) -> bool:
        node, local = self._place(address, 2 * data.size)
        return node.memory.lend(local, data, writes=writes, form=form)

    def end_loan(self, address: int) -> None:
        node, local = self._place(address, 0)
        node.memory.give_back(local)

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        self._check_open()
        left = max_cycles
        while True:
            for poll in polls:
                device, offset = divmod(poll.address, self._register_bytes)
                if poll.holds(self._nodes[device].read_register(offset).value):
                    return
            self._shown = False
            while not self._shown:
                if left <= 0 or not self._advance(STEP_ELEMENTS):
                    raise WaitTimeoutError(
                        " or ".join(map(str, polls)),
                        max_cycles,
                        unit="steps",
                        transactions=self.transactions(),
                    )
                left -= 1

    def reset(self) -> None:
        self._check_open()
        self._rings.clear()
        self._stuck = False
        self._changed = True
        for node in self._nodes:
            node.reset()

    def close(self) -> None:
        self._closed = True

    def transactions(self) -> Sequence[str]:
        return tuple(self._log)

    def protect(self, address: int, nbytes: int) -> None:
        node, local = self._place(address, nbytes)
        node.memory.mark(local, nbytes, GUARD)

    def claim(self, address: int, nbytes: int) -> None:
        node, local = self._place(address, nbytes)
        node.memory.mark(local, nbytes, UNWRITTEN)

    def inject(self, injection: Injection) -> None:
        """Inject a memory fault.

        A whole source, and the data written in a step, are one burst each.

        `late` costs jobs no time here. Bursts of jobs and those of each update kernel are counted
        apart.
        """
        injection.check_kernels()
        self._injections.append(ArmedInjection(injection))
        size = self.config.memory_bytes
        for number, node in enumerate(self._nodes):
            if node.updater is not None and injection.limit > number * size:
                shifted = replace(
                    injection,
                    base=max(0, injection.base - number * size),
                    limit=injection.limit - number * size,
                )
                node.updater.kernel.port.injections.append(ArmedInjection(shifted))

    def heal(self) -> None:
        self._injections.clear()
        for node in self._nodes:
            if node.updater is not None:
                node.updater.kernel.port.injections.clear()

    def _take_time(self) -> None:
        self._check_open()
        self._accesses += 1
        if self._accesses % ACCESSES_PER_STEP == 0:
            self._advance(1)

    def _advance(self, elements: int) -> bool:
        """Run one step, of `elements` of update kernels; return whether state changed."""
        moved = self._advance_updaters(elements)
        for node in self._nodes:
            if not node.failed:
                taken = [core.take() for core in node.cores]
                self._changed |= any(taken)
                moved |= any(taken)
        self._shown |= moved
        if self._changed:
            self._links = [
                [self._is_alive(device, port) for port in range(PORTS)]
                for device in range(self.devices)
            ]
            found = self._refusals() or self._silences() or self._mismatches()
            if found:
                self._fail(found)
                return True
            self._joined = [self._is_joined(group) for group in range(self.config.groups)]
            self._changed = False
        for group in range(self.config.groups):
            moved |= self._advance_ring(group, elements > 1 and not self._injections)
        return moved

    def _advance_updaters(self, elements: int) -> bool:
        """Run a step of every update kernel; return whether state changed."""
        moved = False
        for updater in (node.updater for node in self._nodes):
            if updater is None:
                continue
            moved |= updater.can_advance
            try:
                updater.advance(elements)
            except MemoryFaultError as fault:
                raise type(fault)(
                    fault.reason, fault.address, write=fault.write, transactions=self.transactions()
                ) from None
        return moved

    def _refusals(self) -> dict[int, Finding]:
        """Return the faults that devices detect in their own jobs."""
        found = {}
        for number, node in enumerate(self._nodes):
            end = self.config.memory_bytes
            window = node.pool["window_base.value"], min(node.pool["window_limit.value"], end)
            for core in node.cores:
                refusal = None if core.current is None else core.refusal(*window)
                if refusal is not None and number not in found:
                    found[number] = refusal
        return found

    def _silences(self) -> dict[int, Finding]:
        found = {}
        for number, node in enumerate(self._nodes):
            if not node.working or not node.pool["silence_limit.value"]:
                continue
            for port in (0, 1):
                if node.used(port) and not self._alive(number, port) and number not in found:
                    stream = Stream.LINK1 if port else Stream.LINK0
                    found[number] = Finding(ErrorCause.SILENT, stream, port=port)
        return found

    def _mismatches(self) -> dict[int, Finding]:
        """Return the devices whose job differs from that of the previous device in the ring."""
        found = {}
        for group in range(self.config.groups):
            for number, node in enumerate(self._nodes):
                core = node.cores[group]
                port = core.registers["ring.receive_port"]
                if core.current is None or not self._alive(number, port):
                    continue
                before = self._nodes[self._peer(number, port)].cores[group]
                if before.current is None:
                    continue
                if before.current.description(before.members) != core.current.description(
                    core.members
                ):
                    found.setdefault(number, Finding(ErrorCause.MISMATCH, Stream.RECEIVE))
        return found

    def _advance_ring(self, group: int, fast: bool) -> bool:
        """Advance a ring by a step, if all its devices are ready."""
        cores = [node.cores[group] for node in self._nodes]
        jobs = [core.current for core in cores if core.current is not None]
        if len(jobs) < self.devices or self._stuck or not self._joined[group]:
            return False
        if group not in self._rings:
            form = self._form(jobs) if _sums_as_written(jobs[0]) else None
            sources = self._read_sources(jobs, form)
            if sources is None:
                return True
            result = None if _sums_as_written(jobs[0]) else self._compute(group, sources, jobs[0])
            self._rings[group] = GoldenRing(4 * jobs[0].elements, sources, form, result)
        ring = self._rings[group]
        ring.least_bytes = WAIT_BYTES if fast else STEP_BYTES
        if not self._write_results(group, ring, jobs):
            return True
        if ring.written >= ring.nbytes:
            del self._rings[group]
            self._shown = True
            self._count(group, jobs[0])
            for node, core in zip(self._nodes, cores, strict=True):
                core.complete()
                node.update_busy()
        return True

    def _is_joined(self, group: int) -> bool:
        """Whether frames pass all links of a ring."""
        if self.devices == 1:
            return True
        ports = (node.cores[group].registers["ring.receive_port"] for node in self._nodes)
        return all(self._alive(number, port) for number, port in enumerate(ports))

    def _form(self, jobs: Sequence[GoldenJob]) -> str | None:
        """Format of arrays that are lent in 16 bits; if there are two, those of one are copied."""
        return next(
            (
                form
                for node, job in zip(self._nodes, jobs, strict=True)
                for address in (job.destination, *job.sources)
                if (form := node.memory.form(address)) is not None
            ),
            None,
        )

    def _read_sources(
        self, jobs: Sequence[GoldenJob], form: str | None
    ) -> list[coarse_cpp.Array] | None:
        """Elements of each device, as patterns where they are lent in `form`; None if memory
        refused."""
        found = {}
        for number, (node, job) in enumerate(zip(self._nodes, jobs, strict=True)):
            base = number * self.config.memory_bytes
            if job.nbytes:
                for source in job.sources:
                    unwritten = node.memory.first_not(WRITTEN, source, job.nbytes)
                    if unwritten is not None:
                        reason = "nobody has written there"
                        raise UninitialisedError(reason, base + unwritten, write=False)
                guard = node.memory.first_guard(job.destination, job.nbytes)
                if guard is not None:
                    raise GuardError("a guard is there", base + guard, write=True)
            for source in job.sources:
                finding = self._access(number, Stream.SOURCE, source, job.nbytes, write=False)
                if finding is not None:
                    found.setdefault(number, finding)
        if found:
            self._fail(found)
        if found or self._stuck:
            return None
        return [
            _elements(node.memory.view(source, 4 * job.elements, form), job.elements)
            for node, job in zip(self._nodes, jobs, strict=True)
            for source in job.sources
        ]

    def _compute(self, group: int, sources: Sequence[Any], job: GoldenJob) -> NDArray[np.uint8]:
        """Compute the result, as bytes."""
        result = ring_all_reduce(
            sources,
            operation=ReduceOp(job.operation).name.lower(),
            wire=list(WIRE_FORMATS)[job.wire],
            config=self.config,
            reverse=bool(group % 2),
            scale=job.scale,
            out=self._room(group, sources[0].size),
        )
        return np.ascontiguousarray(result).view(np.uint8)

    def _room(self, group: int, elements: int) -> NDArray[np.float32]:
        """Return memory for the result of a ring, reused by later jobs."""
        if group not in self._rooms or self._rooms[group].size < elements:
            self._rooms[group] = np.empty(elements, np.float32)
        return self._rooms[group][:elements]

    def _write_results(self, group: int, ring: GoldenRing, jobs: Sequence[GoldenJob]) -> bool:
        """Write the results of a step; return whether memory accepted them."""
        nbytes = ring.step.stop - ring.written
        for number, job in enumerate(jobs):
            address = job.destination + ring.written
            finding = self._access(number, Stream.DESTINATION, address, nbytes, write=True)
            if finding is not None:
                self._fail({number: finding})
            if finding is not None or self._stuck:
                return False
        if nbytes:
            self._put_results(group, ring, jobs, nbytes)
        ring.written += nbytes
        return True

    def _put_results(
        self, group: int, ring: GoldenRing, jobs: Sequence[GoldenJob], nbytes: int
    ) -> None:
        """Write the results of a step; sums are computed in place in contiguous memory."""
        written = ring.written
        targets = [
            (node, job.destination + written) for node, job in zip(self._nodes, jobs, strict=True)
        ]
        if ring.result is None:
            places = [node.place(address, nbytes, ring.form) for node, address in targets]
            found = [_elements(place, nbytes // 4) for place in places if place is not None]
            if len(found) == len(places):
                self._sum(group, ring, jobs[0], found)
                return
            data = self._room(group, nbytes // 4)
            self._sum(group, ring, jobs[0], [data])
            result = data.view(np.uint8)
        else:
            result = ring.result[ring.step]
        for node, address in targets:
            node.write_memory(address, result)

    def _sum(
        self, group: int, ring: GoldenRing, job: GoldenJob, outs: Sequence[coarse_cpp.Array]
    ) -> None:
        """The sums of a step, of a job in fp32 or an exact one."""
        halves = ring.form or "bf16"
        if job.divisor:
            coarse_cpp.exact_sum(
                ring.sources,
                outs,
                first=ring.written // 4,
                wire=list(WIRE_FORMATS)[job.wire],
                divisor=job.divisor,
                threads=shared(self._threads),
                halves=halves,
            )
            return
        average = job.operation == ReduceOp.AVERAGE
        coarse_cpp.ring_sum(
            ring.sources,
            outs,
            first=ring.written // 4,
            entry_elements=self.config.entry_elements("fp32"),
            reverse=bool(group % 2),
            scale=np.float32(job.scale) if average else None,
            threads=shared(self._threads),
            halves=halves,
        )

    def _count(self, group: int, job: GoldenJob) -> None:
        """Count the entries of an ended job: its description, and those of each chunk on each link.

        A sum in a ring has 2N - 2. The addends of an exact one go to the last device of their part,
        one after another: h after hop h, of each array.
        """
        if self.devices == 1:
            return
        wire = list(WIRE_FORMATS)[job.wire]
        devices = self.devices
        beats = max(1, -(-job.elements // 16))
        full, rest = divmod(beats, devices * self.config.entry_beats(wire))
        chunks = [self.config.entry_beats(wire)] * full + ([-(-rest // devices)] if rest else [])
        turns = 2 * devices - 2
        if job.divisor:
            turns = job.count * devices * (devices - 1) // 2 + devices - 1
        payload = 1 + turns * sum(chunks) * WIRE_FORMATS[wire]
        for node in self._nodes:
            ring = node.cores[group].registers
            node.count_entries(
                ring["ring.send_port"], ring["ring.receive_port"], 1 + turns * len(chunks), payload
            )

    def _access(
        self, device: int, stream: Stream, address: int, nbytes: int, *, write: bool
    ) -> Finding | None:
        """Return the error response of memory to an access, if any."""
        first = device * self.config.memory_bytes + address
        self._log.append(f"{'write' if write else 'read'} {stream.name} {first:#x}+{nbytes:#x}")
        for armed in self._injections:
            if not nbytes or not armed.hits(write, first, first + nbytes):
                continue
            kind = armed.injection.kind
            if kind in RESPONSES:
                return Finding(MEMORY_CAUSES[write], stream, address, RESPONSES[kind])
            self._stuck |= kind == "never"
        return None

    def _refuses(self, device: int, address: int, nbytes: int, write: bool) -> bool:
        """Whether memory answers an access of a snapshot's copies other than OKAY."""
        first = device * self.config.memory_bytes + address
        hit = [each for each in self._injections if each.hits(write, first, first + nbytes)]
        return any(each.injection.kind in RESPONSES for each in hit)

    def _fail(self, found: Mapping[int, Finding]) -> None:
        """End the jobs of devices with faults, and of all devices that they reach."""
        self._rings.clear()
        self._changed = self._shown = True
        for number, finding in found.items():
            self._nodes[number].fail(finding, number, finding.cause, finding.port)
        fresh = deque(found)
        origin = {number: number for number in found}
        while fresh:
            number = fresh.popleft()
            for port in (0, 1):
                peer = self._peer(number, port)
                if not self._is_alive(number, port) or peer in origin:
                    continue
                origin[peer] = origin[number]
                fresh.append(peer)
                first = found[origin[peer]]
                if not self._nodes[peer].failed:
                    self._nodes[peer].fail(
                        Finding(ErrorCause.PEER), origin[peer], first.cause, first.port
                    )

    def _peer(self, device: int, port: int) -> int:
        """Return the device at the other end of a link."""
        return (device + (1 if port else -1)) % self.devices

    def _alive(self, device: int, port: int) -> bool:
        """Whether frames passed a link, both ways, at the last change of state."""
        return self._links[device][port]

    def _is_alive(self, device: int, port: int) -> bool:
        """Whether frames pass a link, both ways."""
        node, peer = self._nodes[device], self._nodes[self._peer(device, port)]
        joined = self.devices > 2 or port == 1 - device  # two devices have only one link
        return (
            joined
            and node.used(port)
            and peer.used(1 - port)
            and not node.dead
            and not peer.dead
            and node.epoch == peer.epoch
        )

    def _place(self, address: int, nbytes: int) -> tuple[GoldenDevice, int]:
        """Return the device of a memory range, and the local address."""
        self._check_open()
        device, local = divmod(address, self.config.memory_bytes)
        if not 0 <= device < self.devices or local + nbytes > self.config.memory_bytes:
            raise OutOfBoundsError("memory access", address, address + nbytes, self.capacity_bytes)
        return self._nodes[device], local

    def _check_device(self, device: int) -> GoldenDevice:
        self._check_open()
        if not is_whole(device) or not 0 <= device < self.devices:
            raise ArgumentError(f"device must be from 0 to {self.devices - 1}, not {device!r}")
        return self._nodes[device]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedDeviceError("golden:coarse", "use the model")
