"""What several benchmarks measure with: arrays of a step, times, areas, and needed bytes."""

import importlib.util
import json
import mmap
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.operands import element_bytes, operands

CLOCK_HZ = 200_000_000  # of a kernel, in rates that are modelled
Area = dict[str, float]


def arrays(count: int, names: Iterable[str] = "pgmv", seed: int = 1) -> dict[str, np.ndarray]:
    """Make parameters, gradients and moments as in training."""
    rng = np.random.default_rng(seed)
    made = {name: rng.standard_normal(count, np.float32) for name in names}
    return {name: np.square(each) if name == "v" else each for name, each in made.items()}


def load(device: Any, host: Mapping[str, np.ndarray], **options: Any) -> dict[str, Any]:
    """Allocate a buffer for each array, with its contents."""
    buffers = {name: device.alloc(array.size, **options) for name, array in host.items()}
    for name, array in host.items():
        buffers[name].write(array)
    return buffers


DEEPSPEED = """
import json, os, sys, time, torch, deepspeed
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1",
                  LOCAL_RANK="0")
folder, layers, width, steps, subgroup = sys.argv[1], *map(int, sys.argv[2:])
model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
aio = {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True, "single_submit": False}
nvme = {"device": "nvme", "nvme_path": folder, "buffer_count": 16, "pipeline_read": True,
        "pipeline_write": True}
config = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "aio": aio,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "sub_group_size": subgroup, "offload_optimizer": nvme},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
x, times = torch.randn(1, width, dtype=torch.bfloat16), []
for _ in range(steps + 1):
    engine.backward(engine(x).float().square().mean())
    begun = time.perf_counter()
    engine.step()
    times.append(time.perf_counter() - begun)
print(json.dumps({"version": deepspeed.__version__, "seconds": times[1:]}))
"""
"""Prints its version, and seconds of steps of AdamW with state on NVMe."""


class Timed(NamedTuple):
    """Seconds on the wall clock and of the processor, and what the action returned."""

    wall: float
    processor: float
    result: Any


def timed(action: Callable[[], object]) -> Timed:
    """Measure an action. On a machine with other work the processor's time is the fairer one."""
    begun = time.perf_counter(), time.process_time()
    result = action()
    return Timed(time.perf_counter() - begun[0], time.process_time() - begun[1], result)


def medians(action: Callable[[], object], runs: int) -> tuple[float, ...]:
    """Measure the median of some runs as `timed`, after a run that does not count."""
    action()
    times = [timed(action) for _ in range(runs)]
    return tuple(statistics.median(each[n] for each in times) for n in (0, 1))


def in_turn(
    jobs: Mapping[str, Callable[[], object]], rounds: int, *, reverse: bool = False
) -> dict[str, list[float]]:
    """Measure seconds of each job in each round; `reverse` every second round."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds):
        for name in list(jobs)[:: -1 if reverse and number % 2 else 1]:
            seconds[name].append(timed(jobs[name]).wall)
    return seconds


def differ(found: np.ndarray, expected: np.ndarray) -> int:
    """Count binary32 elements with other bits."""
    return int(np.count_nonzero(found.view(np.uint32) != expected.view(np.uint32)))


def ring_differs(config: Any, parts: Any, given: Any, results: Any, wire: str = "fp32") -> int:
    """Count elements of sums on all devices whose bits differ from those of the golden rings."""
    from nearstep_sim.golden.coarse import ring_all_reduce

    wrong = 0
    for part in parts:
        where = slice(part.start, part.stop)
        golden = ring_all_reduce([each[where] for each in given], operation="sum", wire=wire,
            config=config, reverse=part.reverse)  # fmt: skip
        wrong += sum(differ(each[where], golden) for each in results)
    return wrong


def area(component: Any, boxes: str | None = None) -> Area:
    """Synthesise a component for UltraScale+, without modules whose names match `boxes`."""
    from nearstep_hw.verilog import to_verilog
    from nearstep_sim.synthesis import ultrascale_plus_area, ultrascale_plus_cells

    cells = ultrascale_plus_cells(to_verilog(component, "top"), "top", boxes)
    return {**ultrascale_plus_area(cells), "cells": dict(cells)}


def unit_area(rule: Any) -> dict[str, Any]:
    """Synthesise a functional unit, with its arithmetic units and its latency."""
    from nearstep_hw.rule.rtl import FunctionalUnit

    unit = FunctionalUnit(rule)
    program = getattr(rule, "program", rule)
    return {"units": dict(program.units()), "latency_cycles": unit.latency, **area(unit)}


def by_deepspeed(
    python: Path | None, folder: Path, elements: int, steps: int, subgroup: int
) -> dict[str, Any] | str:
    """Measure DeepSpeed's CPU Adam on NVMe by itself, or say why not: with its default of 4 buffers
    it ends with an error."""
    if python is None:
        if importlib.util.find_spec("deepspeed") is None:
            return "DeepSpeed is not installed here (--deepspeed PYTHON names an interpreter)"
        python = Path(sys.executable)
    width = 1024
    arguments = [elements // (width * width), width, steps, subgroup]
    done = subprocess.run(
        [str(python), "-c", DEEPSPEED, str(folder), *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        return f"DeepSpeed ended with {done.returncode}: {lines[-1]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def update_bytes(
    config: UpdateKernelConfig, rule: str, count: int, *, pairs: int | None = None
) -> int:
    """Count bytes of an update: arrays that are read and arrays that are written, each once.

    Shares of a bound are of these, so that a device which reads twice what it needs has a smaller
    share. Where the gradients are `pairs` of fp32 values, an index and a value each are needed.
    """
    found = config.rule_set.rules[config.rule_set.names.index(rule)]
    table = operands(config)
    needed = sum(
        count * element_bytes(table[name].format)
        for names in (found.arrays_in, found.arrays_out)
        for name in names
        if name != "g"
    )
    width = element_bytes("fp32")
    return needed + (count * width if pairs is None else pairs * (4 + width))


def scan_bytes(count: int) -> int:
    """Count bytes of a scan of fp32 gradients: each once."""
    return count * element_bytes("fp32")


class Resident:
    """Memory of this process, beyond that at the beginning."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        self._before = self._status("VmRSS")

    @staticmethod
    def _status(key: str) -> int:
        (found,) = re.findall(rf"^{key}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        return int(found) * 1024

    def peak(self) -> int:
        """Return the most bytes so far."""
        return self._status("VmHWM") - self._before


class Mapped:
    """torch's fused AdamW with its moments on files that are mapped into memory."""

    def __init__(self, stem: Path, own: list[Any], *, flushes: bool = True) -> None:
        import torch

        self.parameters, self.flushes = own, flushes
        self.maps: list[tuple[int, mmap.mmap]] = []
        self.optimizer = torch.optim.AdamW(own, lr=1e-3, fused=True)
        for index, p in enumerate(own):
            state: dict[str, Any] = {"step": torch.zeros(())}
            for key in ("exp_avg", "exp_avg_sq"):
                file = os.open(f"{stem}.{index}.{key}.bin", os.O_RDWR | os.O_CREAT)
                os.truncate(file, 4 * p.numel())
                self.maps.append((file, mmap.mmap(file, 4 * p.numel())))
                state[key] = torch.frombuffer(self.maps[-1][1], dtype=torch.float32)
            self.optimizer.state[p] = state

    def step(self) -> None:
        self.optimizer.step()
        for _, each in self.maps if self.flushes else ():
            each.flush()

    def drop(self) -> None:
        """Drop the pages of the files from memory: they have been flushed."""
        for file, each in self.maps:
            each.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
