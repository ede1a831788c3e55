"""Random requests to a Verilated endpoint, over bytes or over a UART, beside the model."""

import os
import random

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, FallingEdge, RisingEdge
from endpoint_bench import ByteLine, EndpointBench, Line, UartLine, ask
from model_board import WINDOW, ModelBoard, memory_of, random_body, registers

from nearstep_spec.serial.framing import to_frame
from nearstep_spec.serial.protocol import Op, Request

MODE = os.environ["NEARSTEP_STALL"]
SEED = int(os.environ["NEARSTEP_SEED"])
BEAT = int(os.environ["NEARSTEP_BEAT_BYTES"])
COUNT = int(os.environ["NEARSTEP_COUNT"])
MOST = int(os.environ["NEARSTEP_MOST"])
BIT_CYCLES = float(os.environ["NEARSTEP_BIT_CYCLES"])  # 0: there is no UART
OFFER = {"free": 1.0, "source": 0.3, "sink": 1.0, "both": 0.5}[MODE]
TAKE = {"free": 1.0, "source": 1.0, "sink": 0.1, "both": 0.2}[MODE]


class CocotbPins:
    """Ports of a Verilated design."""

    def __init__(self, dut: object) -> None:
        self.dut = dut
        self.handles = {}

    def _handle(self, name: str) -> object:
        if name not in self.handles:
            self.handles[name] = getattr(self.dut, name)
        return self.handles[name]

    def get(self, name: str) -> int:
        return int(self._handle(name).value)

    def set(self, name: str, value: int) -> None:
        self._handle(name).value = value

    async def settle(self) -> None:
        await FallingEdge(self.dut.clk)

    async def tick(self) -> None:
        await RisingEdge(self.dut.clk)


async def started(dut: object) -> Line:
    """A line to an endpoint that was reset."""
    pins = CocotbPins(dut)
    line = {"rx": 1} if BIT_CYCLES else {"i__valid": 0, "i_damage": 0, "o__ready": 0}
    for name, level in {"i_reset": 0, **line}.items():
        pins.set(name, level)
    for name in ("csr__ack", "board__ack", "wishbone__ack", "wishbone__err"):
        pins.set(name, 0)
    dut.rst.value = 1
    cocotb.start_soon(Clock(dut.clk, 10, "ns").start())
    memory = memory_of(beat_bytes=BEAT, mode=MODE, seed=SEED)
    bench = EndpointBench(pins, memory=memory, registers=registers(), seed=SEED)
    await ClockCycles(dut.clk, 3)
    dut.rst.value = 0
    if BIT_CYCLES:
        return UartLine(bench, bit_cycles=BIT_CYCLES)
    return ByteLine(bench, offer=OFFER, take=TAKE)


def damaged(rng: random.Random, body: bytes) -> bytes:
    """Bytes on the line of which no frame is whole."""
    frame = bytearray(to_frame(body))
    kind = rng.randrange(4)
    if kind == 0:  # a bit is wrong, of a byte that is no flag
        place = rng.randrange(1, len(frame) - 1)
        frame[place] ^= 1 << rng.randrange(8)
    elif kind == 1:  # some bytes are missing
        del frame[rng.randrange(1, len(frame) // 2) : len(frame) // 2 + 1]
    elif kind == 2:  # too short
        return to_frame(body[: rng.randrange(10)])
    else:  # anything
        frame = bytearray(rng.randbytes(rng.randrange(40)))
        return bytes([0x7E]) + bytes(frame).replace(b"\x7e", b"") + bytes([0x7D, 0x7E])
    return bytes(frame) + bytes([0x7E])


@cocotb.test()
async def random_requests(dut: object) -> None:
    """Requests, repeated ones and damaged ones; the window full now and then."""
    line = await started(dut)
    bench = line.bench
    model = ModelBoard(beat_bytes=BEAT, memory=bench.memory.data.copy())
    rng = random.Random(SEED)
    kinds = dict.fromkeys(("single", "window", "repeated", "damaged", "sync"), 0)
    sequence = unknown = 0
    for number in range(COUNT):
        chance = rng.random()
        bodies = [random_body(rng, sequence + k, most=MOST) for k in range(WINDOW)]
        if number == 3 or chance < 0.02:
            kind = "sync"
            bodies = [Request(op=Op.SYNC, address=rng.getrandbits(48)).encode()]
        elif chance < 0.2:
            kind = "window"
        elif chance < 0.4:
            kind, bodies = "repeated", bodies[:1] * 2
        elif chance < 0.5:
            kind, bodies = "damaged", []
            await line.send(damaged(rng, random_body(rng, sequence, most=MOST)))
        else:
            kind, bodies = "single", bodies[:1]
        kinds[kind] += 1
        sequence += len(bodies)
        wanted = [model.answer(body) for body in bodies]
        dropped = [index for index, answer in enumerate(wanted) if answer is None]
        unknown += len(dropped)
        found = await ask(line, bodies, WINDOW, dropped=dropped)
        answered = [pair for pair in zip(bodies, wanted, strict=True) if pair[1] is not None]
        for (body, ours), its in zip(answered, found, strict=True):
            assert its == ours, f"{number} {kind} {body[:10].hex()}: {its.hex()}, not {ours.hex()}"
    for name, device in model.registers.items():
        assert bench.registers[name] == device, name
    assert (bench.memory.data == model.memory).all()
    bench.checker.finish()
    print(
        f"{len(line.bodies)} answers, {unknown} unknown, {bench.dropped} dropped, "
        f"{bench.cycles} cycles, {kinds}"
    )
    assert len(line.bodies) > COUNT // 2
    assert bench.dropped >= kinds["damaged"] // 2
    assert not line.deframer.dropped
    assert COUNT < 100 or (all(kinds.values()) and unknown)
