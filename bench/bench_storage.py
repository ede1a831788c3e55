"""Reads and writes of a drive, beside fio and beside a plain loop, in turn, in one run.

A ratio is the median of those of each round, because a drive that others use as well is not the
same from one round to the next.
"""

import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from harness import FOLDER, Results, console, option, report, script, track
from measuring import timed

from nearstep.storage import checksum
from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_set import create_set
from nearstep.storage.store import Store

OFFSET = 1 << 20  # where what is not the store's begins in the file: behind the superblocks
DEPTHS = (1, 2, 4, 8, 16)
WHO = ("loop", "fio", "drive", "store")


def dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def loop(path: Path, action: str, data: np.ndarray, block: int) -> None:
    call = os.preadv if action == "read" else os.pwritev
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        for at in range(0, data.nbytes, block):
            if call(fd, [data[at : at + block]], OFFSET + at) != block:
                raise OSError(f"short {action}")
    finally:
        os.close(fd)


def fio(program: str, path: Path, action: str, nbytes: int, block: int, depth: int) -> float:
    command = [program, "--name=bench", f"--filename={path}", f"--rw={action}", f"--bs={block}"]
    command += [f"--size={nbytes}", f"--offset={OFFSET}", f"--iodepth={depth}"]
    command += ["--ioengine=libaio", "--direct=1", "--output-format=json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    return float(found["jobs"][0][action]["bw_bytes"])


def rate(nbytes: int, action: Callable[[], Any]) -> float:
    return nbytes / timed(action).wall


def measure(
    path: Path, nbytes: int, block: int, depth: int, rounds: int, program: str | None
) -> list[Results]:
    size = {"drive_bytes": nbytes + (64 << 20), "extent_bytes": block}
    create_set([path], owner="bench_storage", overwrite=True, **size)
    data, out = aligned_bytes(nbytes), aligned_bytes(nbytes)
    data[:] = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    rates: dict[tuple[str, str], list[float]] = {}

    def note(action: str, who: str, run: Callable[[], Any]) -> None:
        rates.setdefault((action, who), []).append(rate(nbytes, run))

    def note_fio(action: str) -> None:
        if program:
            found = fio(program, path, action, nbytes, block, depth)
            rates.setdefault((action, "fio"), []).append(found)

    first = OFFSET // BLOCK_BYTES
    with Store.open([path], owner="bench_storage", queue_depth=depth) as store:
        (drive,) = store.drives
        store.add("tensor", nbytes)
        for _ in range(rounds):
            note_fio("write")
            note("write", "loop", lambda: loop(path, "write", data, block))
            note("write", "drive", lambda: drive.write(first, data).wait())
            note("write", "store", lambda: store.write("tensor", data))
            out[:] = 0
            note("read", "store", lambda: store.read("tensor", out))
            if not np.array_equal(out, data):
                raise AssertionError("what was read is not what was written")
            note("read", "drive", lambda: drive.read(first, out).wait())
            note("read", "loop", lambda: loop(path, "read", out, block))
            note_fio("read")
    return [
        {"action": action, "block": block, "depth": depth, "bytes": nbytes,
         **compared({who: rates.get((action, who)) for who in WHO})}
        for action in ("read", "write")]  # fmt: skip


def compared(rates: dict[str, list[float] | None]) -> Results:
    row: Results = {f"{who}_all": found for who, found in rates.items()}
    for who, found in rates.items():
        row[f"{who}_bytes_per_s"] = statistics.median(found) if found else None
    for base in ("loop", "fio"):
        for mine in ("drive", "store"):
            pairs = zip(rates[mine] or [], rates[base] or [], strict=False)
            ratios = [a / b for a, b in pairs]
            row[f"{mine}_over_{base}"] = statistics.median(ratios) if ratios else None
    rates_of = {who: row[f"{who}_bytes_per_s"] for who in WHO}
    row["mb"] = {who: dash(each and each / 1e6, ".0f") for who, each in rates_of.items()}
    row["over_fio"] = {who: dash(row[f"{who}_over_fio"], ".2f") for who in ("drive", "store")}
    return row


@script
def main(
    folder: Annotated[Path, option("of the file, on a drive")] = FOLDER,
    megabytes: Annotated[int, option("2**20 bytes that are moved")] = 256,
    rounds: Annotated[int, option("of everybody in turn")] = 7,
    block: Annotated[int, option("bytes of a read or write")] = 1 << 20,
) -> None:
    """Measure each depth, and write build/bench/storage.json."""
    folder.mkdir(parents=True, exist_ok=True)
    program, version = shutil.which("fio"), None
    if program:
        done = subprocess.run([program, "--version"], stdout=subprocess.PIPE, text=True, check=True)
        version = done.stdout.strip()
    else:
        console.print("fio is not on PATH: rates are beside the plain loop alone")
    path = folder / "bench_storage.drive"
    rows = []
    try:
        for depth in track(DEPTHS, "depths"):
            rows += measure(path, megabytes << 20, block, depth, rounds, program)
    finally:
        path.unlink(missing_ok=True)
    data = np.random.default_rng(2).integers(0, 256, 64 << 20, np.uint8)
    best = max(rate(data.nbytes, lambda: checksum.crc32(data)) for _ in range(5))
    report("storage", lambda results: {"version": results["fio"] or "fio was not on this machine."},
        fio=version, rounds=rounds, cores=os.cpu_count(),
        crc={"engine": checksum.engine, "bytes_per_s": best}, rows=rows)  # fmt: skip
