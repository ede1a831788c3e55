"""Optimizer state of several times the memory that is given, on drives, beside what else does it.

`host:` with state in fp32, bf16 and 8 bits; each beside the bytes of its last step alone: the same
reads and writes of as many files, as many at once, in as much memory, and the flushes of a commit.
They are moved by a loop of this file, the stand-in for fio, and by fio if that is on PATH. In fp32
beside an emulated device, torch's fused AdamW on mapped files, and DeepSpeed's on NVMe.

The drives use O_DIRECT, so that no page cache helps them. It helps *mapped*, whose state is read
from memory; *dropped* are mapped files whose pages are dropped before each step (MADV_DONTNEED and
POSIX_FADV_DONTNEED), as a machine without memory for them would have. With `--no-direct` and a
folder in memory, such as one below `/dev/shm`, what is left is what the host does.
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from harness import FOLDER, Results, option, report, script
from measuring import Mapped, Resident, by_deepspeed, timed

import nearstep
from nearstep.storage import checksum
from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive import QUEUE_DEPTH, DriveTransfer, flushes
from nearstep.storage.store import Store
from nearstep.torch.homes.open_home import EXTENT_BYTES

NAMES = {
    "host": "drives of `host:`", "loop": "its bytes alone, own loop", "fio": "its bytes alone, fio",
    "update": "its update alone, in memory", "sums": "its CRCs alone, {crc}",
    "drives": "drives of `{emulated}`", "mapped": "mapped", "msync": "mapped, msync",
    "dropped": "mapped, msync, dropped",
}  # fmt: skip
EMULATED = "golden:axdimm"
FIRST = 1 << 20  # byte of a file at which bytes alone begin
MOVED = ("to_drives", "from_drives", "gradients_down", "masters_down", "parameters_up")


class Format(NamedTuple):
    """Dtypes of parameters and gradients, and of state; bytes of all for each parameter."""

    dtype: torch.dtype
    state: torch.dtype
    width: float


FORMATS = {
    "fp32": Format(torch.float32, torch.float32, 16),
    "bf16": Format(torch.bfloat16, torch.bfloat16, 8),
    "8-bit state": Format(torch.float32, torch.uint8, 10),
}


def compared(seconds: dict[str, float]) -> list[Results]:
    first, *others = seconds.values()
    over = ["", *(f"{first / each:.1f} times" for each in others)]
    return [
        {"name": name, "took": took, "over": each}
        for (name, took), each in zip(seconds.items(), over, strict=True)
    ]


def parameters(count: int, elements: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter((torch.randn(elements, generator=generator) * 0.02).to(dtype))
        for _ in range(count)
    ]


def moved(traffic: Results) -> dict[str, int]:
    return {key: int(traffic[key] or 0) for key in MOVED}


class Alone:
    """Reads and writes of files, of as many random bytes as a step of a store moved on each."""

    def __init__(self, store: Store, of: Store, memory: int) -> None:
        self._drives, self._of = store.drives, of
        step = store.drives[0].header.extent_bytes
        self._room = aligned_bytes(max(memory // step, 2 * len(self._drives)) * step)
        self._room[:] = np.random.default_rng(0).integers(0, 256, self._room.size, np.uint8)
        self._before = self._count()

    def _count(self) -> list[tuple[int, int]]:
        return [(each.bytes_read, each.bytes_written) for each in self._of.drives]

    def note(self) -> None:
        """Note a step."""
        now = self._count()
        pairs = zip(self._before, now, strict=True)
        self.moved = [(there[0] - here[0], there[1] - here[1]) for here, there in pairs]
        self._before = now

    def loop(self) -> None:
        """Read and write in turn, a piece after the other, and commit: flush all files, write and
        flush a block of the first, and write its copy."""
        first, step, at = self._drives[0], self._drives[0].header.extent_bytes, 0
        begun: list[DriveTransfer] = []
        for drive, sizes in zip(self._drives, self.moved, strict=True):
            for start in range(0, max(sizes), step):
                for nbytes, call in zip(sizes, (drive.read, drive.write), strict=True):
                    size = min(step, nbytes - start) // BLOCK_BYTES * BLOCK_BYTES
                    if size > 0:
                        piece = self._room[at : at + size]
                        begun.append(call((FIRST + start) // BLOCK_BYTES, piece))
                        at = (at + step) % self._room.size
        for each in begun:
            each.wait()
        DriveTransfer("flush", flushes(self._drives)).begin().wait()
        for block in (1, 2):
            first.write(block, self._room[:BLOCK_BYTES]).wait()
            if block == 1:
                first.blocks.flush()

    def fio(self, program: str) -> float:
        """Return the seconds of a job that reads and one that writes each file, as many at once in
        both together, with a flush."""
        command = [program, "--output-format=json", "--ioengine=libaio", "--direct=1", "--bs=1m"]
        command += [f"--iodepth={QUEUE_DEPTH // 2}", f"--offset={FIRST}"]
        for drive, sizes in zip(self._drives, self.moved, strict=True):
            for action, nbytes in zip(("read", "write"), sizes, strict=True):
                command += [f"--name={action}", f"--filename={drive.name}", f"--rw={action}"]
                command += [f"--size={nbytes}", f"--end_fsync={int(action == 'write')}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        found = json.loads(done.stdout[done.stdout.index("{") :])
        return max(float(job["job_runtime"]) for job in found["jobs"]) / 1e3

    def sums(self) -> None:
        """Compute a CRC of as many bytes as the store does in a step: all that are read and
        written."""
        size = self._drives[0].header.extent_bytes
        for at in range(0, sum(map(sum, self.moved)), size):
            checksum.crc32(self._room[at % self._room.size :][:size])


class Job(NamedTuple):
    """What is measured in turn; `own` returns the seconds, if others than those of the call."""

    run: Callable[[], Any]
    own: bool = False


def measure(
    work: Path, form: str, count: int, elements: int, memory: int, drives: int, steps: int, *,
    eviction: str, direct: bool, peers: bool,
) -> Results:  # fmt: skip
    """Measure a format of state; with `peers` what else keeps it."""
    dtype, state, width = FORMATS[form]
    kept: dict[str, Any] = {"state_dtype": None if state == dtype else state, "eviction": eviction}
    # Three states of it (docs/storage.md), and indices.
    size = 3 * 16 * count * elements // drives + (1 << 24)
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(elements, generator=generator).to(dtype) for _ in range(count)]

    def given(own: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        for p, gradient in zip(own, gradients, strict=True):
            p.grad = gradient
        return own

    with ExitStack() as opened:
        stores = [
            opened.enter_context(
                Store.create(
                    [work / f"{index}.{number}" for index in range(drives)], drive_bytes=size,
                    owner="bench", direct=direct, extent_bytes=EXTENT_BYTES)
            )
            for number in range(2 + peers)
        ]  # fmt: skip
        here = given(parameters(count, elements, dtype))
        resident = Resident()
        host: Any = nearstep.optim.AdamW(here, lr=1e-3, drives=stores[0], memory=memory, **kept)
        host.step()
        host.step()
        grown = resident.peak()
        bare = given(parameters(count, elements, dtype))
        alone, in_memory = (
            Alone(stores[1], stores[0], memory),
            nearstep.optim.AdamW(bare, lr=1e-3, device="host:", state_dtype=kept["state_dtype"]),
        )
        for _ in range(2):
            in_memory.step()
        jobs = {"host": Job(host.step), "loop": Job(alone.loop)}
        if program := shutil.which("fio"):
            jobs["fio"] = Job(partial(alone.fio, program), own=True)
        jobs |= {"update": Job(in_memory.step), "sums": Job(alone.sums)}
        equal = [bare]
        device: Any = None
        if peers:
            own = given(parameters(count, elements, dtype))
            url = f"{EMULATED}?memory_bytes={-(-memory // (1 << 20)) + 4}MiB"
            device = nearstep.optim.AdamW(
                own, lr=1e-3, device=url, drives=stores[2], memory=memory, eviction=eviction
            )
            for _ in range(2):
                device.step()
            jobs["drives"] = Job(device.step)
            equal.append(own)
            for name in ("mapped", "msync", "dropped"):
                theirs = given(parameters(count, elements, dtype))
                files = Mapped(work / name, theirs, flushes=name != "mapped")
                for _ in range(2):
                    files.step()
                jobs[name] = Job(files.step)
                equal.append(theirs)
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        processor: dict[str, list[float]] = {name: [] for name in jobs}
        for step in range(steps + 1):
            if step == 1:  # the first one is not measured
                seconds, processor = ({name: [] for name in jobs} for _ in range(2))
                before = device and moved(device.traffic.as_dict())
            for name, job in jobs.items():
                if name == "dropped":
                    files.drop()
                found = timed(job.run)
                seconds[name].append(found.result if job.own else found.wall)
                processor[name].append(found.processor)
                if name == "host":
                    alone.note()
        for theirs in equal:
            if not all(map(torch.equal, here, theirs)):
                raise AssertionError("parameters differ from torch's")
        assert host.memory_peak <= memory
        bound = "fio" if "fio" in jobs else "loop"
        ratios = [a / b for a, b in zip(seconds[bound], seconds["host"], strict=True)]
        of_parameter = [sum(each) / count / elements for each in zip(*alone.moved, strict=True)]
        result = {
            "memory": memory, "memory_peak": host.memory_peak, "memory_grown": grown,
            "state_over_memory": (width - dtype.itemsize) * count * elements / memory,
            "bytes": alone.moved, "read": of_parameter[0], "written": of_parameter[1],
            "bound": bound, "rate_over_bytes": statistics.median(ratios),
            "processor": {name: statistics.median(found) for name, found in processor.items()},
            "seconds": {name: statistics.median(found) for name, found in seconds.items()},
            "seconds_all": seconds}  # fmt: skip
        if device:
            after = moved(device.traffic.as_dict())
            result["emulated"] = {
                "memory_peak": device.memory_peak,
                "bytes_per_parameter": {
                    key: (after[key] - before[key]) / steps / (count * elements) for key in MOVED
                },
            }
        return result


def rows(formats: dict[str, Results]) -> list[Results]:
    """Rows of the table: each beside the step of `host:` of its format."""
    named = {"crc": checksum.engine, "emulated": EMULATED}
    return [
        {
            "state": form, "name": NAMES[name].format(**named), "took": took,
            "processor": None if name == "fio" else found["processor"][name],
            "rate": took / found["seconds"]["host"],
        }
        for form, found in formats.items()
        for name, took in found["seconds"].items()
    ]  # fmt: skip


@script
def main(
    folder: Annotated[Path, option("of the files, on a drive")] = FOLDER,
    count: Annotated[int, option("parameters")] = 32,
    elements: Annotated[int, option("of each")] = 1 << 21,
    times: Annotated[int, option("state and gradients over memory")] = 8,
    drives: Annotated[int, option("files in the place of drives")] = 2,
    steps: Annotated[int, option("that are measured, after two that are not")] = 7,
    eviction: Annotated[str, option("updated_first or belady")] = "updated_first",
    direct: Annotated[bool, option("O_DIRECT")] = True,
    deepspeed: Annotated[Path | None, option("an interpreter that has it")] = None,
) -> None:
    """Measure steps of all in turn, and write build/bench/overflow.json."""
    folder.mkdir(parents=True, exist_ok=True)
    formats = {}
    for form, (*_, width) in FORMATS.items():
        memory = int(width * count * elements) // times
        with tempfile.TemporaryDirectory(prefix="bench_overflow.", dir=folder) as name:
            formats[form] = measure(
                Path(name), form, count, elements, memory, drives, steps, eviction=eviction,
                direct=direct, peers=form == "fp32")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench_overflow.", dir=folder) as name:
        other = by_deepspeed(deepspeed, Path(name), count * elements, steps, elements)
    took = None if isinstance(other, str) else statistics.median(other["seconds"])
    named = other if isinstance(other, str) else f"DeepSpeed {other['version']}, NVMe, CPU Adam"
    deep = {"state": "fp32", "name": named, "took": took, "processor": None,
            "rate": took and took / formats["fp32"]["seconds"]["host"]}  # fmt: skip
    report(
        "overflow", lambda results: {
        "how": " with O_DIRECT" if results["direct"] else "",
        "compared": [*rows(results["formats"]), deep],
    }, cores=os.cpu_count(), parameters=count * elements, times=times, drives=drives,
        direct=direct, steps=steps, eviction=eviction, emulated=EMULATED, formats=formats,
        deepspeed=named, **formats["fp32"].pop("emulated"),
    )  # fmt: skip
