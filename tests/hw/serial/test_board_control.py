"""Registers of a board: counters, and a reset that waits for its isolation."""

import pytest
from amaranth.sim import SimulatorContext

from nearstep_hw.serial.board_control import RESET_CYCLES, BoardControl
from nearstep_spec.boards.registers import IDENT, board_map

from ..simulate import simulate

MAP = board_map()


class Bench:
    """Accesses of registers; every edge is looked at."""

    def __init__(self, ctx: SimulatorContext, dut: BoardControl) -> None:
        self.ctx, self.dut = ctx, dut
        self.cycles = 0
        self.drain = 5  # cycles until the path is idle, once it is cut
        self.left = 0

    async def edge(self, count: int = 1) -> None:
        """An isolation, whose path is idle some cycles after it was asked for."""
        ctx, dut = self.ctx, self.dut
        for _ in range(count):
            isolate, isolated = ctx.get(dut.o_isolate), ctx.get(dut.i_isolated)
            idle = self.left == 0
            assert isolated or not ctx.get(dut.o_reset) or self.cycles < 2, "reset while joined"
            await ctx.tick()
            self.cycles += 1
            ctx.set(dut.i_isolated, isolate or (isolated and not idle))
            if isolate and not isolated:
                self.left = self.drain
            elif self.left:
                self.left -= 1
            ctx.set(dut.i_idle, self.left == 0)

    async def access(self, name: str, value: int | None = None) -> int:
        """Read, or write, the first word of a register; `name+4` is the second one."""
        ctx, csr = self.ctx, self.dut.csr
        register, _, offset = name.partition("+")
        ctx.set(csr.address, MAP[register].offset + int(offset or 0))
        ctx.set(csr.read if value is None else csr.write, 1)
        ctx.set(csr.write_data, value or 0)
        ctx.set(csr.write_mask, 15)
        await self.edge()
        ctx.set(csr.read, 0)
        ctx.set(csr.write, 0)
        while not ctx.get(csr.ack):
            await self.edge()
        assert (ctx.get(csr.ack), ctx.get(csr.error)) == (1, 0)
        word = ctx.get(csr.read_data)
        await self.edge()
        return word

    async def ready(self) -> int:
        """Wait until nothing is reset; the cycles of it."""
        since = self.cycles
        while await self.access("status") & 1:
            assert self.cycles - since < 500
        assert not self.ctx.get(self.dut.o_reset)
        assert not self.ctx.get(self.dut.i_isolated)
        return self.cycles - since


def run(body: object) -> None:
    dut = BoardControl()

    async def testbench(ctx: SimulatorContext) -> None:
        await body(Bench(ctx, dut))

    simulate(dut, testbench)


def test_the_board_begins_with_a_reset_of_its_device() -> None:
    async def body(bench: Bench) -> None:
        assert bench.ctx.get(bench.dut.o_reset)
        assert await bench.ready() > RESET_CYCLES
        assert await bench.access("id") == IDENT
        assert await bench.access("map_hash") == MAP.hash()

    run(body)


@pytest.mark.parametrize("drain", [0, 5, 100])
def test_a_reset_lasts_until_the_path_is_idle(drain: int) -> None:
    async def body(bench: Bench) -> None:
        await bench.ready()
        bench.drain = drain
        await bench.access("memory", 1)
        await bench.access("control", 1)
        assert await bench.access("status") == 3  # from the access on
        assert max(RESET_CYCLES, drain) <= await bench.ready() < max(RESET_CYCLES, drain) + 20
        assert await bench.access("memory") == 1

    run(body)


def test_counters_are_captured_together() -> None:
    async def body(bench: Bench) -> None:
        await bench.ready()
        counted = {"i_dropped": 7, "i_framing_error": 3}
        for name, count in counted.items():
            bench.ctx.set(getattr(bench.dut, name), 1)
            await bench.edge(count)
            bench.ctx.set(getattr(bench.dut, name), 0)
        before = await bench.access("dropped")
        await bench.access("control", 2)
        at = bench.cycles
        await bench.edge(100)
        found = [
            await bench.access(name) for name in ("cycles", "cycles+4", "dropped", "framing_errors")
        ]
        assert before == 0
        assert found == [at - 2, 0, 7, 3]

    run(body)


@pytest.mark.parametrize("source", ["hardware", "host"])
def test_memory_is_ready_when_either_says_so(source: str) -> None:
    async def body(bench: Bench) -> None:
        await bench.ready()
        assert await bench.access("status") == 0
        if source == "host":
            await bench.access("memory", 1)
        else:
            bench.ctx.set(bench.dut.i_memory_ready, 1)
            await bench.edge(2)
        assert await bench.access("status") == 2
        assert bench.ctx.get(bench.dut.o_memory_ready)

    run(body)
