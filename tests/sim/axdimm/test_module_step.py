"""Whole Adam steps on the module, and the rate that they reach behind the arbiter."""

import numpy as np
import pytest

from nearstep_sim.axdimm import module_step
from nearstep_sim.axdimm.module import ModuleBench, ModuleError
from nearstep_sim.axdimm.module_step import run_step
from nearstep_sim.updater.stand_in import StandInUnit
from nearstep_spec.dram.command import Command
from nearstep_spec.updater.config import UpdateKernelConfig

CONFIG = UpdateKernelConfig(functional_units=1, block_bytes=512)  # that of `test_module`
MILLION = 1_000_000


@pytest.mark.deep
def test_a_step_moves_seven_beats_and_every_clock_is_booked() -> None:
    step = run_step(CONFIG, count=1000, unit=StandInUnit, seed=3)
    beats = 63
    assert len(step.channels) == 2
    for channel in step.channels:
        assert (channel.read_beats, channel.write_beats) == (4 * beats, 3 * beats)
        assert channel.needed_beats == 7 * beats
        assert channel.commands[Command.RD] == 4 * beats
        assert channel.commands[Command.WR] == 3 * beats
        assert channel.words == 4 * (beats + 8) * 16
        assert channel.bus.data == 4 * 7 * beats
        assert 0 < channel.bus.start < 4 * 100
        assert abs(channel.bus.total - 4 * channel.cycles) < 4 * 60
        assert channel.cycles < step.cycles


@pytest.mark.deep
def test_wrong_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    configure = module_step._configure

    def spoil(bench: ModuleBench, channel: int, bases: dict[str, int], count: int) -> None:
        configure(bench, channel, bases, count)
        if channel == 1:
            bench.devices[1].write(bench.mapping, bases["g"] + 64, np.zeros(16, np.uint32))

    monkeypatch.setattr(module_step, "_configure", spoil)
    with pytest.raises(ModuleError, match="p of channel 1 differs at element 16"):
        run_step(CONFIG, count=1000, unit=StandInUnit)


@pytest.mark.deep
@pytest.mark.parametrize("units", [16, 4])
@pytest.mark.parametrize(
    ("density", "least", "least_per_s"), [("8Gb", 0.940, 859e6), ("16Gb", 0.915, 836e6)]
)
def test_both_channels_come_near_the_peak_at_once(
    density: str, least: float, least_per_s: float, units: int
) -> None:
    step = run_step(UpdateKernelConfig(functional_units=units), count=MILLION, density=density)
    for channel in step.channels:
        print(channel.efficiency, channel.settled_efficiency, channel.bus)
        assert channel.settled_efficiency >= least
        assert channel.efficiency < channel.timing.refresh_bound + 0.001
    assert step.elements_per_second >= least_per_s
