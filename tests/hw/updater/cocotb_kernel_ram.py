"""The Adam kernel on the AXI memory of cocotbext-axi, a model written by others."""

import random
from collections.abc import Iterator

import cocotb
from kernel_bench import CONFIG, SEED, KernelBench

from nearstep_sim.bench.axi_memory import STALL_MODES

BLOCK = CONFIG.block_elements


def pauses(chance: float, seed: int) -> Iterator[bool]:
    rng = random.Random(seed)
    while True:
        yield rng.random() < chance


@cocotb.test()
@cocotb.parametrize(mode=list(STALL_MODES))
async def runs(dut: object, mode: str) -> None:
    bench = KernelBench(dut, ram=True)
    await bench.begin()
    stalls = STALL_MODES[mode]
    channels = {
        "ar": bench.ram.read_if.ar_channel,
        "r": bench.ram.read_if.r_channel,
        "aw": bench.ram.write_if.aw_channel,
        "w": bench.ram.write_if.w_channel,
        "b": bench.ram.write_if.b_channel,
    }
    for index, (name, channel) in enumerate(channels.items()):
        if chance := getattr(stalls, name):
            channel.set_pause_generator(pauses(chance, SEED + index))
    for count in (1, CONFIG.lanes + 1, BLOCK - 1, 3 * BLOCK + 1):
        bench.place(count)
        await bench.run(count)
    assert bench.checks > 0
