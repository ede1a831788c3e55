"""An endpoint in a simulator: a line on one side, memory and registers on the other."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Protocol

from amaranth.hdl import Const, Value
from amaranth.lib import wiring
from amaranth.sim import Simulator, SimulatorContext

from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.axi_memory import AxiMemory
from nearstep_sim.bench.axi_sample import (
    Address,
    AxiSample,
    ReadBeat,
    WriteBeat,
    WriteResponse,
)
from nearstep_spec.serial.framing import Deframer, to_frame
from nearstep_spec.serial.protocol import MOST_ANSWER

PAYLOADS = {
    "ar": (Address, ("id", "addr", "len", "size", "burst")),
    "r": (ReadBeat, ("id", "data", "resp", "last")),
    "aw": (Address, ("id", "addr", "len", "size", "burst")),
    "w": (WriteBeat, ("data", "strb", "last")),
    "b": (WriteResponse, ("id", "resp")),
}


Access = tuple[bool, int]
"""How an access of a word ended: that it failed, and what was read."""


class Registers(Protocol):
    """Words behind a port; None, or no, where an access fails."""

    def read(self, address: int) -> int | None: ...

    def write(self, address: int, value: int) -> bool: ...


class Pins(Protocol):
    """Ports of a design, by their names in Verilog."""

    def get(self, name: str) -> int: ...

    def set(self, name: str, value: int) -> None: ...

    async def settle(self) -> None:
        """Wait until outputs are those of the inputs that were set."""

    async def tick(self) -> None:
        """Wait for the next clock edge."""


class SimulatorPins:
    """Ports of a component in Amaranth's simulator."""

    def __init__(self, ctx: SimulatorContext, dut: wiring.Component) -> None:
        self.ctx = ctx
        self.signals = {}
        self.shown: dict[str, int] = {}
        for path, _, value in dut.signature.flatten(dut):
            *front, last = map(str, path)
            if front[:1] == ["m_axi"] and len(front) == 2:  # a channel has the names of AMBA
                prefix = "__".join(front)
                if last == "payload":
                    members = {name: value[name] for name, _ in value.shape()}
                else:
                    members = {last: value}
                self.signals |= {prefix + name: Value.cast(v) for name, v in members.items()}
            elif not isinstance(value, Const):
                self.signals["__".join(map(str, path))] = Value.cast(value)

    def get(self, name: str) -> int:
        return self.ctx.get(self.signals[name])

    def set(self, name: str, value: int) -> None:
        if self.shown.get(name) != value:  # a simulator is slow to find that out
            self.shown[name] = value
            self.ctx.set(self.signals[name], value)

    async def settle(self) -> None:
        pass

    async def tick(self) -> None:
        await self.ctx.tick()


def sample(pins: Pins) -> AxiSample:
    """What the memory port shows now."""
    seen = AxiSample()
    ready = []
    for channel, (layout, names) in PAYLOADS.items():
        if pins.get(f"m_axi__{channel}valid"):
            values = (pins.get(f"m_axi__{channel}{name}") for name in names)
            setattr(seen, channel, layout(*values))
            if pins.get(f"m_axi__{channel}ready"):
                ready.append(channel)
    seen.ready = frozenset(ready)
    return seen


def drive(pins: Pins, memory: AxiMemory) -> None:
    """Show what the memory shows."""
    for channel in ("r", "b"):
        shown = getattr(memory, channel)
        pins.set(f"m_axi__{channel}valid", int(shown is not None))
        if shown is not None:
            for name, value in zip(PAYLOADS[channel][1], shown, strict=True):
                pins.set(f"m_axi__{channel}{name}", value)
    for channel in ("ar", "aw", "w"):
        pins.set(f"m_axi__{channel}ready", int(channel in memory.ready))


class EndpointBench:
    """Steps an endpoint, and answers for what is around it.

    Parameters
    ----------
    pins : with the ports of an endpoint.
    memory, registers : behind the ports; registers by the name of theirs.
    seed

    Attributes
    ----------
    dropped : frames that the endpoint has dropped.
    late : cycles that registers of the device take to answer, 1 as they should.
    slow : cycles that a Wishbone cycle takes at least.
    """

    def __init__(
        self, pins: Pins, *, memory: AxiMemory, registers: Mapping[str, Registers], seed: int = 0
    ) -> None:
        self.pins = pins
        self.random = random.Random(seed)
        self.memory = memory
        self.checker = AxiChecker(beat_bytes=memory.beat_bytes, read_ids=1, write_ids=1)
        self.registers = registers
        self.dropped = 0
        self.cycles = 0
        self.late = 1
        self.slow = 0
        self.owed: deque[tuple[int, Access]] = deque()
        self.waited = 0
        drive(pins, self.memory)

    async def step(self) -> None:
        """One clock edge."""
        pins = self.pins
        seen = sample(pins)
        self.dropped += pins.get("o_dropped")
        device, board = (self._csr(name) for name in ("csr", "board"))
        wishbone = self._wishbone()
        await pins.tick()
        self.cycles += 1
        self.checker.step(seen)
        self.memory.step(seen)
        drive(pins, self.memory)
        if device is not None:
            self.owed.append((self.cycles + self.late - 1, device))
            device = None
        if self.owed and self.owed[0][0] <= self.cycles:
            device = self.owed.popleft()[1]
        for name, answer in (("csr", device), ("board", board)):
            failed, word = answer or (False, 0)
            pins.set(f"{name}__ack", int(answer is not None))
            pins.set(f"{name}__error", int(failed))
            pins.set(f"{name}__read_data", word)
        failed, word = wishbone or (False, 0)
        pins.set("wishbone__ack", int(wishbone is not None and not failed))
        pins.set("wishbone__err", int(failed))
        pins.set("wishbone__dat_r", word)

    def _csr(self, name: str) -> Access | None:
        pins = self.pins
        read, write = pins.get(f"{name}__read"), pins.get(f"{name}__write")
        if not (read or write):
            return None
        assert not (read and write)
        assert pins.get(f"{name}__write_mask") == 15
        assert not pins.get(f"{name}__ack"), "a request in the cycle of an ack"
        address, value = pins.get(f"{name}__address"), pins.get(f"{name}__write_data")
        return self._access(name, address, write, value)

    def _access(self, name: str, address: int, write: int, value: int) -> Access:
        device = self.registers[name]
        if write:
            return not device.write(address, value), 0
        word = device.read(address)
        return word is None, word or 0

    def _wishbone(self) -> Access | None:
        pins = self.pins
        strobe = pins.get("wishbone__stb")
        assert pins.get("wishbone__cyc") == strobe
        if not strobe or pins.get("wishbone__ack") or pins.get("wishbone__err"):
            self.waited = 0
            return None
        self.waited += 1
        if self.waited <= self.slow or self.random.random() < 0.3:
            return None
        assert pins.get("wishbone__sel") == 15
        address, value = 4 * pins.get("wishbone__adr"), pins.get("wishbone__dat_w")
        return self._access("wishbone", address, pins.get("wishbone__we"), value)


class Line:
    """Bytes to and from an endpoint, cycle by cycle.

    Attributes
    ----------
    bodies : of the frames that have come out.
    """

    def __init__(self, bench: EndpointBench) -> None:
        self.bench = bench
        self.bodies: list[bytes] = []
        self.deframer = Deframer(MOST_ANSWER)

    def hear(self, byte: int) -> None:
        """A byte has come out."""
        self.bodies += self.deframer.feed(bytes([byte]))

    async def step(self) -> None:
        """A cycle in which nothing goes in."""
        raise NotImplementedError

    async def send(self, data: bytes) -> None:
        raise NotImplementedError

    async def until(self, count: int, *, limit: int = 20_000) -> None:
        """Wait until so many frames have come out."""
        for _ in range(limit):
            if len(self.bodies) >= count:
                return
            await self.step()
        raise AssertionError(
            f"{len(self.bodies)} answers after {limit} cycles, not {count}; "
            f"{self.bench.dropped} frames dropped, {self.deframer.dropped} of answers"
        )


class ByteLine(Line):
    """The line of a `ByteEndpoint`, with gaps.

    Parameters
    ----------
    bench
    offer, take : chance, each cycle, that a byte is offered, and that one is taken.
    """

    def __init__(self, bench: EndpointBench, *, offer: float = 1.0, take: float = 1.0) -> None:
        super().__init__(bench)
        self.offer, self.take = offer, take

    async def step(self, byte: int | None = None) -> None:
        pins = self.bench.pins
        await pins.settle()
        pins.set("i__valid", int(byte is not None))
        pins.set("i__payload", byte or 0)
        ready = self.bench.random.random() < self.take
        pins.set("o__ready", int(ready))
        if ready and pins.get("o__valid"):
            self.hear(pins.get("o__payload"))
        await self.bench.step()

    async def send(self, data: bytes) -> None:
        for byte in data:
            while self.bench.random.random() >= self.offer:
                await self.step()
            await self.step(byte)


class UartLine(Line):
    """The line of a `SerialEndpoint`, of a host whose bits have another length.

    Parameters
    ----------
    bench
    bit_cycles : cycles of the endpoint that a bit of the host takes.
    """

    def __init__(self, bench: EndpointBench, *, bit_cycles: float) -> None:
        super().__init__(bench)
        self.bit_cycles = bit_cycles
        self.shown = 1
        self.since: int | None = None  # cycles since the start bit of a byte that comes out began
        self.bits: list[int] = []

    async def step(self) -> None:
        pins = self.bench.pins
        await pins.settle()
        pins.set("rx", self.shown)
        self._listen(pins.get("tx"))
        await self.bench.step()

    def _listen(self, level: int) -> None:
        if self.since is None:
            self.since = None if level else 0
            self.bits.clear()
        if self.since is None:
            return
        self.since += 1
        if self.since < (len(self.bits) + 0.5) * self.bit_cycles:
            return
        self.bits.append(level)
        if len(self.bits) == 10:
            assert (self.bits[0], self.bits[9]) == (0, 1), "a start bit and a stop bit"
            self.hear(sum(bit << k for k, bit in enumerate(self.bits[1:9])))
            self.since = None

    async def send(self, data: bytes) -> None:
        end = 0.0
        cycle = 0
        for byte in data:
            for level in (0, *(byte >> k & 1 for k in range(8)), 1):
                self.shown = level
                end += self.bit_cycles
                while cycle < end:
                    await self.step()
                    cycle += 1


async def ask(
    line: Line, bodies: Sequence[bytes], window: int = 1, *, dropped: Collection[int] = ()
) -> list[bytes]:
    """Send frames, so many ahead of their answers; give the answers.

    Those with the numbers in `dropped` get none; with such ones nothing is sent ahead.
    """
    first = len(line.bodies)
    ahead = 1 if dropped else window
    for number, body in enumerate(bodies):
        before = range(number + 1 - ahead)
        await line.until(first + sum(each not in dropped for each in before))
        await line.send(to_frame(body))
    await line.until(first + len(bodies) - len(dropped))
    return line.bodies[first:]


def simulate(
    dut: wiring.Component, body: Callable[[SimulatorPins], Coroutine[object, object, None]]
) -> None:
    """Run a bench on a component."""

    async def testbench(ctx: SimulatorContext) -> None:
        await body(SimulatorPins(ctx, dut))

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(testbench)
    simulator.run()
