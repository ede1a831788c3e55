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

import pytest

from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.options import DeviceUrl
from nearstep.threads import VARIABLE
from nearstep_sim.axdimm.library import CHANNEL, MODULE, shipped_verilog
from nearstep_sim.axdimm.options import SIM
from nearstep_spec.axdimm.config import DimmConfig

from .dimm_scenarios import SCENARIOS, Log, seen
from .job import Job
from .wholes import check_a_cycle_is_seen, random_runs, seen_of_both, state, written

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


DEEDS = ("end", "end", "pause", "abort", "reset", "lost", "unwritten", "illegal")


def check_random_runs(
    url: str, seed: int, turns: int, monkeypatch: pytest.MonkeyPatch, top: str = "whole"
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert len(random_runs((parts(url), whole(url, top)), seed, DEEDS, turns)) >= 2


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
    print(f"{compared} elements, {len(log)} observations")
    assert compared == 2 * 2 * 3 * (20_001 + 17_003)


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("url", [STALLED, FEW], ids=["16 units, stalled", "4 units"])
def test_random_runs_faults_and_modes_show_the_same(
    url: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_random_runs(url, seed, 24, monkeypatch)


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
    check_random_runs(f"{FEW}&{host}", 9, 10, monkeypatch)


@pytest.mark.deep
def test_two_ranks_on_each_channel_show_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrays of more than a page lie in both ranks.
    check_random_runs(f"{FEW}&ranks=2&interleave=4096", 9, 10, monkeypatch)


@pytest.mark.deep
@pytest.mark.parametrize("channels", [1, 4])
def test_other_numbers_of_channels_show_the_same(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = parts(FEW).replace("channels=2", f"channels={channels}")
    check_random_runs(url, 5, 8, monkeypatch)


@pytest.mark.deep
@pytest.mark.parametrize("url", [STALLED, FEW], ids=["16 units, stalled", "4 units"])
def test_a_channel_as_it_is_shipped_shows_the_same(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = url.replace("channels=2", "channels=1")
    check_random_runs(one, 7, 24, monkeypatch, "channel")

    def steps(dimm: AxdimmDevice) -> Log:
        job = Job(dimm, 20_001, 3)
        job.run()
        return [job.check(), *state(dimm)]

    assert both(one, steps, monkeypatch, "channel")[0] == 3 * 20_001


@pytest.mark.deep
def test_a_difference_of_one_cycle_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    check_a_cycle_is_seen((parts(FEW), whole(FEW)))
