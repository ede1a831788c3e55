"""The kernel as it is shipped, Verilated as one object, and its shell with units beside it: a
command for a command they show the same bits and the same cycles.

So the parts, on which most tests run, stand for the shipped kernel. Memory that fails or does not
answer, aborts and resets come in the midst of runs, at random.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.emulated import Injection
from nearstep.backends.options import DeviceUrl
from nearstep.device import Device
from nearstep.errors import DeviceError, OptionError
from nearstep_sim.axdimm.options import SIM
from nearstep_sim.updater.library import KERNEL, kernel_verilog
from nearstep_spec.updater.config import UpdateKernelConfig

from .dimm_scenarios import Log
from .job import Job
from .wholes import COUNTS, seen_of_both, words, written

SHIPPED = "sim:axdimm?memory=ideal"
"""As `nearstep rtl adam_kernel` writes it if nothing is said: 16 units."""
STALLED = "sim:axdimm?memory=halfduplex&stall=0.3&seed=7"
CARD = "rules=adam,sgd_momentum&gradient_formats=fp32,bf16&scan=yes&compression=fused,scatter"
MORE = f"sim:axdimm?lanes=4&block_bytes=512&memory_bytes=4MiB&{CARD}&stall=0.2"


def both(url: str, see: Callable[[Device], Log]) -> Log:
    """What is seen of both, which must be the same."""
    return seen_of_both((url, f"{url}&top=whole"), see)


class Traffic:
    """Random runs, from the same seed on each device; what is seen of them."""

    MOST = 4200
    DEEDS = ("end", "end", "abort", "reset", "read error", "write error", "no answer", "late")

    def __init__(self, device: AxdimmDevice, seed: int) -> None:
        print(f"seed {seed}")
        self.device, self.rng, self.log = device, np.random.default_rng(seed), Log()
        self.done = dict.fromkeys(self.DEEDS, 0)
        self.words = 0
        self.buffers = {name: device.alloc(self.MOST) for name in "pgmv"}
        for buffer in self.buffers.values():
            buffer.write(words(self.rng, self.MOST))

    def inject(self, deed: str, count: int) -> None:
        kinds = {"no answer": "never", "late": "late"}
        write = deed == "write error" or bool(self.rng.integers(2))
        name = str(self.rng.choice(list("pmv")))
        at = self.buffers[name].address + int(self.rng.integers(count)) * 4 // 64 * 64
        self.device.backend.inject(
            Injection(
                kind=kinds.get(deed, str(self.rng.choice(["slverr", "decerr"]))),
                write=write and deed != "read error",
                base=at,
                limit=at + 64,
                times=1,
                delay=500,
            )
        )

    def turn(self) -> None:
        rng, device = self.rng, self.device
        deed = str(rng.choice(self.DEEDS))
        self.done[deed] += 1
        count, pause = int(rng.choice(COUNTS)), int(rng.integers(1, 1500))
        arrays = {name: buffer[:count] for name, buffer in self.buffers.items()}
        hyper = {
            "lr": float(rng.choice([1e-3, 2.0, 0.0, 1e30])),
            "eps": float(rng.choice([1e-8, 0.0, 1.0])),
            "weight_decay": float(rng.choice([0.0, 0.1])),
            "decoupled_weight_decay": bool(rng.integers(2)),
            "step": int(rng.integers(1, 100)),
        }
        if deed in ("read error", "write error", "no answer", "late"):
            self.inject(deed, count)
        try:
            run = device.update("adam", arrays, **hyper)
            if deed in ("abort", "reset"):
                device.backend.advance(pause)
            if deed == "abort":
                run.abort()
            if deed == "reset":
                device.reset()
            run.wait(max_cycles=40_000)
        except DeviceError as error:
            self.log.append((type(error).__name__, str(error)))
            device.backend.heal()
            device.reset()
        self.log += [device.cycles, device.regs.dump(), device.backend.memory_counters]
        for buffer in self.buffers.values():
            data = buffer.read()
            self.words += data.size
            self.log.append(data.tobytes())

    def run(self, turns: int) -> Log:
        for _ in range(turns):
            self.turn()
        return [*self.log, self.device.backend.transactions(), self.done, self.words]


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
@pytest.mark.parametrize("url", [SHIPPED, STALLED], ids=["ideal", "stalled"])
def test_random_runs_and_faults_show_the_same(url: str, seed: int) -> None:
    log = both(url, lambda device: Traffic(device, seed).run(30))
    *_, done, compared = log
    print(f"{len(log)} observations, {compared} words, {done}")
    assert compared == 30 * 4 * Traffic.MOST
    assert all(done.values())


@pytest.mark.deep
def test_a_kernel_of_every_option_shows_the_same() -> None:
    log = both(MORE, lambda device: Traffic(device, 3).run(20))
    assert log[-1] == 20 * 4 * Traffic.MOST


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
    opened: list[Device] = []

    def see(device: Device) -> Log:
        opened.append(device)
        device.backend.advance(len(opened))
        return [device.cycles]

    with pytest.raises(AssertionError, match="observation 0 of 1"):
        both(SHIPPED, see)


def test_units_of_the_shipped_kernel_are_rtl_and_not_traced(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="fu must be rtl with top=whole"):
        nearstep.open(f"{SHIPPED}&top=whole&fu=native")
    with pytest.raises(OptionError, match="top must be parts with trace="):
        nearstep.open(f"{SHIPPED}&top=whole&trace={tmp_path / 'waves.vcd'}")
    assert not list(tmp_path.iterdir())
