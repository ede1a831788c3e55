"""The module as it is shipped, Verilated as one object, and its parts joined in C++: a command for
a command they show the same bits and the same cycles.

So the parts, on which most tests and benchmarks run, stand for the shipped module. Faults, resets
and changes of mode in the midst of steps are the scenarios that are there for threads, and more of
them at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.emulated import Injection
from nearstep.backends.options import DeviceUrl
from nearstep.errors import (
    AbortedError,
    DeviceError,
    OptionError,
    UninitialisedError,
    WaitTimeoutError,
)
from nearstep.threads import VARIABLE
from nearstep_sim.axdimm.library import CHANNEL, MODULE, shipped_verilog
from nearstep_sim.axdimm.options import SIM
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.dram.command import Command

from .dimm_scenarios import SCENARIOS, Log, seen
from .job import Job
from .wholes import COUNTS, seen_of_both, words, written

SHIPPED = "sim:axdimm?memory=ddr4-1600&channels=2"
"""As `nearstep rtl axdimm_module` writes it if nothing is said: 16 units on each channel."""
FEW = f"{SHIPPED}&functional_units=4&block_bytes=512"
STALLED = f"{SHIPPED}&stall=0.3&seed=7"


def parts(url: str) -> str:
    return url.replace("&top=whole", "")


def whole(url: str, top: str = "whole") -> str:
    return f"{parts(url)}&top={top}"


def both(
    url: str,
    see: Callable[[AxdimmDevice], Log],
    monkeypatch: pytest.MonkeyPatch,
    top: str = "whole",
) -> Log:
    """What is seen of both, which must be the same."""
    monkeypatch.setenv(VARIABLE, "1")
    return seen_of_both((parts(url), whole(url, top)), see)


def state(dimm: AxdimmDevice) -> Log:
    """Cycles, all registers, the host's counts, DRAM commands."""
    backend = dimm.backend
    return [dimm.cycles, dimm.regs.dump(), backend.host_statistics, backend.dram_counters]


class Traffic:
    """Random runs on both channels of a module, from the same seed on each; what is seen of them.

    Each channel has arrays and guards around them. A run is let end, given back and gone on with in
    the midst, aborted, reset, left without read data, or reads what nobody has written.
    """

    MOST = 4200
    DEEDS = ("end", "end", "pause", "abort", "reset", "lost", "unwritten", "illegal")

    def __init__(self, dimm: AxdimmDevice, seed: int) -> None:
        print(f"seed {seed}")
        self.dimm, self.rng, self.log = dimm, np.random.default_rng(seed), Log()
        self.done = dict.fromkeys(self.DEEDS, 0)
        self.words = 0
        self.buffers = [
            {name: dimm.alloc(self.MOST, channel=channel) for name in "pgmv"}
            for channel in range(dimm.channel_count)
        ]
        for of_channel in self.buffers:
            for buffer in of_channel.values():
                buffer.write(words(self.rng, self.MOST))

    def contents(self) -> None:
        for of_channel in self.buffers:
            for buffer in of_channel.values():
                data = buffer.read()
                self.words += data.size
                self.log.append(data.tobytes())

    def turn(self) -> None:
        rng, dimm = self.rng, self.dimm
        deed = str(rng.choice(self.DEEDS))
        self.done[deed] += 1
        counts = [int(rng.choice(COUNTS)) for _ in self.buffers]
        channel, pause = int(rng.integers(len(self.buffers))), int(rng.integers(1, 1500))
        given = [
            {name: buffer[:count] for name, buffer in of_channel.items()}
            for of_channel, count in zip(self.buffers, counts, strict=True)
        ]
        hyper = {
            "lr": float(rng.choice([1e-3, 2.0, 0.0, 1e30])),
            "eps": float(rng.choice([1e-8, 0.0, 1.0])),
            "weight_decay": float(rng.choice([0.0, 0.1])),
            "decoupled_weight_decay": bool(rng.integers(2)),
            "step": int(rng.integers(1, 100)),
        }
        if deed == "unwritten":
            given[channel]["g"] = dimm.alloc(counts[channel], channel=channel)
        if deed == "lost":
            lost = given[channel]["g"].address + int(rng.integers(counts[channel])) * 4 // 64 * 64
            dimm.backend.inject(
                Injection(kind="never", write=False, base=lost, limit=lost + 64, times=1)
            )
        try:
            with dimm.acceleration():
                runs = [dimm.update("adam", each, **hyper) for each in given]
                if deed == "illegal":  # a mode register is lost, a calibration deferred
                    dimm.backend.give(channel, Command.MRS, bank_group=0, bank=1, row=1)
                    dimm.backend.give(channel, Command.ZQCS)
                    dimm.backend.advance(pause)
                if deed in ("pause", "abort", "reset"):
                    dimm.backend.advance(pause)
                if deed == "pause":
                    mode = dimm.regs[f"arbiter{channel}"].mode
                    mode.acceleration = 0
                    dimm.backend.advance(pause)
                    self.log.append(dimm.regs[f"arbiter{channel}"].status.bits)
                    mode.acceleration = 1
                if deed == "abort":
                    runs[channel].abort()
                if deed == "reset":
                    dimm.channels[channel].reset_kernel()
                for run in runs:
                    run.wait(max_cycles=40_000)
        except (AbortedError, WaitTimeoutError, UninitialisedError, DeviceError) as error:
            self.log.append((type(error).__name__, str(error)))
            dimm.backend.heal()
            dimm.reset()
        self.log += state(dimm)
        self.contents()

    def run(self, turns: int) -> Log:
        for _ in range(turns):
            self.turn()
        return [*self.log, self.dimm.backend.transactions(), self.done, self.words]


@pytest.mark.deep
@pytest.mark.parametrize("top", [MODULE, CHANNEL])
@pytest.mark.parametrize("options", [[], ["--functional-units", "4", "--block-bytes", "512"]])
def test_what_is_verilated_is_what_is_shipped(top: str, options: list[str], tmp_path: Path) -> None:
    url = FEW if options else SHIPPED
    config = SIM.parse(DeviceUrl.parse(url).options).config()
    assert isinstance(config, DimmConfig)
    channels = config.channels if top == MODULE else 1
    verilated = shipped_verilog(replace(config, channels=channels), top).read_bytes()
    assert written(top, options, tmp_path) == verilated
    assert verilated.count(b"\n  adam_fu ") == channels * (4 if options else 16)


@pytest.mark.deep
@pytest.mark.parametrize("url", [SHIPPED, FEW], ids=["16 units", "4 units"])
def test_a_step_of_both_channels_has_the_bits_and_cycles_of_the_parts(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0

    def see(dimm: AxdimmDevice) -> Log:
        nonlocal compared
        log: Log = []
        jobs = [Job(dimm, 20_001, 3), Job(dimm, 17_003, 4, channel=1)]
        for step in (1, 2):
            with dimm.acceleration():
                for run in [job.start(step=step) for job in jobs]:
                    run.wait()
            log += state(dimm)
            compared += sum(job.check() for job in jobs)  # with the golden model, too
        return [*log, *(b.read().tobytes() for job in jobs for b in job.buffers.values())]

    log = both(url, see, monkeypatch)
    print(f"{compared} elements, {len(log)} observations, cycle {log[4]}")
    assert compared == 2 * 2 * 3 * (20_001 + 17_003)
    assert len(log) == 8 + 8


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("url", [STALLED, FEW], ids=["16 units, stalled", "4 units"])
def test_random_runs_faults_and_modes_show_the_same(
    url: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = both(url, lambda dimm: Traffic(dimm, seed).run(24), monkeypatch)
    *_, done, compared = log
    print(f"{len(log)} observations, {compared} words, {done}")
    assert compared == 24 * 8 * Traffic.MOST
    assert sum(done.values()) == 24
    assert sum(times > 0 for times in done.values()) >= 5


@pytest.mark.deep
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("url", [STALLED, FEW], ids=["16 units, stalled", "4 units"])
def test_faults_resets_and_waits_show_the_same(
    url: str, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = both(url, lambda dimm: seen(dimm, scenario), monkeypatch)
    print(scenario, "observations", len(log))
    assert len(log) >= 6


@pytest.mark.deep
@pytest.mark.parametrize(
    "host", ["scheduler=in-order&postpone=8", "postpone=8&stall=0.5&seed=3"], ids=str
)
def test_refreshes_that_the_host_owes_show_the_same(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = both(f"{FEW}&{host}", lambda dimm: Traffic(dimm, 9).run(10), monkeypatch)
    assert log[-1] == 10 * 8 * Traffic.MOST


@pytest.mark.deep
def test_two_ranks_on_each_channel_show_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrays of more than a page lie in both ranks.
    url = f"{FEW}&ranks=2&interleave=4096"
    log = both(url, lambda dimm: Traffic(dimm, 9).run(10), monkeypatch)
    *_, done, compared = log
    print(f"{len(log)} observations, {compared} words, {done}")
    assert compared == 10 * 8 * Traffic.MOST
    assert sum(done.values()) == 10
    assert sum(times > 0 for times in done.values()) >= 4


@pytest.mark.deep
@pytest.mark.parametrize("channels", [1, 4])
def test_other_numbers_of_channels_show_the_same(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{parts(FEW).replace('channels=2', f'channels={channels}')}"
    log = both(url, lambda dimm: Traffic(dimm, 5).run(6), monkeypatch)
    assert log[-1] == 6 * 4 * channels * Traffic.MOST


@pytest.mark.deep
@pytest.mark.parametrize("url", [STALLED, FEW], ids=["16 units, stalled", "4 units"])
def test_a_channel_as_it_is_shipped_shows_the_same(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = url.replace("channels=2", "channels=1")
    log = both(one, lambda dimm: Traffic(dimm, 7).run(24), monkeypatch, "channel")
    *_, done, compared = log
    print(f"{len(log)} observations, {compared} words, {done}")
    assert compared == 24 * 4 * Traffic.MOST
    assert all(done.values())

    def steps(dimm: AxdimmDevice) -> Log:
        job = Job(dimm, 20_001, 3)
        job.run()
        return [job.check(), *state(dimm)]

    assert both(one, steps, monkeypatch, "channel")[0] == 3 * 20_001


@pytest.mark.deep
def test_a_difference_of_one_cycle_or_one_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def see(dimm: AxdimmDevice) -> Log:
        dimm.backend.advance(1 + (dimm.backend.options.top == "whole"))
        return state(dimm)

    with pytest.raises(AssertionError, match="observation 0 of 4"):
        both(FEW, see, monkeypatch)


def test_units_of_the_shipped_module_are_rtl_and_not_traced(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="fu must be rtl with top=whole"):
        nearstep.open(f"{whole(FEW)}&fu=native")
    with pytest.raises(OptionError, match="top must be parts with trace="):
        nearstep.open(f"{whole(FEW)}&trace={tmp_path / 'waves.vcd'}")
    with pytest.raises(OptionError, match="channels must be 1 with top=channel, not 2"):
        nearstep.open(whole(FEW, "channel"))
    assert not list(tmp_path.iterdir())
