"""Runs of the Adam kernel that go wrong, and the runs after them."""

from itertools import accumulate

import cocotb
from cocotb.triggers import ClockCycles
from kernel_bench import CONFIG, MEMORY_BYTES, SEED, KernelBench, beats, bursts, size

from nearstep_sim.bench.axi_memory import DECERR, SLVERR, STALL_MODES, BurstError
from nearstep_spec.updater.registers import ARRAYS, ErrorCause, Stream

BLOCK = CONFIG.block_elements
BEAT = CONFIG.beat_bytes
READS = {"p": Stream.P_READ, "g": Stream.G_READ, "m": Stream.M_READ, "v": Stream.V_READ}
WRITES = {"p": Stream.P_WRITE, "m": Stream.M_WRITE, "v": Stream.V_WRITE}
STREAM_OF_WRITE_ID = list(WRITES.values())


async def ready(dut: object, seed: int = SEED) -> KernelBench:
    bench = KernelBench(dut, seed=seed)
    await bench.begin()
    return bench


async def refused_at_start(bench: KernelBench, **wanted: int) -> None:
    """START ends at once with an error, and nothing was on the bus."""
    before = bench.data.copy()
    traffic = dict(bench.checker.transfers)
    assert await bench.go() == 0
    await bench.until_idle(limit=200)
    await bench.outcome(done=0, error=1, committed=0, **wanted)
    assert bench.checker.transfers == traffic, "something was on the bus"
    bench.compare(before)


@cocotb.test()
async def count_zero_is_done_and_touches_nothing(dut: object) -> None:
    bench = await ready(dut)
    bench.place(5)
    await bench.run(0)
    assert bench.checker.transfers["ar"] == 0
    await bench.run(5)


@cocotb.test()
async def a_misaligned_array_is_refused(dut: object) -> None:
    bench = await ready(dut)
    for name in ARRAYS:
        bench.place(20)
        bench.base[name] += BEAT // 2
        await bench.configure(20)
        await refused_at_start(
            bench, cause=ErrorCause.ALIGNMENT, stream=READS[name], address=bench.base[name]
        )
    bench.place(20)
    await bench.run(20)


@cocotb.test()
async def an_array_beyond_the_address_space_is_refused(dut: object) -> None:
    bench = await ready(dut)
    top = 1 << CONFIG.address_width
    for name, base, count in (
        ("m", top - BEAT, CONFIG.lanes + 1),
        ("v", top % (1 << 64), 1),
        ("g", (1 << 64) - BEAT, 2 * CONFIG.lanes),
        ("p", 0, (1 << 64) - 1),
        ("p", 0, (1 << 62) + 4),
    ):
        if name == "v" and base == 0:
            continue  # no address of 64 bits is beyond a 64-bit address space
        bench.place(20)
        bench.base[name] = base
        await bench.configure(count)
        await refused_at_start(
            bench, cause=ErrorCause.ADDRESS_RANGE, stream=READS[name], address=base
        )
    bench.place(20)
    await bench.run(20)


@cocotb.test()
async def arrays_that_share_bytes_are_refused(dut: object) -> None:
    bench = await ready(dut)
    count = 2 * BLOCK
    for first, second in (("p", "g"), ("g", "v"), ("m", "v"), ("p", "p")):
        bench.place(count)
        if first == second:
            bench.base = dict.fromkeys(ARRAYS, 0)
            second = "g"
        else:
            bench.base[second] = bench.base[first] + size(first, count) - BEAT
        await bench.configure(count)
        await refused_at_start(
            bench, cause=ErrorCause.OVERLAP, stream=READS[second], address=bench.base[second]
        )
    ends = accumulate(size(name, count) for name in ARRAYS)
    bench.base = dict(zip(ARRAYS, (0, *ends), strict=False))  # end to end is apart
    await bench.run(count)


@cocotb.test()
async def formats_that_are_not_there_are_refused(dut: object) -> None:
    bench = await ready(dut)
    bench.place(20)
    await bench.configure(20)
    for register, value, stream in (
        ("formats", 1, Stream.NONE),
        ("formats", 0x20, Stream.NONE),
        ("gradient_scale", 0x3F800000, Stream.NONE),
        ("copy_out_address", 1 << 40, Stream.COPY_OUT),
    ):
        await bench.write(register, value)
        await refused_at_start(bench, cause=ErrorCause.UNSUPPORTED, stream=stream, address=0)
        await bench.write(register, 0)
    await bench.run(20)


@cocotb.test()
async def an_array_outside_the_windows_is_refused(dut: object) -> None:
    """Before anything is read or written, for every array and permission."""
    bench = await ready(dut)
    count = 2 * BLOCK + 3
    whole = {name: beats(name, count) * BEAT for name in ARRAYS}
    for name, access in [(n, "read") for n in READS] + [(n, "write") for n in WRITES]:
        stream = (READS if access == "read" else WRITES)[name]
        bench.place(count)
        for change in ("short", "late", "denied", "invalid"):
            await bench.configure(count)
            for index, (array, base) in enumerate(bench.base.items()):
                start, end, bits = base, base + whole[array], 0b101 if array == "g" else 0b111
                if array == name:
                    denied = 0b001 if access == "read" else 0b010
                    if change == "denied":
                        bits &= ~denied
                    elif access == "write":
                        bits &= ~denied  # only the permission tells reads from writes
                    elif change == "short":
                        end -= 1
                    elif change == "late":
                        start += 1
                    elif change == "invalid":
                        bits &= 0b011
                await bench.grant(index, start, end, bits)
            await refused_at_start(
                bench, cause=ErrorCause.WINDOW, stream=stream, address=bench.base[name]
            )
    for index, (array, base) in enumerate(bench.base.items()):
        await bench.grant(index, base, base + whole[array], 0b101 if array == "g" else 0b111)
    after = bench.expected(count)
    assert await bench.go() == 0
    await bench.until_idle()
    await bench.outcome(done=1, error=0, committed=count)
    bench.compare(after)


@cocotb.test()
async def start_and_configuration_are_refused_while_busy(dut: object) -> None:
    bench = await ready(dut)
    bench.disturb("free", latency=200)
    count = 3 * BLOCK
    bench.place(count)
    await bench.configure(count)
    after = bench.expected(count)
    assert await bench.go() == 0
    for register, value in (("start", 1), ("p_address", 0), ("count", 1), ("window0_limit", 0)):
        assert await bench.write(register, value) != 0, register
    await bench.outcome(refused=1)
    await bench.until_idle()
    await bench.outcome(done=1, error=0, committed=count)
    bench.compare(after)
    await bench.write("control", 0b100)
    await bench.outcome(refused=0)


async def ends_early(bench: KernelBench, count: int, **wanted: int) -> int:
    """A run that ends with an error; the committed elements."""
    await bench.configure(count)
    before = bench.data.copy()
    assert await bench.go() == 0
    await bench.until_idle()
    bench.checker.finish()
    await bench.outcome(done=0, error=1, **wanted)
    committed = await bench.read("committed.value")
    assert committed % BLOCK == 0, committed
    assert committed < count, committed
    bench.compare_partly(before, count, committed)
    return committed


@cocotb.test()
@cocotb.parametrize(mode=list(STALL_MODES))
async def an_error_on_a_read_ends_the_run(dut: object, mode: str) -> None:
    bench = await ready(dut)
    count = 6 * BLOCK - 1
    committed = []
    for nth in range(0, 6, 2):
        for index, (name, stream) in enumerate(READS.items()):
            response = SLVERR if index % 2 else DECERR
            bench.disturb(
                mode,
                latency=10,
                reorder=mode == "both",
                errors=(BurstError(write=False, nth=nth, id=index, response=response),),
            )
            bench.place(count, aligned=4 * BLOCK)
            committed.append(
                await ends_early(
                    bench,
                    count,
                    cause=ErrorCause.READ_RESPONSE,
                    stream=stream,
                    response=response,
                    address=bursts(name, bench.base[name], count)[nth],
                )
            )
    assert max(committed) > 0
    bench.disturb()
    await bench.run(count)


@cocotb.test()
@cocotb.parametrize(mode=list(STALL_MODES))
async def an_error_on_a_write_ends_the_run(dut: object, mode: str) -> None:
    """Also on the very last write: everything else is written, and still it is not done."""
    bench = await ready(dut)
    count = 4 * BLOCK - 1
    for which in (0, 1, -1):
        for index, (name, stream) in enumerate(WRITES.items()):
            bench.place(count, aligned=4 * BLOCK)
            addresses = bursts(name, bench.base[name], count)
            nth = which % len(addresses)
            bench.disturb(
                mode,
                latency=10,
                reorder=mode == "both",
                errors=(BurstError(write=True, nth=nth, id=index, response=SLVERR),),
            )
            committed = await ends_early(
                bench,
                count,
                cause=ErrorCause.WRITE_RESPONSE,
                stream=stream,
                response=SLVERR,
                address=addresses[nth],
            )
            assert bench.base[name] + size(name, committed) <= addresses[nth], (committed, nth)
            if mode == "free" and which == -1 and name == "v":
                assert committed == 3 * BLOCK, committed
    bench.disturb()
    await bench.run(count)


@cocotb.test()
async def the_first_of_many_errors_is_kept(dut: object) -> None:
    bench = await ready(dut)
    count = 4 * BLOCK
    errors = tuple(BurstError(write=False, nth=n, id=2, response=SLVERR) for n in range(1, 4))
    bench.disturb("source", latency=20, errors=errors)
    bench.place(count, aligned=4 * BLOCK)
    await ends_early(
        bench,
        count,
        cause=ErrorCause.READ_RESPONSE,
        stream=Stream.M_READ,
        address=bursts("m", bench.base["m"], count)[1],
    )


@cocotb.test()
async def abort_drains_and_the_next_run_is_right(dut: object) -> None:
    """At any moment, with memory quick, slow and stalling."""
    bench = await ready(dut)
    count = 5 * BLOCK + 1
    aborted = 0
    for attempt in range(24):
        mode = list(STALL_MODES)[attempt % 4]
        bench.disturb(mode, latency=bench.random.choice((1, 20, 300)), reorder=True)
        bench.place(count)
        await bench.configure(count)
        before = bench.data.copy()
        assert await bench.go() == 0
        await ClockCycles(dut.clk, bench.random.randrange(1, 800))
        await bench.write("control", 1)
        await bench.until_idle()
        bench.checker.finish()
        committed = await bench.read("committed.value")
        bench.compare_partly(before, count, committed)
        if await bench.read("status.done"):
            await bench.outcome(error=0, committed=count)
            continue
        aborted += 1
        await bench.outcome(error=1, cause=ErrorCause.ABORTED, stream=0, address=0)
        bench.place(BLOCK + 3)
        await bench.run(BLOCK + 3)
    assert aborted > 5, aborted


@cocotb.test()
async def memory_that_never_answers_is_recovered_by_reset(dut: object) -> None:
    """ABORT cannot end the run, reset does; nothing of the old run reaches the new one."""
    bench = await ready(dut)
    count = 4 * BLOCK
    for write in (False, True):
        for nth in (0, 5):
            bench.disturb(errors=(BurstError(write=write, nth=nth, response=None),))
            bench.place(count)
            await bench.configure(count)
            assert await bench.go() == 0
            await ClockCycles(dut.clk, 3000)
            await bench.write("control", 1)
            await ClockCycles(dut.clk, 500)
            assert await bench.read("status.busy") == 1
            await bench.reset()
            await bench.outcome(done=0, error=0)
            assert await bench.read("status.busy") == 0
            bench.disturb()
            bench.place(count)
            await bench.run(count)


@cocotb.test()
async def reset_in_mid_run_leaves_a_working_kernel(dut: object) -> None:
    bench = await ready(dut)
    count = 4 * BLOCK + 2
    for _ in range(8):
        bench.disturb("both", latency=30, reorder=True)
        bench.place(count)
        await bench.configure(count)
        assert await bench.go() == 0
        await ClockCycles(dut.clk, bench.random.randrange(5, 600))
        await bench.reset()
        bench.disturb()
        bench.place(count)
        await bench.run(count)


@cocotb.test()
async def a_window_at_the_end_of_memory_is_honoured(dut: object) -> None:
    """Addresses around the highest: the array's last beat is the memory's last."""
    bench = await ready(dut)
    count = BLOCK + 1
    bench.place(count)
    highest = max(bench.base, key=bench.base.get)
    bench.base[highest] = MEMORY_BYTES - beats(highest, count) * BEAT
    await bench.run(count)
