"""The card as it is shipped, Verilated as one object, and the one whose units are joined to it in
C++: a command for a command they show the same bits and the same cycles.

So the card with its units outside, on which most tests and benchmarks run, stands for what
`nearstep rtl smartssd_card` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import nearstep
from nearstep import cli
from nearstep.backends.emulated import Injection
from nearstep.errors import (
    AbortedError,
    CompletionError,
    DeviceError,
    KernelError,
    OptionError,
    PeerReadError,
    PeerWriteError,
    PostedWriteError,
)
from nearstep.smartssd.device import SmartssdDevice
from nearstep_sim.smartssd.library import TOP, shipped_verilog
from nearstep_spec.smartssd.config import SmartssdConfig

from ...host.driver.job import Job
from .test_card import OPTIONS

SHIPPED = "sim:smartssd?seed=7&stall=0.2"
SMALL = f"sim:smartssd?{OPTIONS}&memory=ideal"
Log = list[object]

RULES = {
    "adam": {},
    "sgd": {"weight_decay": 0.05},
    "sgd with momentum": {"momentum": 0.9, "nesterov": True},
    "adagrad": {"lr_decay": 0.01},
}
"""Hyper-parameters of optimizers, by the rule that they choose."""
COUNTS = (1, 15, 16, 17, 129, 1001, 4099)


def both(url: str, see: Callable[[SmartssdDevice], Log]) -> Log:
    """What is seen of both, which must be the same."""
    logs = []
    for top in ("parts", "whole"):
        with nearstep.open(f"{url}&top={top}") as device:
            assert isinstance(device, SmartssdDevice)
            logs.append(see(device))
    for place, (one, other) in enumerate(zip(*logs, strict=True)):
        assert one == other, f"observation {place} of {len(logs[0])}"
    return logs[0]


def state(card: SmartssdDevice) -> Log:
    """Cycles, all registers, packets of host and drive."""
    backend = card.backend
    return [card.cycles, card.regs.dump(), vars(backend.traffic), vars(backend.peer_traffic)]


class Traffic:
    """Random runs of every rule on a card, from the same seed on each; what is seen of them.

    Beside them, the drive brings and fetches bytes. Runs end, are aborted, reset, meet errors of
    the memory and gradients that nobody has written; host and drive meet errors, too.
    """

    MOST = max(COUNTS)
    BASE = 3 << 20
    """Where no array is."""
    DEEDS = ("end", "fused", "scatter", "scan", "abort", "reset", "memory", "unwritten", "host",
             "drive")  # fmt: skip

    def __init__(self, card: SmartssdDevice, seed: int) -> None:
        print(f"seed {seed}")
        self.card, self.rng = card, np.random.default_rng(seed)
        self.log: Log = []
        self.done = dict.fromkeys(self.DEEDS, 0)
        self.checked = 0

    def job(self, optimizer: str, count: int) -> Job:
        arrays = {"adam": "pgmv", "sgd": "pg", "sgd with momentum": "pgm", "adagrad": "pgv"}
        gradient = (None, "fp32", "fp16", "bf16")[int(self.rng.integers(4))]
        return Job(
            self.card,
            count,
            int(self.rng.integers(1 << 30)),
            gradient=gradient,
            arrays=arrays[optimizer],
        )

    def turn(self, deed: str) -> None:
        rng, card, backend = self.rng, self.card, self.card.backend
        rule = list(RULES)[int(rng.integers(len(RULES)))]
        count = int(rng.choice(COUNTS))
        name = rule.split()[0]
        job = self.job(rule, count)
        given: dict[str, object] = {"step": int(rng.integers(1, 100)), **RULES[rule]}
        if deed in ("fused", "scatter"):
            index = np.sort(rng.integers(0, count, 40)).astype(np.uint32)
            if deed == "scatter":
                chunk = index // card.config.block_elements
                index = index[np.lexsort((rng.random(40), chunk))]
            given["g"] = job.pairs(index, rng.standard_normal(40).astype(np.float32), deed)
        if deed == "unwritten":
            given["g"] = card.alloc(count)
        bytes_ = rng.integers(0, 256, 700, dtype=np.uint8)
        back = np.zeros_like(bytes_)
        if deed in ("memory", "host", "drive"):
            own = {"host": deed == "host", "peer": deed == "drive"}
            write = bool(rng.integers(2))
            backend.inject(Injection(kind="slverr", write=write, nth=int(rng.integers(3)), **own))
        try:
            if deed == "scan":
                scan = card.scan(job.buffers["g"]).wait()
                self.log += [scan.found_inf, scan.sum_of_squares.hex()]
            else:
                run = job.start(name, **given)
                there = backend.submit_peer_write(self.BASE, bytes_)
                here = backend.submit_peer_read(self.BASE + 4096, back)
                if deed in ("abort", "reset"):
                    backend.advance(int(rng.integers(1, 1500)))
                if deed == "abort":
                    run.abort()
                if deed == "reset":
                    card.reset()
                run.wait()
                there.wait()
                here.wait()
                self.log += [run.cycles, run.counters, run.duplicates]
                self.checked += job.check()
        except (
            AbortedError,
            CompletionError,
            DeviceError,
            KernelError,
            PeerReadError,
            PeerWriteError,
            PostedWriteError,
        ) as error:
            self.log.append((type(error).__name__, str(error)))
            backend.heal()
            card.reset()
        backend.heal()
        self.log += state(card)
        self.log += [buffer.read().tobytes() for buffer in job.buffers.values()]
        self.log.append(back.tobytes())
        job.free()
        self.done[deed] += 1

    def run(self, turns: int) -> Log:
        for turn in range(turns):
            self.turn(self.DEEDS[turn % len(self.DEEDS)])
        return [*self.log, self.done, self.checked]


@pytest.mark.deep
@pytest.mark.parametrize("options", [(), ("--lanes", "4", "--chunk-bytes", "512")], ids=str)
def test_what_is_verilated_is_what_is_shipped(options: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "top.v"
    done = CliRunner().invoke(cli._app(), ["rtl", TOP, *options, "-o", str(out)])
    assert done.exit_code == 0, done.output
    config = SmartssdConfig()
    if options:
        with nearstep.open("sim:smartssd?lanes=4&chunk_bytes=512") as device:
            config = device.backend.config
    text = out.read_text()
    assert text == shipped_verilog(TOP, config).read_text()
    assert text.count("  smartssd_fu unit") == config.kernel.units
    assert f"module {TOP}(" in text


@pytest.mark.deep
@pytest.mark.parametrize("url", [SHIPPED, SMALL], ids=["16 units, stalled", "4 lanes"])
def test_random_runs_and_faults_show_the_same(url: str) -> None:
    turns = 4 * len(Traffic.DEEDS)
    log = both(url, lambda card: Traffic(card, 3).run(turns))
    *_, done, checked = log
    errors = {each[0] for each in log if isinstance(each, tuple)}
    print(f"{len(log)} observations, {checked} elements compared, {done}, {sorted(errors)}")
    assert set(done.values()) == {4}
    assert checked > 1000
    assert len(errors) >= 3


@pytest.mark.deep
def test_a_difference_of_one_cycle_is_seen() -> None:
    def see(card: SmartssdDevice) -> Log:
        card.backend.advance(1 + (card.backend.options.top == "whole"))
        return state(card)

    with pytest.raises(AssertionError, match="observation 0 of 4"):
        both(SMALL, see)


def test_units_of_the_shipped_card_are_rtl() -> None:
    with pytest.raises(OptionError, match="fu must be rtl with top=whole"):
        nearstep.open(f"{SMALL}&top=whole&fu=native")
