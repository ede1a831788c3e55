"""How fast tops are simulated as they are shipped, one Verilated object each, beside the devices of
parts that stand for them; bits and cycles of both are compared."""

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Annotated

import numpy as np
import typer
from harness import Results, argument, option, report, script
from measuring import arrays, load, timed

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

DEVICE = "coarse_device"

Run = Callable[[], int]
Digest = Callable[[], str]


def axdimm(device: AxdimmDevice, count: int) -> tuple[Run, Digest]:
    host = arrays(count)
    work = [load(device, host, channel=channel.number) for channel in device.channels]

    def run() -> int:
        if device.dimm is None:
            return int(device.update("adam", work[0], step=1).wait().cycles)
        before = device.cycles or 0
        with device.acceleration():
            for each in [device.update("adam", buffers, step=1) for buffers in work]:
                each.wait()
        return (device.cycles or 0) - before

    return run, lambda: digest(b.read() for buffers in work for b in buffers.values())


def ring(pool: CoarsePool, count: int) -> tuple[Run, Digest]:
    rng = np.random.default_rng(1)
    tensor = pool.tensor([rng.standard_normal(count, np.float32) for _ in range(pool.devices)])

    def run() -> int:
        before = pool.device.cycles or 0
        pool.all_reduce(tensor, "average")
        return (pool.device.cycles or 0) - before

    return run, lambda: digest(tensor.read(device) for device in range(pool.devices))


def digest(found: Iterator[np.ndarray]) -> str:
    whole = hashlib.sha256()
    for array in found:
        whole.update(array.tobytes())
    return whole.hexdigest()


def measure(job: tuple[Run, Digest], times: int) -> Results:
    run, held = job
    run()  # the first one allocates memory
    runs = [timed(run) for _ in range(times)]
    return {
        "cycles": [each.result for each in runs],
        "seconds": min(each.wall for each in runs),
        "digest": held(),
    }


def measured(url: str, count: int, times: int) -> Results:
    with nearstep.open(url) as device:
        assert isinstance(device, AxdimmDevice)
        found = measure(axdimm(device, count), times)
        return {"device": url, "elements": count * len(device.channels), **found}


def ring_measured(*, whole: bool, count: int, times: int) -> Results:
    name = "shipped_ring" if whole else RING
    device = shipped_ring(RING, links_inside=True) if whole else None
    with CoarsePool.open(RING) if device is None else CoarsePool(device) as pool:
        return {"device": name, "elements": count, **measure(ring(pool, count), times)}


def row(top: str, parts: Results, whole: Results) -> Results:
    for key in ("cycles", "digest", "elements"):
        if parts[key] != whole[key]:
            raise RuntimeError(f"{top}: {key} of parts is {parts[key]}, of the whole {whole[key]}")
    cycles, both = parts["cycles"][-1], (parts, whole)
    return {"top": top, "devices": [each["device"] for each in both], "elements": parts["elements"],
        "cycles": cycles, "cycles_per_s": [cycles / each["seconds"] for each in both],
        "elements_per_s": [parts["elements"] / each["seconds"] for each in both],
        "whole_over_parts": parts["seconds"] / whole["seconds"]}  # fmt: skip


@script
def main(
    tops: Annotated[list[str] | None, argument("Tops (default: all).")] = None,
    count: Annotated[int, option("Parameters of a step, a channel.")] = 100_000,
    tensor: Annotated[int, option("Elements of a sum.")] = 1 << 18,
    times: Annotated[int, option("Runs, of which the fastest counts.")] = 3,
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
    report("shipped", rows=rows)
