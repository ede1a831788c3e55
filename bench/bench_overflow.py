"""Optimizer state of several times the device's memory, on drives, beside torch's on mapped files.

All three do the same AdamW steps on the same parameters and gradients, in turn, in one run:
nearstep on a device with drives (O_DIRECT), and after each step a generation that outlasts a power
cut; torch's fused step with its moments on files that are mapped into memory, where the system's
page cache has them, without and with `msync` after each step. Nothing limits the page cache: what
fits into the machine's memory is never read from the mapped files.

With `--no-direct` and a folder in memory, such as one below `/dev/shm`, what is left is what the
host does: copies, CRCs, and the emulated device.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import report
import torch
import typer
from rich.console import Console
from rich.table import Table

import nearstep
from nearstep.storage.store import Store

console = Console()


def parameters(count: int, elements: int) -> list[torch.nn.Parameter]:
    """Make equal parameters."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(elements, generator=generator) * 0.02) for _ in range(count)
    ]


def mapped(path: Path, elements: int) -> np.memmap:
    """Zeros in a file."""
    return np.memmap(path, np.float32, "w+", shape=(elements,))


class OnFiles:
    """torch's fused AdamW with its moments on mapped files."""

    def __init__(self, folder: Path, own: list[torch.nn.Parameter], *, syncs: bool) -> None:
        self.parameters = own
        self.syncs = syncs
        self.paths: list[Path] = []
        self.maps: list[np.memmap] = []
        self.optimizer = torch.optim.AdamW(own, lr=1e-3, fused=True)
        for index, p in enumerate(own):
            state: dict[str, Any] = {"step": torch.zeros(())}
            for key in ("exp_avg", "exp_avg_sq"):
                self.paths.append(folder / f"{syncs}.{index}.{key}.bin")
                self.maps.append(mapped(self.paths[-1], p.numel()))
                state[key] = torch.from_numpy(self.maps[-1])
            self.optimizer.state[p] = state

    def step(self) -> None:
        self.optimizer.step()
        for each in self.maps if self.syncs else ():
            each.flush()


def timed(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def main(
    folder: Annotated[Path, typer.Option(help="of the files, on a drive")] = report.FOLDER,
    count: Annotated[int, typer.Option(help="parameters")] = 32,
    elements: Annotated[int, typer.Option(help="of each")] = 1 << 19,
    times: Annotated[int, typer.Option(help="state and gradients over memory")] = 8,
    drives: Annotated[int, typer.Option(help="files in the place of drives")] = 2,
    steps: Annotated[int, typer.Option(help="that are measured, after one that is not")] = 7,
    eviction: Annotated[str, typer.Option(help="updated_first or belady")] = "updated_first",
    direct: Annotated[bool, typer.Option(help="O_DIRECT")] = True,
) -> None:
    work = folder / "overflow"
    work.mkdir(parents=True, exist_ok=True)
    total = 16 * count * elements
    memory = total // times
    places = [work / f"{index}.drive" for index in range(drives)]
    for place in places:
        place.unlink(missing_ok=True)
    files: list[OnFiles] = []
    # Three states of it (docs/storage.md), and indices.
    store = Store.create(
        places, drive_bytes=3 * total // drives + (1 << 24), owner="bench", direct=direct
    )
    try:
        own = parameters(count, elements)
        optimizer = nearstep.optim.AdamW(
            own,
            lr=1e-3,
            device=f"golden:axdimm?memory_bytes={-(-memory // (1 << 20)) + 4}MiB",
            drives=store,
            memory=memory,
            eviction=eviction,
        )
        files = [OnFiles(work, parameters(count, elements), syncs=syncs) for syncs in (False, True)]
        jobs = {
            "drives": (optimizer.step, own),
            "mapped": (files[0].step, files[0].parameters),
            "mapped_msync": (files[1].step, files[1].parameters),
        }
        times_of: dict[str, list[float]] = {name: [] for name in jobs}
        generator = torch.Generator().manual_seed(2)
        before = optimizer.traffic.as_dict()
        for step in range(steps + 1):
            if step == 1:
                before = optimizer.traffic.as_dict()
            gradients = [torch.randn(elements, generator=generator) for _ in range(count)]
            for name, (action, theirs) in jobs.items():
                for p, gradient in zip(theirs, gradients, strict=True):
                    p.grad = gradient
                seconds = timed(action)
                if step:
                    times_of[name].append(seconds)
        after = optimizer.traffic.as_dict()
        for each in files:
            for p, q in zip(own, each.parameters, strict=True):
                if not torch.equal(p, q):
                    raise AssertionError("parameters differ from torch's")
        peak = optimizer.memory_peak
        assert peak is not None
        del optimizer, jobs
    finally:
        store.close()
        for path in [*places, *(path for each in files for path in each.paths)]:
            path.unlink(missing_ok=True)
    per_step = {
        key: (int(after[key] or 0) - int(before[key] or 0)) / steps / (count * elements)
        for key in ("to_drives", "from_drives", "gradients_down", "masters_down", "parameters_up")
    }
    medians = {name: statistics.median(found) for name, found in times_of.items()}
    written = report.write(
        "overflow",
        {
            "label": "measured (wall clock); the update itself is the golden model's",
            "cores": os.cpu_count(),
            "parameters": count * elements,
            "state_bytes": total,
            "memory": memory,
            "memory_peak": peak,
            "drives": drives,
            "direct": direct,
            "steps": steps,
            "eviction": eviction,
            "bytes_per_parameter": per_step,
            "seconds": medians,
            "seconds_all": times_of,
            "over_mapped": medians["drives"] / medians["mapped"],
            "over_mapped_msync": medians["drives"] / medians["mapped_msync"],
        },
    )
    table = Table(title=f"{total >> 20} MiB of state in {memory >> 20} MiB of memory; {written}")
    for column in ("", "s a step", "all"):
        table.add_column(column, justify="right")
    for name, found in times_of.items():
        table.add_row(name, f"{medians[name]:.3f}", " ".join(f"{each:.2f}" for each in found))
    console.print(table)
    console.print({key: round(value, 3) for key, value in per_step.items()}, "bytes a parameter")


if __name__ == "__main__":
    typer.run(main)
