"""The kernel as it is shipped, Verilated as one object, and its shell with units beside it: a
command for a command they show the same bits and the same cycles.

So the parts, on which most tests run, stand for the shipped kernel. Memory that fails or does not
answer, aborts and resets come in the midst of runs, at random.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

import nearstep
from nearstep.backends.options import DeviceUrl
from nearstep.device import Device
from nearstep_sim.axdimm.options import SIM
from nearstep_sim.updater.library import KERNEL, kernel_verilog
from nearstep_spec.updater.config import UpdateKernelConfig

from .dimm_scenarios import Log
from .job import Job
from .wholes import check_a_cycle_is_seen, random_runs, seen_of_both, written

SHIPPED = "sim:axdimm?memory=ideal"
"""As `nearstep rtl adam_kernel` writes it if nothing is said: 16 units."""
STALLED = "sim:axdimm?memory=halfduplex&stall=0.3&seed=7"
CARD = "rules=adam,sgd_momentum&gradient_formats=fp32,bf16&scan=yes&compression=fused,scatter"
MORE = f"sim:axdimm?lanes=4&block_bytes=512&memory_bytes=4MiB&{CARD}&stall=0.2"


def both(url: str, see: Callable[[Device], Log]) -> Log:
    """What is seen of both, which must be the same."""
    return seen_of_both((url, f"{url}&top=whole"), see)


DEEDS = ("end", "end", "abort", "reset", "read error", "write error", "no answer", "late")


@pytest.mark.deep
@pytest.mark.parametrize("options", [[], ["--lanes", "4", "--rules", "adam,sgd", "--scan", "yes"]])
def test_what_is_verilated_is_what_is_shipped(options: list[str], tmp_path: Path) -> None:
    url = "sim:axdimm?lanes=4&rules=adam,sgd&scan=yes" if options else SHIPPED
    config = SIM.parse(DeviceUrl.parse(url).options).config()
    assert isinstance(config, UpdateKernelConfig)
    verilated = kernel_verilog(config).read_bytes()
    assert written(KERNEL, options, tmp_path) == verilated
    assert verilated.count(b"\n  adam_fu ") == (4 if options else 16)


@pytest.mark.deep
@pytest.mark.parametrize("url", [SHIPPED, STALLED], ids=["ideal", "stalled"])
def test_steps_have_the_bits_and_cycles_of_the_parts(url: str) -> None:
    compared = 0

    def see(device: Device) -> Log:
        nonlocal compared
        job = Job(device, 20_001, 3)
        log: Log = []
        for step in (1, 2):
            log += [job.run(step=step).cycles, device.cycles, device.regs.dump()]
            compared += job.check()  # with the golden model, too
            job.upload()
        return log

    log = both(url, see)
    print(f"{compared} elements, {len(log)} observations, cycle {log[-2]}")
    assert compared == 2 * 2 * 3 * 20_001


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("url", [SHIPPED, STALLED, MORE], ids=["ideal", "stalled", "every option"])
def test_random_runs_and_faults_show_the_same(url: str, seed: int) -> None:
    deeds = (*DEEDS, "fused", "scatter", "scan") if url == MORE else DEEDS
    assert len(random_runs((url, f"{url}&top=whole"), seed, deeds, 32)) >= 3


@pytest.mark.deep
@pytest.mark.parametrize(
    "url",
    [
        "sim:axdimm?lanes=1&block_bytes=64&rules=sgd&top=whole",
        "sim:axdimm?memory=ddr4-1600&functional_units=1&rules=sgd&channels=1&top=channel",
        "sim:axdimm?memory=ddr4-1600&functional_units=1&rules=sgd&channels=1&top=whole",
    ],
    ids=["kernel", "channel", "module"],
)
def test_several_at_once_are_closed_in_any_order(url: str) -> None:
    checked = 0
    for order in permutations(range(3)):
        devices = [nearstep.open(url) for _ in order]
        for place in order:
            for device in (*devices, devices[place]):
                if not device.closed:
                    job = Job(device, 50, place, arrays="pg")
                    job.run("sgd", lr=0.5)
                    checked += job.check()
                    job.free()
            devices[place].close()
    assert checked > 6 * 3 * 2 * 50


@pytest.mark.deep
def test_a_difference_of_one_cycle_is_seen() -> None:
    check_a_cycle_is_seen((SHIPPED, f"{SHIPPED}&top=whole"))
