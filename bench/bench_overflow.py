"""Optimizer state of several times the device's memory, on drives, beside torch's on mapped files.

The processor's step of `host:` has the same state on drives of its own; beside it the bytes of its
last step are read and written at once by the same threads, queue depth and files, without a store.

Nothing limits the page cache: what fits into the machine's memory is never read from the mapped
files. With `--no-direct` and a folder in memory, such as one below `/dev/shm`, what is left is what
the host does: copies, CRCs, and the emulated device.
"""

import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
from harness import FOLDER, Results, option, report, script
from measuring import Mapped, timed

import nearstep
from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.store import Store

NAMES = {"drives": "drives", "mapped": "mapped", "mapped_msync": "mapped, msync",
    "host": "drives of `host:`", "bytes": "bytes of `host:` alone"}  # fmt: skip
PIECE = 32 << 20
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


class Moved:
    """Reads and writes of drives, of as many bytes as the last step of a store moved."""

    def __init__(self, store: Store, of: Store) -> None:
        self._drives, self._of = store.drives, of
        self._data, self._out = aligned_bytes(PIECE), aligned_bytes(PIECE)
        self._data[:] = 1  # pages of its own
        self._before = [(each.bytes_read, each.bytes_written) for each in of.drives]

    def note(self) -> None:
        """Note a step."""
        now = [(each.bytes_read, each.bytes_written) for each in self._of.drives]
        pairs = zip(self._before, now, strict=True)
        self.moved = [(there[0] - here[0], there[1] - here[1]) for here, there in pairs]
        self._before = now

    def run(self) -> None:
        begun = []
        for drive, (read, written) in zip(self._drives, self.moved, strict=True):
            first = 1 << 20
            for at in range(0, max(read, written), PIECE):
                for nbytes, data, call in (
                    (written, self._data, drive.write),
                    (read, self._out, drive.read),
                ):
                    if at < nbytes:
                        size = min(PIECE, nbytes - at) // BLOCK_BYTES * BLOCK_BYTES
                        begun.append(call((first + at) // BLOCK_BYTES, data[:size]))
        for each in begun:
            each.wait()
        for drive in self._drives:
            drive.blocks.flush()


def measure(
    work: Path, stores: list[Store], count: int, elements: int, memory: int, steps: int,
    eviction: str,
) -> Results:  # fmt: skip
    own = parameters(count, elements)
    optimizer: Any = nearstep.optim.AdamW(
        own, lr=1e-3, device=f"golden:axdimm?memory_bytes={-(-memory // (1 << 20)) + 4}MiB",
        drives=stores[0], memory=memory, eviction=eviction)  # fmt: skip
    here = parameters(count, elements)
    host: Any = nearstep.optim.AdamW(
        here, lr=1e-3, drives=stores[1], memory=memory, eviction=eviction
    )
    bytes_of = Moved(stores[2], stores[1])
    files = [
        Mapped(work / f"{flushes}", parameters(count, elements), flushes=flushes)
        for flushes in (False, True)
    ]
    calls = (optimizer.step, *(each.step for each in files), host.step, bytes_of.run)
    jobs = dict(zip(NAMES, calls, strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    processor: dict[str, list[float]] = {name: [] for name in jobs}
    generator = torch.Generator().manual_seed(2)
    for step in range(steps + 1):
        if step == 1:  # the first one is not measured
            seconds, processor = ({name: [] for name in jobs} for _ in range(2))
            before = moved(optimizer.traffic.as_dict())
        gradients = [torch.randn(elements, generator=generator) for _ in range(count)]
        for theirs in (own, here, *(each.parameters for each in files)):
            for p, gradient in zip(theirs, gradients, strict=True):
                p.grad = gradient
        for name, job in jobs.items():
            found = timed(job)
            seconds[name].append(found.wall)
            processor[name].append(found.processor)
            if name == "host":
                bytes_of.note()
    after = moved(optimizer.traffic.as_dict())
    for theirs in (here, *(each.parameters for each in files)):
        if not all(map(torch.equal, own, theirs)):
            raise AssertionError("parameters differ from torch's")
    peak = optimizer.memory_peak
    assert peak is not None
    assert host.memory_peak <= memory
    ratios = [a / b for a, b in zip(seconds["bytes"], seconds["host"], strict=True)]
    return {
        "memory_peak": peak,
        "host_memory_peak": host.memory_peak,
        "host_bytes": bytes_of.moved,
        "host_rate_over_bytes": statistics.median(ratios),
        "processor": {name: statistics.median(found) for name, found in processor.items()},
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
        with ExitStack() as opened:
            stores = [
                opened.enter_context(
                    Store.create(
                        [each.with_suffix(f".{number}") for each in places],
                        drive_bytes=size, owner="bench", direct=direct)
                )
                for number in range(3)
            ]  # fmt: skip
            found = measure(Path(name), stores, count, elements, total // times, steps, eviction)
    seconds = found["seconds"]
    report(
        "overflow", lambda results: {
        "how": " with O_DIRECT" if results["direct"] else "",
        "compared": compared({
            f"{NAMES[name]}, {results['processor'][name]:.2f} s of the processor": took
            for name, took in results["seconds"].items()
        }),
    }, cores=os.cpu_count(), parameters=count * elements, state_bytes=total, memory=total // times,
        drives=drives, direct=direct, steps=steps, eviction=eviction, **found,
        **{f"over_{name}": seconds["drives"] / seconds[name] for name in list(NAMES)[1:]},
    )  # fmt: skip
