"""Reads and writes of a drive, beside fio and beside a plain loop.

All on the same file with O_DIRECT, in turn, in one run: a loop of one thread, `Drive` (blocks
alone), `Store` (tensors, with their CRCs) and, where the system has it, fio with `libaio` at the
same block and depth. Rates are medians over the rounds; a ratio is the median of those of each
round, because a drive that others use as well is not the same from one round to the next.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import report
import typer
from rich.console import Console
from rich.table import Table

from nearstep.storage import checksum
from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_set import create_set
from nearstep.storage.store import Store

OFFSET = 1 << 20
"""Where what is not the store's begins in the file: behind the superblocks."""

console = Console()


def loop(path: Path, action: str, data: np.ndarray, block: int) -> None:
    """One thread, one read or write after the other."""
    call = os.preadv if action == "read" else os.pwritev
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        for at in range(0, data.nbytes, block):
            if call(fd, [data[at : at + block]], OFFSET + at) != block:
                raise OSError(f"short {action}")
    finally:
        os.close(fd)


def fio(program: str, path: Path, action: str, nbytes: int, block: int, depth: int) -> float:
    """Bytes a second, as fio has counted them."""
    command = [program, "--name=bench", f"--filename={path}", f"--rw={action}", f"--bs={block}"]
    command += [f"--size={nbytes}", f"--offset={OFFSET}", f"--iodepth={depth}"]
    command += ["--ioengine=libaio", "--direct=1", "--output-format=json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    return float(found["jobs"][0][action]["bw_bytes"])


def rate(nbytes: int, action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return nbytes / (time.perf_counter() - begun)


def measure(
    path: Path, nbytes: int, block: int, depth: int, rounds: int, program: str | None
) -> list[dict[str, Any]]:
    """Rates of everybody, reading and writing, at one depth."""
    create_set(
        [path],
        drive_bytes=nbytes + (64 << 20),
        owner="bench_storage",
        extent_bytes=block,
        overwrite=True,
    )
    data, out = aligned_bytes(nbytes), aligned_bytes(nbytes)
    data[:] = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    rates: dict[tuple[str, str], list[float]] = {}

    def note(action: str, who: str, value: float) -> None:
        rates.setdefault((action, who), []).append(value)

    first = OFFSET // BLOCK_BYTES
    with Store.open([path], owner="bench_storage", queue_depth=depth) as store:
        (drive,) = store.drives
        store.add("tensor", nbytes)
        for _ in range(rounds):
            if program:
                note("write", "fio", fio(program, path, "write", nbytes, block, depth))
            note("write", "loop", rate(nbytes, lambda: loop(path, "write", data, block)))
            note("write", "drive", rate(nbytes, lambda: drive.write(first, data).wait()))
            note("write", "store", rate(nbytes, lambda: store.write("tensor", data)))
            out[:] = 0
            note("read", "store", rate(nbytes, lambda: store.read("tensor", out)))
            if not np.array_equal(out, data):
                raise AssertionError("what was read is not what was written")
            note("read", "drive", rate(nbytes, lambda: drive.read(first, out).wait()))
            note("read", "loop", rate(nbytes, lambda: loop(path, "read", out, block)))
            if program:
                note("read", "fio", fio(program, path, "read", nbytes, block, depth))
    rows = []
    for action in ("read", "write"):
        row: dict[str, Any] = {"action": action, "block": block, "depth": depth, "bytes": nbytes}
        for who in ("loop", "drive", "store", "fio"):
            found = rates.get((action, who))
            row[f"{who}_bytes_per_s"] = statistics.median(found) if found else None
            row[f"{who}_all"] = found
        for who in ("loop", "fio"):
            base = rates.get((action, who))
            for mine in ("drive", "store"):
                name = f"{mine}_over_{who}"
                pairs = zip(rates[action, mine], base or [], strict=False)
                row[name] = statistics.median([a / b for a, b in pairs]) if base else None
        rows.append(row)
    return rows


def sums(nbytes: int) -> dict[str, Any]:
    """What a core makes of CRC-32."""
    data = np.random.default_rng(2).integers(0, 256, nbytes, np.uint8)
    best = max(rate(nbytes, lambda: checksum.crc32(data)) for _ in range(5))
    return {"engine": checksum.engine, "bytes_per_s": best}


def main(
    folder: Annotated[Path, typer.Option(help="of the file, on a drive")] = report.FOLDER,
    megabytes: Annotated[int, typer.Option(help="2**20 bytes that are moved")] = 256,
    rounds: Annotated[int, typer.Option(help="of everybody in turn")] = 7,
    block: Annotated[int, typer.Option(help="bytes of a read or write")] = 1 << 20,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    program = shutil.which("fio")
    if program is None:
        console.print("fio is not on PATH: rates are beside the plain loop alone")
    path = folder / "bench_storage.drive"
    rows = []
    try:
        for depth in (1, 2, 4, 8, 16):
            console.print(f"depth {depth} ...")
            rows += measure(path, megabytes << 20, block, depth, rounds, program)
    finally:
        path.unlink(missing_ok=True)
    version = None
    if program:
        done = subprocess.run([program, "--version"], stdout=subprocess.PIPE, text=True, check=True)
        version = done.stdout.strip()
    crc = sums(64 << 20)
    written = report.write(
        "storage",
        {
            "label": "measured (wall clock)",
            "fio": version,
            "rounds": rounds,
            "cores": os.cpu_count(),
            "crc": crc,
            "rows": rows,
        },
    )
    table = Table(title=f"MB/s, and ratios of each round; CRC-32 {crc['engine']}; {written}")
    for column in ("", "depth", "loop", "fio", "drive", "store", "drive/fio", "store/fio"):
        table.add_column(column, justify="right")
    for row in rows:
        speeds = [row[f"{who}_bytes_per_s"] for who in ("loop", "fio", "drive", "store")]
        ratios = [row["drive_over_fio"], row["store_over_fio"]]
        table.add_row(
            row["action"],
            str(row["depth"]),
            *("-" if each is None else f"{each / 1e6:.0f}" for each in speeds),
            *("-" if each is None else f"{each:.2f}" for each in ratios),
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
