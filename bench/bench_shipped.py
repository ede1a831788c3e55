"""How fast tops are simulated as they are shipped, one Verilated object each, beside the devices of
parts that stand for them; bits and cycles of both are compared."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import report
import typer
from rich.console import Console

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.coarse import CoarsePool
from nearstep.threads import VARIABLE
from nearstep_sim.coarse.shipped_ring import shipped_ring

DIMM = "sim:axdimm?memory=ddr4-1600&channels="
RING = "sim:coarse?devices=4&memory_bytes=64MiB"
PAIRS = {
    "adam_kernel": ("sim:axdimm", "sim:axdimm?top=whole"),
    "axdimm_channel": (f"{DIMM}1", f"{DIMM}1&top=channel"),
    "axdimm_module": (f"{DIMM}2", f"{DIMM}2&top=whole"),
}
"""Of each top the device that stands for it, and the top itself."""

console = Console()

DEVICE = "coarse_device"

Run = Callable[[], int]
Digest = Callable[[], str]


def axdimm(device: AxdimmDevice, count: int) -> tuple[Run, Digest]:
    """A step of Adam on every channel, and the digest of what all arrays hold."""
    rng = np.random.default_rng(1)
    work = []
    for channel in device.channels:
        arrays = {name: device.alloc(count, channel=channel.number) for name in "pgmv"}
        for name, buffer in arrays.items():
            values = rng.standard_normal(count, np.float32)
            buffer.write(np.square(values) if name == "v" else values)
        work.append(arrays)

    def run() -> int:
        if device.dimm is None:
            return int(device.update("adam", work[0], step=1).wait().cycles)
        before = device.cycles or 0
        with device.acceleration():
            for each in [device.update("adam", arrays, step=1) for arrays in work]:
                each.wait()
        return (device.cycles or 0) - before

    return run, lambda: digest(b.read() for arrays in work for b in arrays.values())


def ring(pool: CoarsePool, count: int) -> tuple[Run, Digest]:
    """A sum over all devices, on both rings."""
    rng = np.random.default_rng(1)
    tensor = pool.tensor([rng.standard_normal(count, np.float32) for _ in range(pool.devices)])

    def run() -> int:
        before = pool.device.cycles or 0
        pool.all_reduce(tensor, "average")
        return (pool.device.cycles or 0) - before

    return run, lambda: digest(tensor.read(device) for device in range(pool.devices))


def digest(arrays: Iterator[np.ndarray]) -> str:
    """Of the bits of arrays."""
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(array.tobytes())
    return whole.hexdigest()


def timed(run: Run, held: Digest, times: int) -> dict[str, Any]:
    """Cycles of each run, the time of the fastest, and what is held in the end."""
    run()  # the first one takes memory
    cycles, seconds = [], []
    for _ in range(times):
        begin = time.perf_counter()
        cycles.append(run())
        seconds.append(time.perf_counter() - begin)
    return {"cycles": cycles, "seconds": min(seconds), "digest": held()}


def measured(url: str, count: int, times: int) -> dict[str, Any]:
    """Runs of an AXDIMM device; elements are those of all channels."""
    with nearstep.open(url) as device:
        assert isinstance(device, AxdimmDevice)
        found = timed(*axdimm(device, count), times)
        return {"device": url, "elements": count * len(device.channels), **found}


def ring_measured(*, whole: bool, count: int, times: int) -> dict[str, Any]:
    """Runs of four COARSE devices; elements are those of a tensor."""
    name = "shipped_ring" if whole else RING
    device = shipped_ring(RING, links_inside=True) if whole else None
    with CoarsePool.open(RING) if device is None else CoarsePool(device) as pool:
        return {"device": name, "elements": count, **timed(*ring(pool, count), times)}


def row(top: str, parts: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Both, which must have the same bits and cycles."""
    for key in ("cycles", "digest", "elements"):
        if parts[key] != whole[key]:
            raise RuntimeError(f"{top}: {key} of parts is {parts[key]}, of the whole {whole[key]}")
    cycles = parts["cycles"][-1]
    return {
        "label": "measured (this machine, one core)",
        "top": top,
        "devices": [each["device"] for each in (parts, whole)],
        "elements": parts["elements"],
        "cycles": cycles,
        "cycles_per_s": [cycles / each["seconds"] for each in (parts, whole)],
        "elements_per_s": [parts["elements"] / each["seconds"] for each in (parts, whole)],
        "whole_over_parts": parts["seconds"] / whole["seconds"],
    }


def main(
    tops: Annotated[list[str] | None, typer.Argument(help="Tops (default: all).")] = None,
    count: Annotated[int, typer.Option(help="Parameters of a step, a channel.")] = 100_000,
    tensor: Annotated[int, typer.Option(help="Elements of a sum.")] = 1 << 18,
    times: Annotated[int, typer.Option(help="Runs, of which the fastest counts.")] = 3,
) -> None:
    """Run them (the first time builds of some minutes), and write build/bench/shipped.json."""
    known = [*PAIRS, DEVICE]
    if unknown := sorted(set(tops or ()) - set(known)):
        raise typer.BadParameter(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    os.environ[VARIABLE] = "1"
    rows = []
    for top in tops or known:
        if top == DEVICE:
            both = [ring_measured(whole=each, count=tensor, times=times) for each in (False, True)]
        else:
            both = [measured(url, count, times) for url in PAIRS[top]]
        rows.append(row(top if top != DEVICE else f"{DEVICE}, four in a ring", *both))
        console.print(rows[-1])
    console.print(f"written: {report.write('shipped', {'rows': rows})}")


if __name__ == "__main__":
    typer.run(main)
