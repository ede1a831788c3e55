"""The module behind one host bus: kernels run on real memory traffic while the host works beside
them."""

import struct
from functools import partial

import numpy as np
import pytest

from nearstep_hw.axdimm.channel import AxdimmChannel
from nearstep_hw.axdimm.module import CHANNELS, AxdimmModule
from nearstep_sim.axdimm.module import ModuleBench
from nearstep_sim.updater.stand_in import StandInUnit, stand_in_results
from nearstep_spec.axdimm.registers import IDENT, channel_maps, window_base
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.command import Command
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig
from nearstep_spec.updater.registers import ErrorCause

from .adam_run import BASES, AdamRun

CONFIG = UpdateKernelConfig(functional_units=1, block_bytes=512, windows=1, bursts_ahead=8)
Run = partial(AdamRun, results=stand_in_results)


@pytest.fixture
def bench() -> ModuleBench:
    return ModuleBench(CONFIG, StandInUnit, postpone=2)


@pytest.mark.deep
def test_kernels_run_on_both_channels_at_once(bench: ModuleBench) -> None:
    runs = [Run(bench, channel, 1000 + channel, channel) for channel in range(CHANNELS)]
    for run in runs:
        assert bench.get(run.channel, "arbiter.id.value") == IDENT
        run.configure()
        run.mode(1)
        run.start()
    busy = [bench.get(run.channel, "adam.status.busy") for run in runs]
    assert busy == [1, 1]
    compared = 0
    for run in runs:
        bench.wait(run.channel, "adam.status.done", 1, 50_000)
        run.mode(0)
        compared += run.check()
        assert bench.get(run.channel, "arbiter.status.refused_access") == 0
        assert bench.get(run.channel, "adam.committed.value") == run.count
    assert compared == 2 * 4 * 1008


@pytest.mark.deep
@pytest.mark.parametrize("channels", [1, 4])
def test_other_numbers_of_channels(channels: int) -> None:
    bench = ModuleBench(CONFIG, StandInUnit, channels=channels)
    runs = [Run(bench, channel, 700 + channel, channel) for channel in range(channels)]
    for run in runs:
        run.configure()
        run.mode(1)
        run.start()
    compared = 0
    for run in runs:
        bench.wait(run.channel, "adam.status.done", 1, 50_000)
        run.mode(0)
        compared += run.check()
    assert compared == channels * 4 * 704


@pytest.mark.deep
def test_host_uses_one_channel_while_the_other_computes(bench: ModuleBench) -> None:
    run = Run(bench, 0, 4000, 3)
    run.configure()
    run.mode(1)
    run.start()
    rng = np.random.default_rng(4)
    checked = 0
    while bench.get(0, "adam.status.busy"):
        data = rng.integers(0, 256, 64 * 200, dtype=np.uint8)
        address = int(rng.integers(0, 1 << 20)) * 64
        bench.store(1, address, data)
        assert np.array_equal(bench.load(1, address, data.size), data)
        checked += 1
    assert checked > 2
    run.mode(0)
    assert run.check() == 4 * 4000
    assert bench.get(1, "arbiter.status.refused_access") == 0


@pytest.mark.deep
def test_start_in_normal_mode_is_refused(bench: ModuleBench) -> None:
    run = Run(bench, 1, 100, 5)
    run.configure()
    run.start()
    bench.run(100)
    assert bench.get(1, "adam.status.busy") == 0
    assert bench.get(1, "arbiter.status.refused_start") == 1
    assert bench.get(0, "arbiter.status.refused_start") == 0
    run.mode(1)
    run.start()
    bench.wait(1, "adam.status.done", 1, 20_000)
    run.mode(0)
    assert run.check() > 400


@pytest.mark.deep
def test_a_run_that_is_interrupted_for_the_host_ends_right(bench: ModuleBench) -> None:
    run = Run(bench, 0, 3000, 6)
    run.configure()
    run.mode(1)
    run.start()
    pauses = 0
    while bench.get(0, "adam.status.busy"):
        run.mode(0)
        data = bench.load(0, BASES["g"], 512)
        assert np.array_equal(data.view(np.uint32), run.arrays["g"][:128])
        pauses += 1
        run.mode(1)
        bench.run(300)
    assert pauses > 3
    run.mode(0)
    assert run.check() > 4 * 3000


@pytest.mark.deep
def test_reset_during_a_run_leaves_the_rest_of_memory_alone(bench: ModuleBench) -> None:
    run = Run(bench, 0, 16_000, 7)
    guard = np.arange(64 * 64, dtype=np.uint8)
    bench.store(0, BASES["p"] + 4 * 16_000, guard)
    run.configure()
    run.mode(1)
    run.start()
    bench.run(2000)
    bench.set(0, {"arbiter.control.kernel_reset": 1})
    run.mode(0)
    assert bench.get(0, "adam.status.busy") == 0
    results = stand_in_results(run.arrays)
    block = CONFIG.block_elements
    for name, after in results.items():
        found = bench.load(0, BASES[name], 64_000).view(np.uint32)
        is_new = found == after
        is_old = found == run.arrays[name]
        assert (is_new | is_old).all(), name
        started = int(np.flatnonzero(is_new & ~is_old).max()) // block
        assert 0 < started < 16_000 // block - 1
        assert is_old[(started + 1) * block :].all()
    assert np.array_equal(bench.load(0, BASES["p"] + 64_000, guard.size), guard)
    rerun = Run(bench, 0, 500, 8)
    rerun.configure()
    rerun.mode(1)
    rerun.start()
    bench.wait(0, "adam.status.done", 1, 20_000)
    rerun.mode(0)
    assert rerun.check() > 4 * 500


@pytest.mark.deep
def test_a_burst_outside_the_windows_never_becomes_a_command(bench: ModuleBench) -> None:
    run = Run(bench, 0, 1000, 9)
    run.configure(reach=BASES["v"])
    run.mode(1)
    before = bench.devices[0].counts
    run.start()
    bench.wait(0, "adam.status.busy", 0, 20_000)
    assert bench.get(0, "adam.error.cause") == ErrorCause.WINDOW
    assert bench.get(0, "adam.error_address.value") == BASES["v"]
    assert bench.devices[0].counts[Command.WR] == before[Command.WR]
    run.mode(0)
    run.count = 0
    assert run.check() > 4 * 1000


@pytest.mark.deep
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("beyond", [0, 64, 1 << 34])
def test_an_array_beyond_its_channel_is_refused(bench: ModuleBench, name: str, beyond: int) -> None:
    """Not even the part that is inside is touched: neither the registers at the channel's end nor
    what lies behind it, which for the host is the next channel."""
    run = Run(bench, 0, 1000, 10)
    next_channel = bench.load(1, 0, 4096)
    end = bench.maps["arbiter"][0]
    base = run.bases[name] = end + beyond - (4032 - 64 if beyond < 1 << 34 else 0)
    run.configure(reach=1 << 40)
    run.mode(1)
    before = bench.devices[0].counts
    run.start()
    bench.wait(0, "adam.status.busy", 0, 20_000)
    found = bench.devices[0].counts
    assert bench.get(0, "adam.error.cause") == ErrorCause.ADDRESS_RANGE
    assert bench.get(0, "adam.error_address.value") == base
    assert bench.get(0, "adam.committed.value") == 0
    for command in (Command.RD, Command.WR):
        assert found[command] == before[command]
    run.mode(0)
    run.bases, run.count = dict(BASES), 0
    assert run.check() == 4 * 1008
    assert np.array_equal(bench.load(1, 0, 4096), next_channel)


@pytest.mark.deep
def test_an_array_may_end_where_the_registers_begin(bench: ModuleBench) -> None:
    run = Run(bench, 1, 1000, 11)
    run.move("v", bench.maps["arbiter"][0] - 4032)
    run.configure(reach=1 << 40)
    run.mode(1)
    run.start()
    bench.wait(1, "adam.status.done", 1, 20_000)
    run.mode(0)
    assert run.check() == 4 * 1008
    assert bench.get(1, "arbiter.id.value") == IDENT


@pytest.mark.deep
def test_scalars_arrive_in_whole_lines(bench: ModuleBench) -> None:
    value = struct.unpack("<I", struct.pack("<f", 0.125))[0]
    bench.set(0, {"adam.eps.value": value})
    assert bench.get(0, "adam.eps.value") == value
    assert bench.get(1, "adam.eps.value") == 0


def test_registers_of_a_channel_are_its_end() -> None:
    mapping = AddressMapping()
    maps = channel_maps(CONFIG, mapping, read_latency=9, write_latency=3)
    assert maps["arbiter"][0] == window_base(mapping) == (8 << 30) - 8192
    assert maps["adam"][0] == (8 << 30) - 4096


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"channels must be one of \(1, 2, 4\), not 3"):
        AxdimmModule(CONFIG, channels=3)
    with pytest.raises(ConfigError, match="lanes must be 16, a beat of the memory, not 8"):
        AxdimmChannel(UpdateKernelConfig(lanes=8))
