"""The AXI4-Lite adapter in front of a bank, cycle by cycle and under cocotb."""

from collections.abc import Callable
from pathlib import Path

from amaranth.sim import Simulator, SimulatorContext

from nearstep_spec.csr.block import Response
from nearstep_spec.csr.model import RegisterMap

from .sample import AxiLiteBlock

HERE = Path(__file__).parent
TOP = "axi_lite_block"
MODES = ("free", "source", "sink", "both")


def simulate(register_map: RegisterMap, body: Callable) -> None:
    block = AxiLiteBlock(register_map)
    simulator = Simulator(block)
    simulator.add_clock(1e-6)

    async def testbench(ctx: SimulatorContext) -> None:
        await body(ctx, block)

    simulator.add_testbench(testbench)
    simulator.run()


async def handshake(ctx: SimulatorContext, channel: object, prefix: str, **payload: int) -> None:
    """Offers one transfer of a channel until it is taken."""
    for name, value in payload.items():
        ctx.set(getattr(channel, name), value)
    ctx.set(getattr(channel, f"{prefix}valid"), 1)
    await cycles_until(ctx, getattr(channel, f"{prefix}ready"))
    await ctx.tick()
    ctx.set(getattr(channel, f"{prefix}valid"), 0)


async def cycles_until(ctx: SimulatorContext, signal: object, limit: int = 20) -> int:
    for cycle in range(limit):
        if ctx.get(signal):
            return cycle
        await ctx.tick()
    raise AssertionError(f"{signal!r} stays low for {limit} cycles")


def test_address_and_data_of_a_write_come_in_any_order(every_kind: RegisterMap) -> None:
    async def body(ctx: SimulatorContext, block: AxiLiteBlock) -> None:
        axi, address = block.s_axil, every_kind["free"].offset
        ctx.set(axi.bready, 1)
        for value, order in ((0x1234, "aw w"), (0x5678, "w aw")):
            for channel in order.split():
                if channel == "aw":
                    await handshake(ctx, axi, "aw", awaddr=address)
                else:
                    await handshake(ctx, axi, "w", wdata=value, wstrb=0xF)
                if channel == order.split()[0]:
                    await ctx.tick().repeat(5)
                    assert not ctx.get(axi.bvalid)
            assert await cycles_until(ctx, axi.bvalid) == 2
            assert ctx.get(axi.bresp) == Response.OKAY
            assert ctx.get(block.o_free) == value
            await ctx.tick()
            assert not ctx.get(axi.bvalid)

    simulate(every_kind, body)


def test_read_and_write_take_turns(every_kind: RegisterMap) -> None:
    async def body(ctx: SimulatorContext, block: AxiLiteBlock) -> None:
        axi, address = block.s_axil, every_kind["free"].offset
        for name, value in {
            "awaddr": address, "awvalid": 1, "wvalid": 1, "wstrb": 0xF, "bready": 1,
            "araddr": address, "arvalid": 1, "rready": 1,
        }.items():  # fmt: skip
            ctx.set(getattr(axi, name), value)
        answers = {"b": 0, "r": 0}
        for _ in range(100):
            await ctx.tick()
            answers["b"] += ctx.get(axi.bvalid)
            answers["r"] += ctx.get(axi.rvalid)
        print(answers)
        assert min(answers.values()) >= 23
        assert abs(answers["b"] - answers["r"]) <= 1

    simulate(every_kind, body)


def test_answer_is_held_until_it_is_taken(every_kind: RegisterMap) -> None:
    async def body(ctx: SimulatorContext, block: AxiLiteBlock) -> None:
        axi = block.s_axil
        await handshake(ctx, axi, "ar", araddr=every_kind["id"].offset)
        await handshake(ctx, axi, "ar", araddr=every_kind["free"].offset)
        await cycles_until(ctx, axi.rvalid)
        for _ in range(10):
            assert ctx.get(axi.rvalid)
            assert ctx.get(axi.rdata) == 0xCAFE_F00D
            await ctx.tick()
        ctx.set(axi.rready, 1)
        await ctx.tick()
        assert not ctx.get(axi.rvalid)
        await cycles_until(ctx, axi.rvalid)
        assert ctx.get(axi.rdata) == 7

    simulate(every_kind, body)


def test_errors_are_answered_with_slverr(every_kind: RegisterMap) -> None:
    def offset(name: str) -> int:
        return every_kind[name].offset

    async def body(ctx: SimulatorContext, block: AxiLiteBlock) -> None:
        axi = block.s_axil
        ctx.set(axi.bready, 1)
        ctx.set(axi.rready, 1)

        async def write(address: int, strobe: int = 0xF) -> int:
            await handshake(ctx, axi, "aw", awaddr=address)
            await handshake(ctx, axi, "w", wdata=1, wstrb=strobe)
            await cycles_until(ctx, axi.bvalid)
            return ctx.get(axi.bresp)

        async def read(address: int) -> tuple[int, int]:
            await handshake(ctx, axi, "ar", araddr=address)
            await cycles_until(ctx, axi.rvalid)
            return ctx.get(axi.rresp), ctx.get(axi.rdata)

        assert await write(offset("id")) == Response.SLVERR
        assert await write(0xFFC) == Response.SLVERR
        assert await write(offset("free"), strobe=0x7) == Response.SLVERR
        assert await read(0xFFC) == (Response.SLVERR, 0)
        assert await write(offset("wide")) == Response.OKAY
        assert (await read(offset("status")))[1] == 0
        ctx.set(block.i_status_busy, 1)
        assert await write(offset("wide")) == Response.SLVERR
        assert await write(offset("start")) == Response.SLVERR
        assert await write(offset("free")) == Response.OKAY
        assert await read(offset("status")) == (Response.OKAY, 1 | 1 << 30)

    simulate(every_kind, body)
