"""Optimizer state of several times the device's memory, on drives, beside torch's on mapped files.

Nothing limits the page cache: what fits into the machine's memory is never read from the mapped
files. With `--no-direct` and a folder in memory, such as one below `/dev/shm`, what is left is what
the host does: copies, CRCs, and the emulated device.
"""

import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
from harness import FOLDER, Results, option, report, script
from measuring import Mapped, in_turn

import nearstep
from nearstep.storage.store import Store

NAMES = {"drives": "drives", "mapped": "mapped", "mapped_msync": "mapped, msync"}
MOVED = ("to_drives", "from_drives", "gradients_down", "masters_down", "parameters_up")


def compared(seconds: dict[str, float]) -> list[Results]:
    first, *others = seconds.values()
    over = ["", *(f"{first / each:.1f} times" for each in others)]
    return [
        {"name": name, "took": took, "over": each}
        for (name, took), each in zip(seconds.items(), over, strict=True)
    ]


def parameters(count: int, elements: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(elements, generator=generator) * 0.02) for _ in range(count)
    ]


def moved(traffic: Results) -> dict[str, int]:
    return {key: int(traffic[key] or 0) for key in MOVED}


def measure(
    work: Path, store: Store, count: int, elements: int, memory: int, steps: int, eviction: str
) -> Results:
    own = parameters(count, elements)
    optimizer: Any = nearstep.optim.AdamW(
        own, lr=1e-3, device=f"golden:axdimm?memory_bytes={-(-memory // (1 << 20)) + 4}MiB",
        drives=store, memory=memory, eviction=eviction)  # fmt: skip
    files = [
        Mapped(work / f"{flushes}", parameters(count, elements), flushes=flushes)
        for flushes in (False, True)
    ]
    jobs = dict(zip(NAMES, (optimizer.step, *(each.step for each in files)), strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    generator = torch.Generator().manual_seed(2)
    for step in range(steps + 1):
        if step == 1:  # the first one is not measured
            seconds, before = {name: [] for name in jobs}, moved(optimizer.traffic.as_dict())
        gradients = [torch.randn(elements, generator=generator) for _ in range(count)]
        for theirs in (own, *(each.parameters for each in files)):
            for p, gradient in zip(theirs, gradients, strict=True):
                p.grad = gradient
        for name, (took,) in in_turn(jobs, 1).items():
            seconds[name].append(took)
    after = moved(optimizer.traffic.as_dict())
    for each in files:
        if not all(map(torch.equal, own, each.parameters)):
            raise AssertionError("parameters differ from torch's")
    peak = optimizer.memory_peak
    assert peak is not None
    return {
        "memory_peak": peak,
        "bytes_per_parameter": {
            key: (after[key] - before[key]) / steps / (count * elements) for key in MOVED
        },
        "seconds": {name: statistics.median(found) for name, found in seconds.items()},
        "seconds_all": seconds}  # fmt: skip


@script
def main(
    folder: Annotated[Path, option("of the files, on a drive")] = FOLDER,
    count: Annotated[int, option("parameters")] = 32,
    elements: Annotated[int, option("of each")] = 1 << 19,
    times: Annotated[int, option("state and gradients over memory")] = 8,
    drives: Annotated[int, option("files in the place of drives")] = 2,
    steps: Annotated[int, option("that are measured, after one that is not")] = 7,
    eviction: Annotated[str, option("updated_first or belady")] = "updated_first",
    direct: Annotated[bool, option("O_DIRECT")] = True,
) -> None:
    """Measure steps of all in turn, and write build/bench/overflow.json."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 16 * count * elements
    # Three states of it (docs/storage.md), and indices.
    size = 3 * total // drives + (1 << 24)
    with tempfile.TemporaryDirectory(prefix="bench_overflow.", dir=folder) as name:
        places = [Path(name) / f"{index}.drive" for index in range(drives)]
        with Store.create(places, drive_bytes=size, owner="bench", direct=direct) as store:
            found = measure(Path(name), store, count, elements, total // times, steps, eviction)
    seconds = found["seconds"]
    report(
        "overflow", lambda results: {
        "how": " with O_DIRECT" if results["direct"] else "",
        "compared": compared({NAMES[name]: took for name, took in results["seconds"].items()}),
    }, cores=os.cpu_count(), parameters=count * elements, state_bytes=total, memory=total // times,
        drives=drives, direct=direct, steps=steps, eviction=eviction, **found,
        **{f"over_{name}": seconds["drives"] / seconds[name] for name in list(NAMES)[1:]},
    )  # fmt: skip
