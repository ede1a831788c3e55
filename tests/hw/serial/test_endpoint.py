"""An endpoint, request by request: sessions, repetitions, and buses that do not answer in time."""

from collections.abc import Callable, Coroutine
from dataclasses import replace

import pytest
from amaranth import Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import wiring

from nearstep_hw.serial.answer_writer import AnswerWriter, ManifestSizeError
from nearstep_hw.serial.byte_endpoint import ByteEndpoint
from nearstep_hw.serial.memory_access import MemoryAccess
from nearstep_hw.serial.timeout import Timeout
from nearstep_sim.bench.axi_memory import Stalls
from nearstep_spec.serial.framing import to_frame
from nearstep_spec.serial.protocol import (
    ANSWER_BIT,
    REQUEST_BYTES,
    Answer,
    Op,
    Request,
    Space,
    Status,
)

from .endpoint_bench import ByteLine, EndpointBench, SimulatorPins, ask, simulate
from .model_board import ADDRESS_WIDTH, MANIFEST, WINDOW, ModelBoard, memory_of, registers

TIMEOUT = 60
SYNC = Request(op=Op.SYNC, address=0x7E7D_0102_7E7D)
BAD = b"\x11\x05" + bytes(10)
"""A read of memory of no bytes, with data."""
UNKNOWN = b"\xff" * 12


class Bench:
    """A `ByteEndpoint` beside the model."""

    def __init__(self, pins: SimulatorPins, *, beat_bytes: int = 4) -> None:
        memory = memory_of(beat_bytes=beat_bytes)
        self.board = EndpointBench(pins, memory=memory, registers=registers())
        self.line = ByteLine(self.board)
        self.model = ModelBoard(beat_bytes=beat_bytes, memory=memory.data.copy())
        self.checks = 0

    async def same(self, *requests: Request | bytes) -> None:
        """The answers must be those of the model."""
        bodies = [each if isinstance(each, bytes) else each.encode() for each in requests]
        wanted = [self.model.answer(body) for body in bodies]
        dropped = [index for index, answer in enumerate(wanted) if answer is None]
        found = await ask(self.line, bodies, WINDOW, dropped=dropped)
        assert found == [answer for answer in wanted if answer is not None]
        self.checks += len(wanted)

    async def answer(self, request: Request) -> Answer:
        (found,) = await ask(self.line, [request.encode()])
        self.checks += 1
        return Answer.decode(found)

    def end(self, checks: int) -> None:
        """Everything behind the ports must be as it is in the model."""
        assert self.board.registers == self.model.registers
        assert (self.board.memory.data == self.model.memory).all()
        self.board.checker.finish()
        assert self.checks == checks


def endpoint(width: int = 32) -> ByteEndpoint:
    return ByteEndpoint(
        manifest=MANIFEST,
        address_width=ADDRESS_WIDTH,
        data_width=width,
        window=WINDOW,
        timeout_cycles=TIMEOUT,
    )


def run(body: Callable[[Bench], Coroutine[object, object, None]], width: int = 32) -> None:
    async def testbench(pins: SimulatorPins) -> None:
        await body(Bench(pins, beat_bytes=width // 8))

    simulate(endpoint(width), testbench)


def read(space: Space, address: int, length: int = 4, sequence: int = 0) -> Request:
    return Request(op=Op.READ, space=space, address=address, length=length, sequence=sequence)


def write(space: Space, address: int, data: bytes, sequence: int = 0) -> Request:
    return Request(
        op=Op.WRITE, space=space, address=address, length=len(data), data=data, sequence=sequence
    )


def test_a_session_begins_with_sync() -> None:
    async def body(bench: Bench) -> None:
        await bench.same(read(Space.BOARD, 0), write(Space.MEMORY, 3, b"abc"), BAD, UNKNOWN)
        await bench.same(SYNC, read(Space.BOARD, 0), BAD, UNKNOWN)
        for space in Space:
            await bench.same(read(space, 8, 8), write(space, 4, b"\x01\x02\x03\x7e", sequence=9))
        bench.end(checks=8 + 2 * len(Space))

    run(body)


def test_a_repeated_write_of_registers_is_carried_out_once() -> None:
    async def body(bench: Bench) -> None:
        first = write(Space.REGISTERS, 16, b"\x01\0\0\0", sequence=1)
        failing = write(Space.CONTROLLER, 0x7FC, bytes(8), sequence=2)
        await bench.same(SYNC, first, first, first)
        assert bench.board.registers["csr"].accesses == 1
        await bench.same(failing, failing, replace(failing, space=Space.BOARD))
        assert bench.board.registers["wishbone"].accesses == 2
        # Something else was carried out since: it is another write.
        await bench.same(first, read(Space.BOARD, 0, sequence=1), first)
        assert bench.board.registers["csr"].accesses == 3
        # SYNC with the number of the session changes nothing, with another one it does.
        await bench.same(SYNC, first)
        assert bench.board.registers["csr"].accesses == 3
        for bit in (0, 47):
            await bench.same(replace(SYNC, address=SYNC.address ^ 1 << bit), first)
        assert bench.board.registers["csr"].accesses == 5
        bench.end(checks=16)

    run(body)


def test_what_is_no_request_is_dropped_and_leaves_the_record() -> None:
    """Send answers, as a line that echoes does, and ops and spaces that nobody knows."""

    async def body(bench: Bench) -> None:
        first = write(Space.REGISTERS, 16, b"\x01\0\0\0", sequence=1)
        await bench.same(SYNC, first)
        kinds = [first.encode()[0] | ANSWER_BIT, 0x03, 0x51]
        unknown = [bytes([kind]) + first.encode()[1:] for kind in kinds]
        echoes = list(bench.line.bodies)
        data = Answer(op=Op.READ, space=Space.MEMORY, sequence=1, data=bytes(40)).encode()
        for none in (*unknown, *(echo for echo in echoes if len(echo) >= REQUEST_BYTES), data):
            await bench.same(none, first)
        await bench.same(BAD, first)
        assert bench.board.registers["csr"].accesses == 1
        assert bench.board.dropped == 0
        bench.end(checks=2 + 2 * 5 + 2)

    run(body)


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_late_answers_of_memory_harm_no_request_behind(op: Op) -> None:
    async def body(bench: Bench) -> None:
        request = read(Space.MEMORY, 0x102, 70)
        if op is Op.WRITE:
            request = write(Space.MEMORY, 0x102, bytes(range(70)))
        await bench.same(SYNC)
        bench.board.memory.stalls = Stalls(r=1.0, b=1.0)
        late = await bench.answer(request)
        assert (late.status, late.failed_at) == (Status.BUS_TIMEOUT, 0x102)
        # The bus is still busy: nothing else begins.
        waits = await bench.answer(write(Space.MEMORY, 0x200, b"never"))
        assert (waits.status, waits.failed_at) == (Status.BUS_TIMEOUT, 0x200)
        bench.board.memory.stalls = Stalls()
        if op is Op.WRITE:  # its first burst was carried out all the same
            bench.model.memory[0x102:0x140] = range(0x3E)
        await bench.same(read(Space.MEMORY, 0x100, 40), write(Space.MEMORY, 0x204, b"now"))
        bench.end(checks=5)

    run(body)


def test_late_answers_of_registers_harm_no_request_behind() -> None:
    async def body(bench: Bench) -> None:
        await bench.same(SYNC)
        bench.board.late = 4 * TIMEOUT
        bench.model.registers["csr"].accesses += 1
        late = await bench.answer(read(Space.REGISTERS, 0x20))
        assert (late.status, late.failed_at) == (Status.BUS_TIMEOUT, 0x20)
        waits = await bench.answer(read(Space.REGISTERS, 0x24))
        assert (waits.status, waits.failed_at) == (Status.BUS_TIMEOUT, 0x24)
        bench.board.late = 1
        for _ in range(4 * TIMEOUT):
            await bench.line.step()
        await bench.same(read(Space.REGISTERS, 0x28), read(Space.BOARD, 0x28))
        bench.end(checks=5)

    run(body)


def test_a_wishbone_cycle_is_given_up() -> None:
    async def body(bench: Bench) -> None:
        await bench.same(SYNC)
        bench.board.slow = 2 * TIMEOUT
        late = await bench.answer(write(Space.CONTROLLER, 0xF000_0008, bytes(8)))
        assert (late.status, late.failed_at) == (Status.BUS_TIMEOUT, 0xF000_0008)
        bench.board.slow = 0
        await bench.same(read(Space.CONTROLLER, 0xF000_0008, 8), read(Space.CONTROLLER, 1 << 32))
        bench.end(checks=4)

    run(body)


def test_what_was_owed_is_forgotten_in_a_reset_of_the_device() -> None:
    async def body(bench: Bench) -> None:
        await bench.same(SYNC)
        bench.board.memory.stalls = Stalls(r=1.0)
        bench.board.late = 1 << 30
        bench.model.registers["csr"].accesses += 1
        for request in (read(Space.MEMORY, 0), read(Space.REGISTERS, 0)):
            assert (await bench.answer(request)).status is Status.BUS_TIMEOUT
        bench.board.pins.set("i_reset", 1)
        await bench.line.step()
        bench.board.pins.set("i_reset", 0)
        bench.board.memory.reset()
        bench.board.memory.stalls = Stalls()
        bench.board.checker.reset()
        bench.board.owed.clear()
        bench.board.late = 1
        await bench.same(read(Space.MEMORY, 0, 9), read(Space.REGISTERS, 0))
        bench.end(checks=5)

    run(body)


class Restarted(wiring.Component):
    """An endpoint with a reset of its own."""

    def __init__(self, component: wiring.Component) -> None:
        self.component = component
        self.reset = Signal()
        super().__init__(component.signature)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.component = ResetInserter(self.reset)(self.component)
        wiring.connect(m, wiring.flipped(self), self.component)
        return m


def test_a_reset_in_the_middle_of_a_frame_ends_the_session() -> None:
    dut = Restarted(endpoint())

    async def testbench(pins: SimulatorPins) -> None:
        bench = Bench(pins)
        await bench.same(SYNC, read(Space.MEMORY, 1))
        frame = to_frame(read(Space.MEMORY, 2).encode())
        await bench.line.send(frame[:9])
        for level in (1, 0):
            pins.ctx.set(dut.reset, level)
            await bench.line.step()
        bench.model.session = None
        await bench.line.send(frame[9:])
        await bench.same(read(Space.MEMORY, 3), SYNC, read(Space.MEMORY, 3))
        assert bench.board.dropped == 0  # of what came before the first flag
        bench.end(checks=5)

    simulate(dut, testbench)


@pytest.mark.parametrize("size", [1 << 16, 70_000])
def test_a_manifest_that_is_too_long_is_refused(size: int) -> None:
    with pytest.raises(ManifestSizeError, match=f"at most 65535 bytes, not {size}"):
        AnswerWriter(manifest=bytes(size), window=1)


def test_widths_and_windows_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="Window must be 1 to 255, not 256"):
        AnswerWriter(manifest=b"", window=256)
    with pytest.raises(ValueError, match="Data width must be 32 to 1024 bits, not 16"):
        MemoryAccess(address_width=32, data_width=16, timeout_cycles=9)
    with pytest.raises(ValueError, match="Cycles must be at least 1, not 0"):
        Timeout(0)
