"""Runs whose arrays have more elements than memory has room for in binary32."""

import pytest

from nearstep_hw.axi.schedule import BlockSchedule
from nearstep_hw.updater import kernel_core
from nearstep_hw.updater.array_lengths import beat_number_width
from nearstep_hw.updater.commit import CommitCounter
from nearstep_hw.updater.load import LoadPath
from nearstep_hw.updater.store import StorePath
from nearstep_spec.updater.config import UpdateKernelConfig

from ..simulate import simulate

MEMORY_BYTES = 1 << 16
SMALL = {"lanes": 2, "block_bytes": 2048, "address_width": 16}
SCANNING = UpdateKernelConfig(**SMALL, gradient_formats=("fp32", "bf16"), scan=True)
PAIRED = UpdateKernelConfig(
    **SMALL,
    rules=("sgd_momentum",),
    parameter_format="bf16",
    state_format="dynamic8",
    compression=("fused",),
)


def moved(schedule: BlockSchedule, count: int, lanes: int, base: dict[int, int]) -> dict[int, int]:
    """Bytes that are asked for of each stream in `base`, which must follow one another."""
    found = dict.fromkeys(base, 0)

    async def bench(ctx):
        ctx.set(schedule.i_beats, -(-count // lanes))
        ctx.set(schedule.i_narrow, -1)
        if schedule.optional:
            ctx.set(schedule.i_use, sum(1 << stream for stream in base))
        for stream, address in base.items():
            ctx.set(schedule.i_base[stream], address)
        ctx.set(schedule.o.ready, 1)
        ctx.set(schedule.i_start, 1)
        await ctx.tick()
        ctx.set(schedule.i_start, 0)
        while not ctx.get(schedule.o_idle):
            if ctx.get(schedule.o.valid):
                burst = ctx.get(schedule.o.payload)
                assert burst.address == base[burst.stream] + found[burst.stream]
                assert burst.beats
                found[burst.stream] += burst.beats << schedule.offset_bits
                assert burst.run_last in (0, burst.block_last)
            await ctx.tick()

    simulate(schedule, bench)
    return found


@pytest.mark.parametrize("count", [16384, 16385, 20000, MEMORY_BYTES // 2])
def test_gradients_of_16_bits_that_are_read_alone_may_fill_the_memory(count: int) -> None:
    stream = SCANNING.arrays.index("g")
    found = moved(LoadPath(SCANNING).schedule, count, SCANNING.lanes, {stream: 0})
    assert found == {stream: -(-count // 4) * 8}


@pytest.mark.parametrize("path", [LoadPath, StorePath])
@pytest.mark.parametrize("count", [16384, 16640, 20001])
def test_parameters_and_moments_beside_pairs_may_have_more_elements(path, count: int) -> None:
    made = path(PAIRED)
    names = PAIRED.arrays if path is LoadPath else made.streams
    p, m = names.index("p"), names.index("m")
    found = moved(made.schedule, count, PAIRED.lanes, {p: 0, m: MEMORY_BYTES // 8 * 5})
    assert found == {p: -(-count // 4) * 8, m: -(-count // 512) * 8 + -(-count // 8) * 8}


def test_every_number_of_elements_of_a_run_can_be_committed(monkeypatch) -> None:
    counters = []

    def kept(**options):
        counters.append(CommitCounter(**options))
        return counters[-1]

    monkeypatch.setattr(kernel_core, "CommitCounter", kept)
    most = {PAIRED: MEMORY_BYTES // 2, UpdateKernelConfig(**SMALL): MEMORY_BYTES // 4}
    for config, count in most.items():
        kernel_core.KernelCore(config).elaborate(None)
        for port in (counters[-1].i_count, counters[-1].o_committed):
            assert len(port) == count.bit_length()


def test_other_kernels_count_as_many_beats_as_memory_has() -> None:
    for options in (
        {},
        {"address_width": 30, "parameter_format": "bf16", "gradient_formats": ("fp32", "bf16")},
        {"address_width": 34, "gradient_formats": ("fp32", "bf16"), "scan": True},
        {"address_width": 64, "gradient_formats": ("fp32", "bf16"), "scan": True},
    ):
        config = UpdateKernelConfig(**options)
        assert beat_number_width(config) == config.address_width - 6
