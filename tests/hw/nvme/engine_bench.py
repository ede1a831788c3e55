"""Host and firmware of a queue engine, a clock edge at a time, and the controller in Python beside
it, which does the same things and says what must happen.

A script is a generator that yields for every clock cycle: simulators differ, scripts do not.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nearstep.linux.nvme.admin import ERROR_LOG, AdminCommands
from nearstep.linux.nvme.controller import NvmeController, SubmissionQueue
from nearstep.linux.nvme.namespace import Namespace, Run
from nearstep.linux.nvme.standard import Admin, CommandSet, StatusError
from nearstep.linux.nvme.transfer import Command
from nearstep.linux.pci import BUS_MASTER, COMMAND, DmaError
from nearstep_hw.nvme import layout
from nearstep_hw.nvme.layout import DoneLayout, EventLayout, OrderKind, PartLayout, WalkLayout
from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.axi_memory import DECERR, OKAY, STALL_MODES, AxiMemory, BurstError
from nearstep_sim.bench.axi_sample import Address, AxiSample, ReadBeat, WriteBeat
from nearstep_spec.nvme import (
    FATAL,
    MSIX_PENDING,
    MSIX_TABLE,
    PAGE_BYTES,
    SHUTDOWN_BUSY,
    EngineStatus,
    NvmeConfig,
    Register,
    completed,
)

PAGES = 96
PAGE = PAGE_BYTES
HOLES = frozenset({40, 41})
"""Pages that are not mapped, and neither is anything behind the last one."""

QUIET = 24
"""Cycles without a transfer, after which nothing is under way: no step takes as long."""

ENABLED = 1 | 6 << 4 | 6 << 16 | 4 << 20
OPCODE = 0x42
ORDERS = {
    Admin.DELETE_SQ: OrderKind.DELETE_SUBMISSIONS,
    Admin.CREATE_SQ: OrderKind.CREATE_SUBMISSIONS,
    Admin.DELETE_CQ: OrderKind.DELETE_COMPLETIONS,
    Admin.CREATE_CQ: OrderKind.CREATE_COMPLETIONS,
}


def mapped(address: int, nbytes: int) -> bool:
    pages = range(address // PAGE, (address + nbytes - 1) // PAGE + 1)
    return pages[-1] < PAGES and HOLES.isdisjoint(pages)


def entry(
    opcode: int, identifier: int, *, nsid: int = 0, prp1: int = 0, prp2: int = 0, **dwords: int
) -> bytes:
    """A command; `dw10` and so on set dwords."""
    words = [opcode | identifier << 16, nsid, *[0] * 4,
             prp1 & 0xFFFFFFFF, prp1 >> 32, prp2 & 0xFFFFFFFF, prp2 >> 32, *[0] * 6]  # fmt: skip
    for name, value in dwords.items():
        words[int(name.removeprefix("dw"))] = value
    return struct.pack("<16I", *words)


Parts = list[tuple[int, int]]
Execute = Callable[[SubmissionQueue, Command], int | None]
Answers = dict[tuple[int, int], tuple[int, int] | None]


@dataclass
class Seen:
    """What one of the two has done.

    Attributes
    ----------
    commands : (queue, identifier) of those executed, admin commands and the others apart.
    parts : of each I/O command: its parts and the status of the walk.
    writes : (address, bytes) by page: those of a completion queue are in order.
    vectors : how often each interrupt was requested.
    """

    commands: tuple[list[tuple[int, int]], list[tuple[int, int]]] = field(
        default_factory=lambda: ([], [])
    )
    parts: list[tuple[Parts, int]] = field(default_factory=list)
    writes: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    vectors: dict[int, int] = field(default_factory=dict)

    def wrote(self, address: int, data: bytes) -> None:
        self.writes.setdefault(address // PAGE, []).append((address, data))

    def interrupt(self, vector: int) -> None:
        self.vectors[vector] = self.vectors.get(vector, 0) + 1

    @property
    def count(self) -> int:
        """Values that a comparison compares."""
        return (
            sum(map(len, self.commands))
            + sum(len(parts) + 1 for parts, _ in self.parts)
            + sum(map(len, self.writes.values()))
            + sum(self.vectors.values())
        )


class Echo(Namespace):
    """Walks over the data of every command, and returns CDW10 and CDW11, while the gate is open."""

    command_set = CommandSet.NVM

    def __init__(self, golden: Golden) -> None:
        self.golden = golden

    @property
    def commands(self) -> Mapping[int, Run]:
        return {OPCODE: self._run}

    def _run(self, command: Command) -> int:
        seen, status, parts = self.golden.seen, 0, []
        try:
            parts = command.segments(command.dwords[12])
        except StatusError as refused:
            status = refused.status
        seen.parts.append((parts, status))
        self.golden.held = True
        self.golden.gate.wait()
        self.golden.held = False
        if status:
            raise StatusError(status)
        return command.wide(10)

    def identify_blocks(self) -> bytes:
        return bytes(4096)

    def close(self) -> None:
        pass


class Ram:
    """Memory of a host, and a record of what was written; accesses of what is not mapped fail."""

    def __init__(self) -> None:
        self.memory = np.zeros(PAGES * PAGE, np.uint8)
        self.base = 0
        self.seen = Seen()

    def put(self, address: int, data: bytes) -> None:
        """Change memory as a processor of the host does."""
        self.memory[address : address + len(data)] = list(data)

    def read(self, address: int, nbytes: int) -> bytes:
        at = address ^ self.base
        if not mapped(at, nbytes):
            raise DmaError("read", address, nbytes, "not mapped")
        return self.memory[at : at + nbytes].tobytes()

    def write(self, address: int, data: bytes) -> None:
        at = address ^ self.base
        if not mapped(at, len(data)):
            raise DmaError("write", address, len(data), "not mapped")
        self.memory[at : at + len(data)] = list(data)
        self.seen.wrote(address, data)


class Golden(Ram):
    """`NvmeController` over memory of its own.

    Attributes
    ----------
    seen, memory
    gate : closed, I/O commands do not end.
    held : an I/O command waits at the gate.
    answers : status without its retry bit, and result, of each command, by queue and identifier;
        None if it is completed later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.held = False
        self.answers: Answers = {}
        self._running = [0, 0]
        self.controller = NvmeController([Echo(self)], self._commands, "1")
        self.controller.bus = self
        self.controller.write_config(COMMAND, struct.pack("<H", BUS_MASTER))

    def _commands(self, controller: NvmeController) -> AdminCommands:
        made = AdminCommands(controller)
        made.execute = self._recorded(made.execute, 0)
        made.execute_io = self._recorded(made.execute_io, 1)
        return made

    def _recorded(self, execute: Execute, io: int) -> Execute:
        def run(queue: SubmissionQueue, command: Command) -> int | None:
            key = queue.number, command.identifier
            self.seen.commands[io].append(key)
            self._running[io] += 1
            try:
                found = execute(queue, command)
                self.answers[key] = None if found is None else (0, found)
            except StatusError as refused:
                self.answers[key] = refused.status, 0
                raise
            finally:
                self._running[io] -= 1
            return found

        return run

    def interrupt(self, vector: int) -> None:
        self.seen.interrupt(vector)

    def settle(self) -> None:
        """Wait until nothing is under way, or all that is waits for the gate or for room."""
        deadline = time.monotonic() + 60
        while not self._is_quiet():
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def _is_quiet(self) -> bool:
        controller = self.controller
        with controller.lock:
            held = self.held and not self.gate.is_set()
            queues = [q for q in controller.submissions.values() if not (q.number and held)]
            waits = any(q.pending and not q.completions.is_full for q in queues)
            return not (
                controller._status & SHUTDOWN_BUSY
                or self._running[0]
                or (self._running[1] and not held)
                or any(q.flying for q in queues)
                or (waits and not controller._status & FATAL)
            )

    def read_register(self, offset: int) -> int:
        return int.from_bytes(self.controller.read_bar(0, offset, 4), "little")

    def write_register(self, offset: int, value: int) -> None:
        self.controller.write_bar(0, offset, struct.pack("<I", value))


SOURCES = {"i_done": DoneLayout, "i_event": EventLayout, "i_walk": WalkLayout}
SINKS = ("o_command", "o_answer", "o_part", "o_report")
REQUESTS = {
    "ar": (Address, ("id", "addr", "len", "size", "burst")),
    "aw": (Address, ("id", "addr", "len", "size", "burst")),
    "w": (WriteBeat, ("data", "strb", "last")),
}


class Pins(Protocol):
    """Ports of a design, by the names that they have in Verilog."""

    def get(self, name: str) -> int:
        """The value just before the last clock edge."""

    def set(self, name: str, value: int) -> None:
        """Drive an input from now on."""


class HostMemory(AxiMemory):
    """Answers DECERR where nothing is mapped; `base` as of `Alone`."""

    base = 0

    def _error(self, write: bool, burst: Address) -> BurstError | None:
        nbytes = (burst.len + 1) * self.beat_bytes
        if mapped(burst.addr ^ self.base, nbytes):
            return None
        return BurstError(write=write, nth=0, response=DECERR)

    def _offset(self, address: int) -> int:
        at = address ^ self.base
        return at if mapped(at, self.beat_bytes) else 0


class Bench:
    """The host's memory, its processor and the firmware around an engine.

    Parameters
    ----------
    pins : of the engine.
    answers : as of `Golden`; what is not in it yet is waited for.
    stall : a mode of `STALL_MODES`.
    config : of the engine.
    msix : the design has MSI-X, as `NvmeCard`.

    Attributes
    ----------
    seen, memory
    gate : while it is False, I/O commands do not end.
    alone : every command succeeds, whatever `answers` has.
    forbidden : no access to memory may be shown.
    """

    def __init__(
        self,
        pins: Pins,
        answers: Answers,
        *,
        config: NvmeConfig,
        stall: str,
        seed: int,
        msix: bool = False,
    ) -> None:
        self.pins, self.answers = pins, answers
        self.random = random.Random(seed)
        self.memory = np.zeros(PAGES * PAGE, np.uint8)
        self.axi = HostMemory(self.memory, beat_bytes=16, stalls=STALL_MODES[stall], seed=seed,
                              latency=1 + seed % 5, reorder=True)  # fmt: skip
        self.checker = AxiChecker(beat_bytes=16, read_ids=4, write_ids=1)
        self.stalls = {"free": 0.0, "source": 0.3, "sink": 0.3, "both": 0.5}[stall]
        self.queues = queues = config.io_queues + 1
        self.msix = msix
        self.command_layout = layout.CommandLayout(queues)
        order = layout.OrderLayout(queues=queues, vectors=queues)
        self.layouts = {**SOURCES, "i_order": order}
        self.waiting: dict[str, deque[int]] = {name: deque() for name in self.layouts}
        self._shown: set[str] = set()
        self._ready: dict[str, bool] = dict.fromkeys(SINKS, False)
        self._csr: int | None = None
        self._ack: int | None = None
        self._ending: list[tuple[int, int]] = []
        self._gated: set[tuple[int, int]] = set()
        self._requests: list[int] = []
        self._event: int | None = None
        self._masked = False
        self._walks: deque[tuple[tuple[int, int], Parts]] = deque()
        self._ordered: deque[tuple[int, int]] = deque()
        self.carried_out: dict[tuple[int, int], bool] = {}
        self._unanswered: deque[tuple[int, bytes]] = deque()
        self._address: deque[int] = deque()
        self.seen, self.gate = Seen(), True
        self.idle = self.cycle = 0
        self.forbidden = self.alone = self._enabled = False
        self._messages: dict[tuple[int, int], int] = {}
        self._message: tuple[int, int] | None = None
        self._reply = "sent"

    def step(self) -> None:
        """Take what has happened at a clock edge, and drive the inputs."""
        self.cycle += 1
        self.idle += 1
        self._step_axi()
        self._step_csr()
        self._step_interrupts()
        for name in SINKS:
            if self._ready[name] and self.pins.get(f"{name}__valid"):
                self.idle = 0
                getattr(self, f"_{name[2:]}")(self.pins.get(f"{name}__payload"))
            self._ready[name] = self.random.random() >= self.stalls
            self.pins.set(f"{name}__ready", self._ready[name])
        for name, values in self.waiting.items():
            if name in self._shown and self.pins.get(f"{name}__ready"):
                self.idle = 0
                values.popleft()
                self._shown.remove(name)
            if values and (name in self._shown or self.random.random() >= self.stalls):
                self._shown.add(name)
                self.pins.set(f"{name}__payload", values[0])
            self.pins.set(f"{name}__valid", name in self._shown)
        self._step_firmware()

    def _step_axi(self) -> None:
        pins, sample = self.pins, AxiSample()
        for channel, (kind, fields) in REQUESTS.items():
            if pins.get(f"m_axi__{channel}valid"):
                values = (pins.get(f"m_axi__{channel}{each}") for each in fields)
                setattr(sample, channel, kind(*values))
                assert not self.forbidden, f"{channel} in cycle {self.cycle}, while disabled"
        sample.r, sample.b = self.axi.r, self.axi.b
        answers = {each for each in ("r", "b") if pins.get(f"m_axi__{each}ready")}
        sample.ready = frozenset({*self.axi.ready, *answers})
        self.checker.step(sample)
        if sample.fires("aw"):
            self._address.append(sample.aw.addr)
        if sample.fires("w"):
            self._unanswered.append((sample.w.strb, sample.w.data.to_bytes(16, "little")))
        if sample.fires("b"):
            address, (strobes, data) = self._address.popleft(), self._unanswered.popleft()
            if sample.b.resp == OKAY:
                first = (strobes & -strobes).bit_length() - 1
                self.seen.wrote(address + first, data[first : strobes.bit_length()])
        if any(sample.fires(each) for each in ("ar", "r", "aw", "w", "b")):
            self.idle = 0
        self.axi.step(sample)
        for channel, members in (("r", ("id", "data", "resp", "last")), ("b", ("id", "resp"))):
            shown: ReadBeat | None = getattr(self.axi, channel)
            pins.set(f"m_axi__{channel}valid", shown is not None)
            if shown is not None:
                for each in members:
                    pins.set(f"m_axi__{channel}{each}", getattr(shown, each))
        for channel in REQUESTS:
            pins.set(f"m_axi__{channel}ready", channel in self.axi.ready)

    def _step_interrupts(self) -> None:
        if self.msix:
            port = "cfg_interrupt_msix__"
            if self.pins.get(f"{port}int"):
                assert self._message is None
                self._message = self.pins.get(f"{port}address"), self.pins.get(f"{port}data")
            if self._message is not None:
                self.idle = 0
                if self._reply == "sent":
                    self.seen.interrupt(self._messages[self._message])
                if self._reply != "none":
                    self._message = None
            odd = self._messages and self.random.random() < self.stalls / 2
            self._reply = self.random.choice(("fail", "none")) if odd else "sent"
            for each in ("sent", "fail"):
                self.pins.set(f"{port}{each}", self._reply == each)
            return
        vectors = self.pins.get("o_interrupt")
        for vector in range(vectors.bit_length()):
            if vectors >> vector & 1:
                self.seen.interrupt(vector)

    def set_up(self) -> Iterator[None]:
        """Set up MSI-X with any messages, if the design has it."""
        if not self.msix:
            return
        self.pins.set("cfg_interrupt_msix__enable", 1)
        self._messages = {}
        for vector in range(self.queues):
            address, data = self.random.getrandbits(62) << 2, self.random.getrandbits(32)
            self._messages[address, data] = vector
            for index, value in enumerate((address & 0xFFFFFFFF, address >> 32, data, 0)):
                yield from self.access(MSIX_TABLE + 16 * vector + 4 * index, value)
                yield from self.access(MSIX_TABLE + 16 * vector + 4 * index)
                assert self.result == value
        yield from self.access(MSIX_PENDING)
        assert self.result == 0

    def _step_csr(self) -> None:
        self.pins.set("csr__read", 0)
        self.pins.set("csr__write", 0)
        if self.pins.get("csr__ack"):
            assert not self.pins.get("csr__error")
            self._ack = self.pins.get("csr__read_data")

    def access(self, offset: int, value: int | None = None) -> Iterator[None]:
        """Read a register, or write it; `result` has what was read."""
        pins = self.pins
        pins.set("csr__address", offset)
        pins.set("csr__write_data", value or 0)
        pins.set("csr__write_mask", 0xF)
        pins.set("csr__read", value is None)
        pins.set("csr__write", value is not None)
        self._ack, self.idle = None, 0
        while self._ack is None:
            yield
        self.result = self._ack

    def settle(self) -> Iterator[None]:
        """Wait until nothing is under way."""
        self.idle = 0
        while self.idle < QUIET:
            yield
            assert self.cycle < 1_000_000

    # Firmware

    def _offer(self, name: str, **fields: Any) -> None:
        self.waiting[name].append(self.layouts[name].const(fields).as_value().value)
        self.idle = 0

    def _command(self, payload: int) -> None:
        found = self.command_layout.from_bits(payload)
        queue, data = int(found.queue), int(found.entry).to_bytes(64, "little")
        command = Command(data, None)
        key = queue, command.identifier
        self.seen.commands[queue != 0].append(key)
        if command.opcode == OPCODE:
            self._walks.append((key, []))
            self._offer("i_walk", io=1, prp1=command.wide(6), prp2=command.wide(8),
                        nbytes=command.dwords[12])  # fmt: skip
        elif queue == 0 and command.opcode in ORDERS:
            target = command.bits(11, 31, 16)
            self._ordered.append(key)
            self._offer(
                "i_order", kind=ORDERS[Admin(command.opcode)], number=command.bits(10, 5),
                base=command.wide(6) >> 12, last=command.bits(10, 27, 16),
                target=target & 0xF, vector=target & 0xF, interrupts=command.bits(11, 1, 1),
            )  # fmt: skip
        else:
            self._ending.append(key)

    def _part(self, payload: int) -> None:
        part = PartLayout.from_bits(payload)
        key, parts = self._walks[0]
        if part.end:
            self._walks.popleft()
            self._gated.add(key)
            status = int(part.status)
            self.seen.parts.append(([] if status else parts, status))
            self._ending.append(key)
        else:
            parts.append((int(part.address), int(part.nbytes)))

    def _answer(self, payload: int) -> None:
        key = self._ordered.popleft()
        self.carried_out[key] = bool(payload)
        self._ending.append(key)

    def _report(self, payload: int) -> None:
        if self._event is None and not self._masked:
            self._event = payload << 8 | ERROR_LOG << 16

    def _step_firmware(self) -> None:
        """Flush, complete a request for an event, and end commands whose end is known."""
        self.pins.set("i_flushed", self.pins.get("o_shutting"))
        enabled = bool(self.pins.get("o_enabled"))
        if self._enabled and not enabled:
            self._requests.clear()
            self._event, self._masked = None, False
        self._enabled = enabled
        if self._event is not None and self._requests:
            self._offer("i_event", identifier=self._requests.pop(0), result=self._event)
            self._event, self._masked = None, True
        for key in [*self._ending]:
            if (key in self._gated and not self.gate) or not (self.alone or key in self.answers):
                continue
            self._ending.remove(key)
            self._gated.discard(key)
            found = (0, 0) if self.alone else self.answers[key]
            status, result = found or (0, 0)
            if key in self.carried_out and not self.alone:
                assert self.carried_out.pop(key) == (status == 0), (key, status)
            if found is None:
                self._requests.append(key[1])
            self._offer("i_done", io=key[0] != 0, complete=found is not None, result=result,
                        status=completed(status))  # fmt: skip


class Alone:
    """The engine, whose commands all succeed.

    Parameters
    ----------
    pins, config, options : of `Bench`.

    Attributes
    ----------
    checks : values compared.
    base : high bits of all addresses of memory that the controllers use; addresses in the scripts
        are without.
    """

    def __init__(self, pins: Pins, config: NvmeConfig, *, seed: int, **options: Any) -> None:
        self.bench = Bench(pins, self._answers(), config=config, seed=seed, **options)
        self.bench.alone = True
        self.memory = self.bench.memory
        self.random = random.Random(f"script {seed}")
        self.checks = 0
        self.base = 0
        self._identifier = 0

    def _answers(self) -> Answers:
        return {}

    def move(self) -> None:
        """Draw another base; addresses in registers and commands include it."""
        self.base = self.bench.axi.base = self.random.randrange(1 << 45) << 19

    def put(self, address: int, data: bytes) -> None:
        self.memory[address : address + len(data)] = list(data)

    def write(self, offset: int, value: int) -> Iterator[None]:
        yield from self.bench.access(offset, value)

    def compare(self) -> Iterator[None]:
        yield from self.bench.settle()

    def identifier(self) -> int:
        self._identifier = (self._identifier + 1) & 0xFFFF
        return self._identifier


class Pair(Alone):
    """The engine and the controller in Python, which do the same things.

    Parameters
    ----------
    pins, config, options : of `Bench`.
    """

    def __init__(self, pins: Pins, config: NvmeConfig, **options: Any) -> None:
        self.golden = Golden()
        super().__init__(pins, config, **options)
        self.bench.alone = False
        self.memory = self.golden.memory

    def _answers(self) -> Answers:
        return self.golden.answers

    def move(self) -> None:
        super().move()
        self.golden.base = self.base

    def put(self, address: int, data: bytes) -> None:
        for memory in (self.golden.memory, self.bench.memory):
            memory[address : address + len(data)] = list(data)

    def close(self) -> None:
        self.golden.gate.set()
        self.golden.controller.close()

    def write(self, offset: int, value: int) -> Iterator[None]:
        self.golden.write_register(offset, value)
        yield from self.bench.access(offset, value)

    def compare(self) -> Iterator[None]:
        """Wait for both, and compare all that they have done, then CSTS."""
        self.golden.settle()
        yield from self.bench.settle()
        ours, theirs = self.bench.seen, self.golden.seen
        assert ours.commands == theirs.commands
        assert ours.parts == theirs.parts
        assert ours.writes == theirs.writes
        assert ours.vectors == theirs.vectors
        assert (self.bench.memory == self.golden.memory).all()
        yield from self.bench.access(Register.CSTS)
        assert self.bench.result == self.golden.read_register(Register.CSTS)
        self.checks += 2 + theirs.count
        self.golden.seen, self.bench.seen = Seen(), Seen()


@dataclass
class Queue:
    """A pair of queues of the host; the completion queue may be that of another pair."""

    number: int
    size: int
    base: int
    completions: Ring
    tail: int = 0


@dataclass
class Ring:
    """A completion queue of the host."""

    number: int
    size: int
    base: int
    head: int = 0
    phase: int = 1


class Host:
    """A host of both, which follows the rules.

    Attributes
    ----------
    queues : by number; 0 is the admin queue.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.queues: dict[int, Queue] = {}

    def enable(self, size: int = 4) -> Iterator[None]:
        """Enable the controller, with admin queues of so many entries at pages 1 and 2."""
        pair = self.pair
        ring = Ring(0, size, 2 * PAGE)
        self.queues = {0: Queue(0, size, PAGE, ring)}
        for page in (1, 2, *range(16, 32)):
            pair.put(page * PAGE, bytes(PAGE))
        yield from pair.write(Register.AQA, size - 1 | size - 1 << 16)
        for offset, page in ((0x28, 1), (0x30, 2)):
            address = page * PAGE ^ pair.base
            yield from pair.write(offset, address & 0xFFFFFFFF)
            yield from pair.write(offset + 4, address >> 32)
        yield from pair.write(Register.CC, ENABLED)
        yield from pair.compare()

    def push(self, queue: Queue, data: bytes) -> None:
        self.pair.put(queue.base + 64 * queue.tail, data)
        queue.tail = (queue.tail + 1) % queue.size

    def ring(self, queue: Queue) -> Iterator[None]:
        yield from self.pair.write(Register.DOORBELLS + 8 * queue.number, queue.tail)

    def take(self, ring: Ring, most: int = 1 << 30) -> Iterator[None]:
        """Take completions, and ring the doorbell; `taken` has them."""
        self.taken = []
        while len(self.taken) < most:
            at = ring.base + 16 * ring.head
            found = struct.unpack("<QHHHH", self.pair.memory[at : at + 16].tobytes())
            if found[4] & 1 != ring.phase:
                break
            self.taken.append(found)
            ring.head = (ring.head + 1) % ring.size
            ring.phase ^= ring.head == 0
        if self.taken:
            yield from self.pair.write(Register.DOORBELLS + 8 * ring.number + 4, ring.head)

    def admin(self, opcode: int, **fields: int) -> Iterator[None]:
        """Execute an admin command; `status` has its status."""
        queue = self.queues[0]
        self.push(queue, entry(opcode, self.pair.identifier(), **fields))
        yield from self.ring(queue)
        yield from self.pair.compare()
        yield from self.take(queue.completions)
        self.status = self.taken[-1][4] >> 1 & 0x7FF if self.taken else None

    def create(self, number: int, size: int, ring_size: int) -> Iterator[None]:
        """Create a pair of I/O queues at pages of their own."""
        base, ring = (16 + 2 * number) * PAGE, (17 + 2 * number) * PAGE
        self.pair.put(base, bytes(2 * PAGE))
        yield from self.admin(
            Admin.CREATE_CQ,
            prp1=ring ^ self.pair.base,
            dw10=number | ring_size - 1 << 16,
            dw11=3 | number << 16,
        )
        assert self.status == 0
        yield from self.admin(
            Admin.CREATE_SQ,
            prp1=base ^ self.pair.base,
            dw10=number | size - 1 << 16,
            dw11=1 | number << 16,
        )
        assert self.status == 0
        self.queues[number] = Queue(number, size, base, Ring(number, ring_size, ring))

    def free(self, queue: Queue) -> int:
        """Entries that can be pushed: those that the controller has fetched are free."""
        found = self.pair.golden.controller.submissions[queue.number]
        return queue.size - 1 - found.pending


def transfer(
    draw: random.Random, put: Callable[[int, bytes], None], most_pages: int, base: int = 0
) -> tuple[int, int, int]:
    """PRP 1, PRP 2 and bytes of a transfer, most often one that is right, with its lists; `base` as
    of `Alone`."""
    nbytes = draw.choice((0, 4, 64, PAGE, PAGE + 4, 4 * draw.randrange(most_pages * PAGE // 4)))
    prp1 = draw.randrange(1 << 40) * PAGE + draw.choice((0, 0, 4 * draw.randrange(1024)))
    prp1 += draw.random() < 0.03
    left = nbytes - min(nbytes, PAGE - prp1 % PAGE)
    if left <= PAGE:
        return prp1, draw.randrange(1 << 40) * PAGE + draw.choice((0, 0, 0, 0, 0, 2048)), nbytes
    page = draw.randrange(48, PAGES)
    first = page * PAGE + 8 * draw.choice((0, 0, 1, 510, 511, 500, draw.randrange(512)))
    at, pages = first, -(-left // PAGE)
    while pages:
        slots = min(pages, (PAGE - at % PAGE) // 8)
        words = [draw.randrange(1 << 40) * PAGE for _ in range(slots)]
        pages -= slots
        if pages:
            pages += 1
            page = draw.choice((*range(48, PAGES), *HOLES)) if draw.random() < 0.2 else page ^ 1
            words[-1] = page * PAGE + 8 * (draw.random() < 0.05) ^ base
        if draw.random() < 0.05:
            words[draw.randrange(slots)] += draw.choice((4, 8, 512))
        put(at, struct.pack(f"<{slots}Q", *words))
        at = page * PAGE
    wrong = draw.choice((0, 0, 0, 0, 0, 0, 0, 4, (1 << 50)))
    return prp1, first + wrong ^ base, nbytes


class Traffic:
    """Random deeds of a host, each ended before the next.

    Parameters
    ----------
    pair
    most_pages : of a transfer.
    """

    def __init__(self, pair: Pair, most_pages: int = 20) -> None:
        self.pair, self.draw, self.most_pages = pair, pair.random, most_pages
        self.queues = pair.bench.queues
        self.host = Host(pair)
        self.done: dict[str, int] = {}

    def run(self, count: int) -> Iterator[None]:
        """Do so many deeds."""
        yield from self.begin()
        deeds = {"burst": 12, "deletes": 3, "doorbells": 2, "orders": 2, "disable": 2,
                 "shut_down": 1, "unreadable": 1, "admin": 3, "every_queue": 1}  # fmt: skip
        order = [*deeds]
        while len(order) < count:
            order += self.draw.choices([*deeds], [*deeds.values()])
        for name in order[:count]:
            self.done[name] = self.done.get(name, 0) + 1
            yield from getattr(self, name)()

    def begin(self) -> Iterator[None]:
        yield from self.pair.bench.set_up()
        self.pair.move()
        yield from self.host.enable(self.draw.choice((2, 3, 4, 7)))
        for number in range(1, 1 + self.draw.randrange(1, 4)):
            yield from self.create(number)

    def create(self, number: int) -> Iterator[None]:
        yield from self.host.create(number, self.draw.randrange(2, 9), self.draw.randrange(2, 7))

    def command(self) -> bytes:
        pair = self.pair
        prp1, prp2, nbytes = transfer(self.draw, pair.put, self.most_pages, pair.base)
        opcode = OPCODE if self.draw.random() < 0.95 else 0x43
        return entry(opcode, self.pair.identifier(), nsid=1, prp1=prp1, prp2=prp2, dw12=nbytes,
                     dw10=self.draw.getrandbits(32), dw11=self.draw.getrandbits(32))  # fmt: skip

    def close_gate(self, closed: bool) -> None:
        self.pair.bench.gate = not closed
        (self.pair.golden.gate.clear if closed else self.pair.golden.gate.set)()

    def fill(self) -> Iterator[None]:
        """Commands in several queues while the first of them is held."""
        queues = [each for each in self.host.queues.values() if each.number]
        self.draw.shuffle(queues)
        self.close_gate(True)
        for queue in queues:
            count = self.draw.randrange(self.host.free(queue) + 1)
            for _ in range(count):
                self.host.push(queue, self.command())
            yield from self.host.ring(queue)
            yield from self.pair.compare()

    def take(self) -> Iterator[None]:
        for queue in self.host.queues.values():
            yield from self.host.take(queue.completions, self.draw.choice((0, 1, 3, 100)))
            yield from self.pair.compare()

    def burst(self) -> Iterator[None]:
        yield from self.fill()
        self.close_gate(False)
        yield from self.pair.compare()
        yield from self.take()

    def every_queue(self) -> Iterator[None]:
        """Commands in all queues that there can be, until each has had one; then delete them."""
        more = [n for n in range(1, self.queues) if n not in self.host.queues]
        for number in more:
            yield from self.create(number)
        for _ in range(2):
            yield from self.burst()
        for number in more:
            queue = self.host.queues[number]
            yield from self.empty(queue)
            self.host.push(queue, self.command())
            yield from self.host.ring(queue)
            yield from self.pair.compare()
            yield from self.empty(queue)
            for opcode in (Admin.DELETE_SQ, Admin.DELETE_CQ):
                yield from self.host.admin(opcode, dw10=number)
                assert self.host.status == 0
            del self.host.queues[number]

    def empty(self, queue: Queue) -> Iterator[None]:
        """Take completions of a queue until there are none."""
        self.host.taken = [()]
        while self.host.taken:
            yield from self.host.take(queue.completions)
            yield from self.pair.compare()

    def deletes(self) -> Iterator[None]:
        """Delete a queue, often with commands waiting and one under way, and make it anew."""
        yield from self.fill()
        held = [
            number
            for number, queue in self.pair.golden.controller.submissions.items()
            if number and queue.flying
        ]
        number = self.draw.choice([*(each for each in self.host.queues if each), *3 * held])
        yield from self.host.admin(Admin.DELETE_CQ, dw10=number)
        assert self.host.status != 0
        yield from self.host.admin(Admin.DELETE_SQ, dw10=number)
        assert self.host.status == 0
        self.close_gate(False)
        yield from self.pair.compare()
        yield from self.host.admin(Admin.DELETE_CQ, dw10=number)
        assert self.host.status == 0
        yield from self.create(number)

    def admin(self) -> Iterator[None]:
        yield from self.host.admin(self.draw.choice((Admin.ABORT, 0x7F, Admin.GET_FEATURES)))

    def orders(self) -> Iterator[None]:
        """Orders that are refused."""
        size = self.draw.randrange(1, 8) << 16
        for opcode, dw10, dw11 in (
            (Admin.CREATE_CQ, 1 | size, 3), (Admin.CREATE_SQ, 1 | size, 1 | 1 << 16),
            (Admin.CREATE_SQ, 4 | size, 1 | 4 << 16), (Admin.CREATE_CQ, size, 3),
            (Admin.DELETE_SQ, 4, 0), (Admin.DELETE_CQ, 4, 0), (Admin.DELETE_SQ, 0, 0),
            (Admin.CREATE_CQ, 4, 3),
        ):  # fmt: skip
            yield from self.host.admin(opcode, prp1=8 * PAGE, dw10=dw10, dw11=dw11)
            assert self.host.status not in (0, None)

    def doorbells(self) -> Iterator[None]:
        """Wrong ones, with requests for events; some are completed when there is room."""
        host, queue = self.host, self.host.queues[0]
        for _ in range(min(queue.size - 1, self.draw.randrange(1, 4))):
            host.push(queue, entry(Admin.ASYNC_EVENT, self.pair.identifier()))
            yield from host.ring(queue)
            yield from self.pair.compare()
        for _ in range(self.draw.randrange(1, 4)):
            number, value = self.draw.choice(((8, 1), (9, 0), (300, 1), (0, 99), (1, 1 << 31)))
            yield from self.pair.write(Register.DOORBELLS + 4 * number, value)
            yield from self.pair.compare()
        for _ in range(8):
            yield from host.take(queue.completions)
            yield from self.pair.compare()

    def disable(self) -> Iterator[None]:
        """Disable it with a command under way, and an event that waits for room."""
        yield from self.fill()
        queue = self.host.queues[0]
        for _ in range(queue.size):
            self.host.push(queue, entry(Admin.ASYNC_EVENT, self.pair.identifier()))
            yield from self.host.ring(queue)
            yield from self.pair.compare()
        for _ in range(queue.size):
            yield from self.pair.write(Register.DOORBELLS + 4 * 300, 1)
            yield from self.pair.compare()
        yield from self.pair.write(Register.CC, 0)
        yield from self.pair.compare()
        self.pair.bench.forbidden = True
        self.close_gate(False)
        for number in (0, 2, 3):
            yield from self.pair.write(Register.DOORBELLS + 4 * number, 1)
        yield from self.pair.compare()
        self.pair.bench.forbidden = False
        yield from self.begin()

    def shut_down(self) -> Iterator[None]:
        yield from self.pair.write(Register.CC, ENABLED | self.draw.choice((1, 2)) << 14)
        yield from self.pair.compare()
        yield from self.pair.write(Register.CC, self.draw.choice((ENABLED, 0)))
        yield from self.pair.compare()
        yield from self.pair.write(Register.CC, 0)
        for cc in (ENABLED | 1 << 7, ENABLED & ~(7 << 4) | 2 << 4):  # no such page, no such sets
            yield from self.pair.write(Register.CC, cc)
            yield from self.pair.compare()
            yield from self.pair.write(Register.CC, 0)
        yield from self.begin()

    def unreadable(self) -> Iterator[None]:
        """A queue that is not in memory."""
        which = self.draw.randrange(2)
        pages = [(min(HOLES), 15), (14, min(HOLES))][which]
        base, ring = (page * PAGE ^ self.pair.base for page in pages)
        self.pair.put(14 * PAGE, self.command())
        admin = self.host.admin
        yield from admin(Admin.CREATE_CQ, prp1=ring, dw10=5 | 3 << 16, dw11=1)
        yield from admin(Admin.CREATE_SQ, prp1=base, dw10=5 | 3 << 16, dw11=1 | 5 << 16)
        yield from self.pair.write(Register.DOORBELLS + 8 * 5, 1)
        yield from self.pair.compare()
        assert self.pair.golden.read_register(Register.CSTS) == 3
        yield from self.pair.write(Register.CC, 0)
        yield from self.pair.compare()
        yield from self.begin()


class RandomResets:
    """The controller is disabled in any cycle, with commands, completions and walks under way.

    Attributes
    ----------
    completed : commands that had a completion by then, of how many.
    """

    def __init__(self, alone: Alone) -> None:
        self.alone, self.draw = alone, alone.random
        self.completed = [0, 0]

    def run(self, count: int) -> Iterator[None]:
        """Disable it so many times."""
        alone, bench = self.alone, self.alone.bench
        yield from bench.set_up()
        for _ in range(count):
            host = Host(alone)
            yield from host.enable(4)
            yield from host.create(1, 12, self.draw.randrange(2, 13))
            yield from host.create(2, 12, self.draw.randrange(2, 13))
            pushed: dict[int, list[int]] = {1: [], 2: []}
            for number in (1, 2):
                queue = host.queues[number]
                for _ in range(11):
                    pushed[number].append(alone.identifier())
                    prp1, prp2, nbytes = transfer(self.draw, alone.put, 12)
                    host.push(queue, entry(OPCODE, pushed[number][-1], nsid=1, prp1=prp1,
                                           prp2=prp2, dw12=nbytes))  # fmt: skip
                yield from host.ring(queue)
            if self.draw.random() < 0.5:
                host.push(host.queues[0], entry(Admin.DELETE_SQ, alone.identifier(), dw10=1))
                yield from host.ring(host.queues[0])
            for _ in range(self.draw.randrange(300)):
                yield
            yield from alone.write(Register.CC, 0)
            yield from self._until_disabled()
            bench.forbidden = True
            yield from bench.settle()
            for number in (1, 2):
                self._check(host.queues[number], pushed[number])
            bench.forbidden = False

    def _until_disabled(self) -> Iterator[None]:
        bench, begin = self.alone.bench, self.alone.bench.cycle
        while True:
            yield from bench.access(Register.CSTS)
            if not bench.result & 1:
                break
            assert bench.cycle - begin < 200, "CSTS.RDY does not fall"
        self.alone.checks += 1

    def _check(self, queue: Queue, pushed: list[int]) -> None:
        """Completions are those of the first commands, or of some that were aborted, in order."""
        ring, found = queue.completions, []
        for at in range(ring.base, ring.base + 16 * ring.size, 16):
            fields = struct.unpack("<QHHHH", self.alone.memory[at : at + 16].tobytes())
            if not fields[4] & 1:
                break
            assert fields[2] == queue.number
            assert fields[4] >> 1 in (0, completed(EngineStatus.ABORTED_BY_DELETION))
            found.append(fields[3])
        assert found == pushed[: len(found)]
        assert len(found) < ring.size  # one entry stays free
        self.completed[0] += len(found)
        self.completed[1] += len(pushed)
        self.alone.checks += 1 + len(found)
