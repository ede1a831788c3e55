"""A step of AdamW whose state lies on files, the drives of golden cards, beside what else does it.

In turn with storage alone, which is what the drive and the CRCs take, and with torch's fused AdamW
on mapped files. DeepSpeed's ZeRO-3 runs by itself before them, if this interpreter, or that of
`--deepspeed`, has it; with its default of 4 buffers it ends with an error. A disk that others use
varies more than the interval of the ratio says: so the first two run once more on drives whose
transfers take their turns at a rate that is below the disk's.
"""

import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from bench_overflow import compared
from harness import FOLDER, Results, option, report, script
from measuring import Mapped, by_deepspeed, in_turn

import nearstep
from nearstep.backends.base import Completion
from nearstep.storage.aligned import aligned_empty
from nearstep.storage.blocks import BlockFile, Blocks, Calls, Move, create_file
from nearstep.storage.drive import QUEUE_DEPTH
from nearstep.storage.drive_set import DriveLike
from nearstep.storage.store import Store

EXTENT = 4 << 20  # bytes of an extent of the paced drives, as of those that `drive=` makes
NAMES = {"cards": "cards", "storage": "storage alone", "mapped": "mapped, flushed"}
MOVED = ("drives_to_cards", "cards_to_drives", "gradients_down", "parameters_up")


def share(found: Results) -> str:
    low, high = found["interval"]
    return f"{found['median']:.1%} (95 % interval {low:.1%} to {high:.1%})"


def said(results: Results) -> Results:
    found = {"files": "files" if results["cards"] > 1 else "file", "paced_rate": ""}
    found["rate"] = share(results["rate_of_storage_alone"])
    if paced := results["paced"]:
        found["paced_rate"] = (
            f"On a drive that takes one transfer after the other at {paced['bytes_per_s'] / 1e9:g} "
            f"GB/s, of {paced['parameters'] / 1e6:.1f} million parameters, it has "
            f"{share(paced['rate'])}."
        )
    found["deep"] = f"Without DeepSpeed's CPU Adam on NVMe: {results['deepspeed']}."
    if "deepspeed" in results["seconds"]:
        found["deep"] = (
            "*DeepSpeed*, by itself before the others: a model in bf16 whose fp32 parameters and\n"
            "moments lie on files, pipelined, and no whole state after a cut."
        )
    deepspeed = f"DeepSpeed {results['deepspeed']}, ZeRO-3, NVMe, CPU Adam"
    took = {NAMES.get(name, deepspeed): each for name, each in results["seconds"].items()}
    return {**found, "compared": compared(took)}


class Alone:
    """The bytes of a step through a store, without anything that computes."""

    def __init__(self, places: Sequence[DriveLike], source: Store, subgroup: int) -> None:
        self.subgroup_bytes = 4 * subgroup
        drive = source.drives[0].header
        self.store = Store.create(
            places, drive_bytes=drive.blocks * 4096, owner="alone", extent_bytes=drive.extent_bytes
        )
        for name, tensor in source.tensors.items():
            self.store.add(name, tensor.nbytes, drive=int(name.partition("@")[2]))
        self.rooms = [aligned_empty(subgroup) for _ in range(9 * len(places))]

    def step(self) -> None:
        under_way: list[tuple[Completion, str, int, Any]] = []
        writing: list[Completion] = []
        pieces = [
            (name, at, min(self.subgroup_bytes, tensor.nbytes - at))
            for name, tensor in self.store.tensors.items()
            for at in range(0, tensor.nbytes, self.subgroup_bytes)
        ]
        for number, (name, at, nbytes) in enumerate(pieces):
            room = self.rooms[number % len(self.rooms)][: nbytes // 4]
            if len(under_way) == len(self.rooms) // 2:
                self._write(under_way, writing)
            if len(writing) > len(self.rooms) // 3:
                writing.pop(0).wait()
            under_way.append((self.store.submit_read(name, room, at), name, at, room))
        while under_way:
            self._write(under_way, writing)
        for each in writing:
            each.wait()
        self.store.commit({})

    def _write(self, under_way: list[Any], writing: list[Completion]) -> None:
        reading, name, at, room = under_way.pop(0)
        reading.wait()
        writing.append(self.store.submit_write(name, room, at))


class Paced:
    """Calls of the system on a drive that moves so many bytes a second, one transfer after the
    other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free = 0.0
        self._lock = threading.Lock()

    def calls(self) -> Calls:
        return Calls(preadv=partial(self._move, os.preadv), pwritev=partial(self._move, os.pwritev))

    def _move(self, call: Move, fd: int, parts: Any, offset: int) -> int:
        with self._lock:
            begun = max(self._free, time.perf_counter())
            self._free = end = begun + sum(each.nbytes for each in parts) / self._rate
        done = call(fd, parts, offset)
        time.sleep(max(0.0, end - time.perf_counter()))
        return done


def paced_file(path: Path, nbytes: int, rate: float) -> Blocks:
    create_file(path, nbytes)
    return BlockFile(path, calls=Paced(rate).calls())


def ratio(seconds: Mapping[str, Sequence[float]]) -> Results:
    """Of the time of storage alone to that of cards: median of the rounds, its 95 % interval, and
    the least and the most."""
    found = np.array(seconds["storage"]) / np.array(seconds["cards"])
    drawn = np.random.default_rng(1).choice(found, (10_000, found.size))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return {
        "median": float(np.median(found)),
        "interval": [float(low), float(high)],
        "extremes": [float(found.min()), float(found.max())],
    }


def paced(folder: Path, elements: int, subgroup: int, rate: float, rounds: int) -> Results:
    own = torch.nn.Parameter(torch.full((elements,), 0.02))
    own.grad = torch.full((elements,), 0.5)
    nbytes = 36 * elements + (64 << 20)  # two generations and the next
    url = f"golden:smartssd?subgroup_elements={subgroup}&drive={folder}"
    made = [paced_file(folder / name, nbytes, rate) for name in ("paced", "alone")]
    with Store.create(made[:1], drive_bytes=nbytes, owner="paced", extent_bytes=EXTENT) as store:
        optimizer = nearstep.optim.AdamW([own], lr=1e-3, device=url, drives=store)
        optimizer.step()
        alone = Alone(made[1:], store, subgroup)
        alone.step()
        jobs = {"cards": optimizer.step, "storage": alone.step}
        seconds = in_turn(jobs, rounds, reverse=True)
        alone.store.close()
    return {"bytes_per_s": rate, "parameters": elements,
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "seconds_all": seconds, "rate": ratio(seconds)}  # fmt: skip


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def moved(traffic: Results) -> dict[str, int]:
    return {key: int(traffic[key] or 0) for key in MOVED}


def measure(work: Path, elements: int, subgroup: int, cards: int, steps: int) -> Results:
    generator = torch.Generator().manual_seed(1)
    own = torch.nn.Parameter(torch.randn(elements, generator=generator) * 0.02)
    twin = torch.nn.Parameter(own.detach().clone())
    own.grad = twin.grad = torch.randn(elements, generator=generator)
    tried = torch.nn.Parameter(torch.zeros(1 << 16))  # what is loaded once counts for no model
    tried.grad = torch.zeros(1 << 16)
    small = work / "small"
    small.mkdir()
    first = nearstep.optim.AdamW([tried], device=f"golden:smartssd?drive={small}")
    first.step()
    assert first.store is not None
    first.store.close()
    held = resident()
    url = f"golden:smartssd?cards={cards}&subgroup_elements={subgroup}&drive={work}"
    optimizer: Any = nearstep.optim.AdamW([own], lr=1e-3, device=url)
    optimizer.step()
    grown = resident() - held
    alone = Alone([work / f"alone{index}" for index in range(cards)], optimizer.store, subgroup)
    mapped = Mapped(work / "mapped", [twin])
    alone.step()
    mapped.step()
    before = moved(optimizer.traffic.as_dict())
    jobs = {"cards": optimizer.step, "storage": alone.step, "mapped": mapped.step}
    seconds = in_turn(jobs, steps, reverse=True)
    after = moved(optimizer.traffic.as_dict())
    if not torch.equal(own.view(torch.int32), twin.view(torch.int32)):
        raise AssertionError("parameters differ from torch's")
    alone.store.close()
    optimizer.store.close()
    return {
        "bytes_per_parameter": {
            key: (after[key] - before[key]) / steps / elements for key in MOVED
        },
        "seconds_all": seconds, "rate_of_storage_alone": ratio(seconds),
        "memory_over_subgroup": grown / (16 * subgroup)}  # fmt: skip


def emptied(work: Path) -> Path:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    return work


@script
def main(
    folder: Annotated[Path, option("of the files, on a drive")] = FOLDER,
    elements: Annotated[int, option("parameters")] = 1 << 26,
    subgroup: Annotated[int, option("elements of a subgroup, D")] = 1 << 22,
    cards: Annotated[int, option("cards, a file each")] = 1,
    steps: Annotated[int, option("that are measured, after one that is not")] = 7,
    deepspeed: Annotated[Path | None, option("an interpreter that has it")] = None,
    paced_gb: Annotated[float, option("GB/s of the paced drive; 0 leaves it out")] = 2.0,
    paced_elements: Annotated[int, option("parameters on it")] = 1 << 26,
) -> None:
    """Measure steps of all in turn, and write build/bench/cards.json."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench_cards.", dir=folder) as name:
        work = Path(name) / "drives"
        other = by_deepspeed(deepspeed, emptied(work), elements, steps, subgroup)
        found = measure(emptied(work), elements, subgroup, cards, steps)
        paces = None
        if paced_gb:
            paces = paced(emptied(work), paced_elements, subgroup, paced_gb * 1e9, steps)
    if not isinstance(other, str):
        found["seconds_all"]["deepspeed"] = other["seconds"]
    report("cards", said, cores=os.cpu_count(), parameters=elements, subgroup=subgroup, cards=cards,
        steps=steps,
        seconds={name: statistics.median(each) for name, each in found["seconds_all"].items()},
        queue_depth=QUEUE_DEPTH, paced=paces,
        deepspeed=other if isinstance(other, str) else other["version"], **found)  # fmt: skip
