"""Whole runs of the Adam kernel: every size, every way memory may behave."""

import cocotb
from kernel_bench import CONFIG, SEED, KernelBench, beats

from nearstep_sim.bench.axi_memory import STALL_MODES
from nearstep_spec.updater.registers import ARRAYS

LANES, BLOCK = CONFIG.lanes, CONFIG.block_elements
COUNTS = sorted(
    {1, 2, LANES - 1, LANES, LANES + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + LANES + 1} - {0}
)


@cocotb.test()
@cocotb.parametrize(mode=list(STALL_MODES))
async def every_size(dut: object, mode: str) -> None:
    """Each size at a place of its own, one run after the other without reset."""
    bench = KernelBench(dut, seed=SEED)
    await bench.begin()
    bench.disturb(mode, latency=5, reorder=mode == "both")
    for count in COUNTS:
        bench.place(count)
        await bench.run(count)
    assert bench.checks > 0
    dut._log.info("%d checks, %s", bench.checks, bench.checker.transfers)


@cocotb.test()
async def random_sizes_and_places(dut: object) -> None:
    bench = KernelBench(dut, seed=SEED + 1)
    await bench.begin()
    for _ in range(12):
        count = bench.random.randrange(1, 5 * BLOCK)
        mode = bench.random.choice(list(STALL_MODES))
        bench.disturb(mode, latency=bench.random.randrange(1, 60), reorder=True)
        bench.place(count)
        await bench.run(count)


@cocotb.test()
async def memory_may_wait_for_data_before_it_takes_the_address(dut: object) -> None:
    bench = KernelBench(dut)
    await bench.begin()
    for mode in STALL_MODES:
        bench.disturb(mode, latency=3, address_after_data=True)
        bench.place(3 * BLOCK + 1)
        await bench.run(3 * BLOCK + 1)


@cocotb.test()
async def reads_run_ahead(dut: object) -> None:
    """With a slow memory at least eight bursts are outstanding."""
    bench = KernelBench(dut)
    await bench.begin()
    bench.disturb("free", latency=400)
    count = 6 * BLOCK
    bench.place(count, aligned=4096)
    await bench.run(count)
    assert bench.checker.most_ahead >= 8, bench.checker.most_ahead


@cocotb.test()
async def ideal_memory_is_read_without_a_gap(dut: object) -> None:
    """Cycles grow by four a beat: one for each array, or by less for those in 8 bits. (The units
    hold up to 80 beats.)

    Or by what it takes to look at a burst and to take it (`nearstep_hw.axi.window.WindowChecker`,
    and a register in `nearstep_hw.axi.reader.ReadMover`), if that is more than the burst has beats.
    """
    bench = KernelBench(dut)
    await bench.begin()
    cycles = []
    for blocks in (20, 30):
        count = blocks * BLOCK
        bench.place(count, aligned=4096)
        await bench.run(count)
        cycles.append(await bench.read("cycles.value"))
    per_beat = (cycles[1] - cycles[0]) / (10 * CONFIG.block_beats)
    dut._log.info("cycles %s, %.3f a beat", cycles, per_beat)
    look = 5 + CONFIG.window_count if CONFIG.cut else 3
    reads = sum(beats(name, BLOCK) for name in ARRAYS) / CONFIG.block_beats
    port = max(reads, 4 * look / CONFIG.burst_beats)
    assert per_beat <= max(port, CONFIG.cycles_per_beat) / 0.97
