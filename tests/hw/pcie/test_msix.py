"""MSI-X vectors beside the hard block: what the model of it never does."""

import pytest
from amaranth.sim import Simulator, SimulatorContext

from nearstep_hw.pcie.msix import Msix
from nearstep_spec.pcie import MSIX_PBA_OFFSET, MSIX_TABLE_OFFSET

PBA = MSIX_PBA_OFFSET - MSIX_TABLE_OFFSET


async def access(ctx: SimulatorContext, dut: Msix, address: int, value: int | None = None) -> tuple:
    """One access; data and error."""
    ctx.set(dut.bus.address, address)
    ctx.set(dut.bus.read, value is None)
    ctx.set(dut.bus.write, value is not None)
    ctx.set(dut.bus.write_data, value or 0)
    ctx.set(dut.bus.write_mask, 0xF)
    await ctx.tick()
    ctx.set(dut.bus.read, 0)
    ctx.set(dut.bus.write, 0)
    assert ctx.get(dut.bus.ack)
    return ctx.get(dut.bus.read_data), ctx.get(dut.bus.error)


def simulate(dut: Msix, body: object) -> None:
    simulator = Simulator(dut)
    simulator.add_clock(1e-6)

    async def testbench(ctx: SimulatorContext) -> None:
        for vector in range(dut.vectors):
            for index, word in enumerate((0x1000 * vector, 0xAA, 0x50 + vector, 0)):
                assert (await access(ctx, dut, 16 * vector + 4 * index, word))[1] == 0
        ctx.set(dut.cfg.enable, 1)
        await body(ctx)

    simulator.add_testbench(testbench)
    simulator.run()


async def request(ctx: SimulatorContext, dut: Msix, mask: int) -> None:
    ctx.set(dut.i_request, mask)
    await ctx.tick()
    ctx.set(dut.i_request, 0)


async def message(ctx: SimulatorContext, dut: Msix, limit: int = 6) -> tuple[int, int] | None:
    """Address and data of the next message, if one comes within `limit` cycles."""
    for _ in range(limit):
        if ctx.get(dut.cfg.int):
            found = ctx.get(dut.cfg.address), ctx.get(dut.cfg.data)
            await ctx.tick()
            assert not ctx.get(dut.cfg.int)
            return found
        await ctx.tick()
    return None


async def answer(ctx: SimulatorContext, port: object) -> None:
    ctx.set(port, 1)
    await ctx.tick()
    ctx.set(port, 0)


def test_a_message_that_failed_is_sent_again():
    dut = Msix(2)

    async def body(ctx: SimulatorContext) -> None:
        await request(ctx, dut, 0b10)
        for _ in range(3):
            assert await message(ctx, dut) == (0xAA << 32 | 0x1000, 0x51)
            assert await access(ctx, dut, PBA) == (0, 0)
            await answer(ctx, dut.cfg.fail)
        assert await message(ctx, dut) == (0xAA << 32 | 0x1000, 0x51)
        await answer(ctx, dut.cfg.sent)
        assert await message(ctx, dut, 20) is None

    simulate(dut, body)


def test_one_message_at_a_time_and_the_lowest_first():
    dut = Msix(5)

    async def body(ctx: SimulatorContext) -> None:
        await request(ctx, dut, 0b11000)
        assert (await message(ctx, dut))[1] == 0x53
        await request(ctx, dut, 0b01011)
        assert await message(ctx, dut, 30) is None
        for vector in (0, 1, 3, 4):
            await answer(ctx, dut.cfg.sent)
            assert (await message(ctx, dut))[1] == 0x50 + vector
        await answer(ctx, dut.cfg.sent)
        assert await message(ctx, dut, 30) is None

    simulate(dut, body)


def test_words_that_are_not_there_are_errors():
    dut = Msix(40)

    async def body(ctx: SimulatorContext) -> None:
        assert (await access(ctx, dut, 16 * 39 + 12)) == (0, 0)
        assert (await access(ctx, dut, 16 * 40)) == (0, 1)
        assert (await access(ctx, dut, 16 * 40, 5))[1] == 1
        assert (await access(ctx, dut, PBA + 8)) == (0, 1)
        assert (await access(ctx, dut, PBA, 1))[1] == 1
        ctx.set(dut.cfg.mask, 1)
        await request(ctx, dut, 1 << 39 | 1)
        await ctx.tick()
        assert (await access(ctx, dut, PBA)) == (1, 0)
        assert (await access(ctx, dut, PBA + 4)) == (1 << 7, 0)

    simulate(dut, body)


@pytest.mark.parametrize("vectors", [0, 129])
def test_too_many_vectors_are_an_error(vectors):
    with pytest.raises(ValueError, match=f"1 to 128, not {vectors}"):
        Msix(vectors)
