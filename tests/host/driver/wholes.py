"""Tops as they are shipped, beside the devices of parts that stand for them: what is the same for
all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.device import Device
from nearstep.errors import ArgumentError, DtypeError, NearstepError
from nearstep.smartssd.device import SmartssdDevice
from nearstep.updater.device import KernelDevice
from nearstep_hw.generate import command
from nearstep_spec.dram.command import Command

from .dimm_scenarios import Log
from .job import Job, accelerated, host_reaches

COUNTS = (1, 15, 16, 17, 127, 129, 1001, 4097)
RULES: dict[str, tuple[str, str, dict[str, object]]] = {
    "adam": ("adam", "pgmv", {}),
    "sgd": ("sgd", "pg", {"weight_decay": 0.05}),
    "sgd_momentum": ("sgd", "pgm", {"momentum": 0.9, "nesterov": True}),
    "adagrad": ("adagrad", "pgv", {"lr_decay": 0.01}),
}
"""Optimizer, arrays and hyper-parameters of each rule."""
KINDS = {"lost": "never", "no answer": "never", "late": "late"}
BESIDE = 3 << 20
"""Where a drive's bytes are, and no array is."""


def written(top: str, options: Sequence[str], folder: Path) -> bytes:
    """What `nearstep rtl` writes."""
    path = folder / f"{top}.v"
    rtl = typer.Typer()
    rtl.command(context_settings=command.context_settings)(command)
    result = CliRunner().invoke(rtl, [top, *options, "-o", str(path)])
    assert result.exit_code == 0, result.output
    return path.read_bytes()


def seen_of_both(urls: Sequence[str], see: Callable[[Any], Log]) -> Log:
    """What is seen of two devices, which must be the same."""
    logs = []
    for url in urls:
        with nearstep.open(url) as device:
            logs.append(see(device))
    for place, (one, other) in enumerate(zip(*logs, strict=True)):
        assert one == other, f"observation {place} of {len(logs[0])}"
    return logs[0]


def state(device: Device) -> Log:
    """Cycles, all registers, and what the memory and the host have counted."""
    counted = ("host_statistics", "dram_counters", "memory_counters", "traffic", "peer_traffic")
    found = [getattr(device.backend, name, None) for name in counted]
    return [device.cycles, device.regs.dump(), *(repr(each) for each in found)]


def check_a_cycle_is_seen(urls: Sequence[str]) -> None:
    """The comparison finds two devices of which one has gone a cycle further."""
    opened: list[Device] = []

    def see(device: Device) -> Log:
        opened.append(device)
        device.backend.advance(len(opened))
        return state(device)

    with pytest.raises(AssertionError, match="observation 0 of"):
        seen_of_both(urls, see)


class Traffic:
    """Random runs of every rule on all channels of a device, from the same seed on each device.

    On one channel something is done in each turn: its run is let end, given back and gone on with
    in the midst, aborted, reset, left without an answer, meets an error, reads what nobody has
    written. Beside runs of a card its drive moves bytes. Runs that end are compared with the golden
    model; there are elements beside the arrays that nobody may touch.
    """

    def __init__(self, device: KernelDevice, seed: int, deeds: Sequence[str]) -> None:
        print(f"seed {seed}")
        self.device, self.rng, self.deeds = device, np.random.default_rng(seed), deeds
        self.log: Log = []
        self.done = dict.fromkeys(deeds, 0)
        self.checked = 0

    def jobs(self) -> Iterator[tuple[Job, str, dict[str, Any]]]:
        """A job of each channel, its optimizer and what it is given."""
        rng, config = self.rng, self.device.config
        for channel in range(self.device.channel_count):
            rule = str(rng.choice(config.rules))
            name, arrays, more = RULES[rule]
            forms = [None, *config.gradient_formats]
            gradient = forms[int(rng.integers(len(forms)))]
            job = Job(
                self.device, int(rng.choice(COUNTS)), int(rng.integers(1 << 30)), channel=channel,
                gradient=gradient, arrays=arrays, guarded=True, odd=True,
            )  # fmt: skip
            given: dict[str, Any] = {
                "lr": float(rng.choice([1e-3, 2.0, 0.0, 1e30])),
                "weight_decay": float(rng.choice([0.0, 0.1])),
                "step": int(rng.integers(1, 100)),
                **more,
            }
            if name == "adam":
                given["eps"] = float(rng.choice([1e-8, 0.0, 1.0]))
                given["decoupled_weight_decay"] = bool(rng.integers(2))
            yield job, name, given

    def prepare(self, deed: str, job: Job, given: dict[str, Any]) -> None:
        """What is done before the run of a channel."""
        rng, inject = self.rng, self.device.backend.inject
        if deed == "unwritten":
            dtype = job.buffers["g"].dtype
            given["g"] = self.device.alloc(job.count, dtype, channel=job.channel)
        elif deed in ("fused", "scatter"):
            index = np.sort(rng.integers(0, job.count, 40)).astype(np.uint32)
            if deed == "scatter":
                index = index[
                    np.lexsort((rng.random(40), index // job.device.config.block_elements))
                ]
            given["g"] = job.pairs(index, rng.standard_normal(40).astype(np.float32), deed)
        elif deed in ("lost", "read error", "write error", "no answer", "late"):
            name = "g" if deed == "lost" else str(rng.choice(list(job.buffers)))
            at = job.buffers[name].address + int(rng.integers(job.count)) * 4 // 64 * 64
            kind = KINDS.get(deed) or str(rng.choice(["slverr", "decerr"]))
            either = deed in ("no answer", "late") and bool(rng.integers(2))
            write = deed == "write error" or either
            inject(Injection(kind=kind, write=write, base=at, limit=at + 64, times=1, delay=500))
        elif deed in ("memory", "host", "drive"):
            own = {"host": deed == "host", "peer": deed == "drive"}
            write, nth = bool(rng.integers(2)), int(rng.integers(3))
            inject(Injection(kind="slverr", write=write, nth=nth, **own))

    def meddle(self, deed: str, number: int, run: Any) -> None:
        """What is done in the midst of a run."""
        device, backend, pause = self.device, self.device.backend, int(self.rng.integers(1, 1500))
        if deed == "illegal":  # a mode register is lost, a calibration deferred
            backend.give(number, Command.MRS, bank_group=0, bank=1, row=1)
            backend.give(number, Command.ZQCS)
        if deed in ("pause", "abort", "reset", "illegal"):
            backend.advance(pause)
        if deed == "pause":
            arbiter = device.regs[f"arbiter{number}"]
            arbiter.mode.acceleration = 0
            backend.advance(pause)
            self.log.append(arbiter.status.bits)
            arbiter.mode.acceleration = 1
        if deed == "abort":
            run.abort()
        if deed == "reset" and host_reaches(device):
            device.reset()
        elif deed == "reset":
            device.channels[number].reset_kernel()

    def turn(self, deed: str) -> None:
        rng, device, backend = self.rng, self.device, self.device.backend
        work = list(self.jobs())
        number = int(rng.integers(len(work)))
        self.prepare(deed, work[number][0], work[number][2])
        moved, back = rng.integers(0, 256, 700, dtype=np.uint8), np.zeros(700, np.uint8)
        try:
            with accelerated(device):
                if deed == "scan":
                    g = work[number][0].buffers["g"]
                    scan = device.scan(g, "bf16" if g.dtype == np.uint16 else None).wait()
                    self.log += [scan.found_inf, scan.sum_of_squares.hex()]
                else:
                    runs = [job.start(name, **given) for job, name, given in work]
                    moves = []
                    if isinstance(device, SmartssdDevice):
                        moves.append(backend.submit_peer_write(BESIDE, moved))
                        moves.append(backend.submit_peer_read(BESIDE + 4096, back))
                    self.meddle(deed, number, runs[number])
                    for run in runs:
                        run.wait(max_cycles=40_000)
                        self.log += [run.cycles, dict(run.counters)]
                    for move in moves:
                        move.wait()
            if deed != "scan":
                self.checked += sum(job.check() for job, *_ in work)
        except NearstepError as error:
            if isinstance(error, ArgumentError | DtypeError):
                raise
            self.log.append((type(error).__name__, str(error)))
            backend.heal()
            device.reset()
        backend.heal()
        self.log += state(device)
        for job, *_ in work:
            job.take_back()
            self.log += [whole.read().tobytes() for whole in job._whole]
            job.free()
        self.log.append(back.tobytes())
        self.done[deed] += 1

    def run(self, turns: int) -> Log:
        """What is seen of so many turns, each deed in its turn."""
        for turn in range(turns):
            self.turn(self.deeds[turn % len(self.deeds)])
        transactions = getattr(self.device.backend, "transactions", list)()
        print(f"{len(self.log)} observations, {self.checked} elements compared, {self.done}")
        return [*self.log, transactions, self.done, self.checked]


def random_runs(urls: Sequence[str], seed: int, deeds: Sequence[str], turns: int) -> set[str]:
    """Random runs on two devices, which must show the same; the errors that there were."""
    log = seen_of_both(urls, lambda device: Traffic(device, seed, deeds).run(turns))
    *_, done, checked = log
    assert sum(done.values()) == turns
    assert checked > 100 * turns
    return {each[0] for each in log if isinstance(each, tuple) and each[0].endswith("Error")}
