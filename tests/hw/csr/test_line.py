"""The line port of a bank against the golden registers, and against the bank's other port."""

import random

from amaranth.sim import SimulatorContext

from nearstep_hw.csr.bank import CsrBank
from nearstep_hw.csr.line import BLOCK_LINES, LineDecoder
from nearstep_sim.golden.registers import RegisterFile
from nearstep_spec.csr.model import LINE_BYTES, WORD_BYTES, Access, port_name
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import adam_kernel_map

from ..simulate import simulate

WORDS = LINE_BYTES // WORD_BYTES


def words(line: int) -> list[int]:
    return [line >> 32 * i & 0xFFFF_FFFF for i in range(WORDS)]


def test_lines_read_and_write_what_the_golden_registers_do() -> None:
    seed = 20
    print("seed", seed)
    rng = random.Random(seed)
    register_map = adam_kernel_map(UpdateKernelConfig(windows=2))
    bank = CsrBank(register_map, line=True)
    golden = RegisterFile(register_map)
    lines = register_map.size // LINE_BYTES
    seen = dict.fromkeys(("words read", "lines written", "pulses", "refused"), 0)
    pulses = [
        (f"{r.name}.{f.name}", getattr(bank, port_name(r, f)))
        for r, f in register_map.fields()
        if f.access is Access.PULSE
    ]

    async def testbench(ctx: SimulatorContext) -> None:
        for _ in range(600):
            busy = rng.random() < 0.3
            ctx.set(bank.i_status_busy, busy)
            golden[register_map.busy] = int(busy)
            await ctx.tick()
            number = rng.randrange(lines + 1) if rng.random() < 0.7 else rng.choice((1, 2))
            ctx.set(bank.line.read_address, number)
            ctx.set(bank.line.write_address, number)
            if rng.random() < 0.5:
                data = rng.choice((0, (1 << 512) - 1, rng.getrandbits(512)))
                mask = (1 << 64) - 1 if rng.random() < 0.7 else rng.getrandbits(64)
                ctx.set(bank.line.write_data, data)
                ctx.set(bank.line.write_mask, mask)
                ctx.set(bank.line.write, 1)
                expected: set[str] = set()
                for index, word in enumerate(words(data)):
                    byte_mask = mask >> 4 * index & 15
                    address = LINE_BYTES * number + WORD_BYTES * index
                    expected |= set(golden.write(address, word, byte_mask).pulses)
                await ctx.tick()
                ctx.set(bank.line.write, 0)
                assert {path for path, port in pulses if ctx.get(port)} == expected
                await ctx.tick()
                assert not any(ctx.get(port) for _, port in pulses)
                seen["lines written"] += 1
                seen["pulses"] += len(expected)
                seen["refused"] += golden["status.refused"]
            await ctx.tick()
            for index, word in enumerate(words(ctx.get(bank.line.read_data))):
                address = LINE_BYTES * number + WORD_BYTES * index
                assert word == golden.read(address).value, f"word {index} of line {number}"
                seen["words read"] += 1

    simulate(bank, testbench)
    print(seen)
    assert seen["words read"] == 600 * WORDS
    assert all(count > 30 for count in seen.values())


def test_decoder_gives_each_block_its_lines() -> None:
    decoder = LineDecoder(3)
    rng = random.Random(3)
    checks = 0

    async def testbench(ctx: SimulatorContext) -> None:
        nonlocal checks
        blocks = [getattr(decoder, f"block{i}") for i in range(3)]
        for i, block in enumerate(blocks):
            ctx.set(block.read_data, 100 + i)
        ctx.set(decoder.line.write, 1)
        for number in range(4 * BLOCK_LINES):
            other = rng.randrange(4 * BLOCK_LINES)
            ctx.set(decoder.line.read_address, number)
            ctx.set(decoder.line.write_address, other)
            await ctx.delay(1e-7)
            owner, line = divmod(other, BLOCK_LINES)
            assert [ctx.get(b.write) for b in blocks] == [int(owner == i) for i in range(3)]
            assert all(ctx.get(b.write_address) == line for b in blocks)
            owner, line = divmod(number, BLOCK_LINES)
            assert all(ctx.get(b.read_address) == line for b in blocks)
            await ctx.tick()
            assert ctx.get(decoder.line.read_data) == (100 + owner if owner < 3 else 0)
            checks += 1

    simulate(decoder, testbench)
    assert checks == 4 * BLOCK_LINES
