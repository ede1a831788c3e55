"""The SmartSSD card as it is shipped, one Verilated object, alone and behind its PCIe endpoint,
beside the one whose units are objects of their own: cycles of what the host does, and how fast they
are simulated."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import report
import typer
from rich.console import Console

import nearstep
from nearstep.smartssd.device import SmartssdDevice

URLS = (
    "sim:smartssd",
    "sim:smartssd?top=whole",
    "sim:smartssd?bus=pcie",
    "sim:smartssd?fu=native",
)
BYTES = 1 << 20
BASE = 1 << 30
"""Where no array is."""

console = Console()


def timed(device: SmartssdDevice, access: Callable[[], object]) -> int:
    """Cycles of the device that an access takes."""
    before = device.cycles or 0
    access()
    return (device.cycles or 0) - before


def accesses(device: SmartssdDevice) -> dict[str, int]:
    """Cycles of accesses of the host's processor."""
    backend = device.backend
    count = device.regs.updater0.count.address
    data = np.random.default_rng(1).integers(0, 256, BYTES, dtype=np.uint8)
    found = np.empty_like(data)
    cycles = {
        "register read": timed(device, lambda: backend.read_register(count)),
        "register write": timed(device, lambda: backend.write_register(count, 1)),
        "write of 1 MiB": timed(
            device, lambda: (backend.write_memory(BASE, data), backend.flush())
        ),
        "read of 1 MiB": timed(device, lambda: backend.read_memory(BASE, found)),
    }
    if not np.array_equal(found, data):
        raise RuntimeError("what was read is not what was written")
    return cycles


def step(device: SmartssdDevice, count: int) -> dict[str, Any]:
    """The second step of Adam on a device: cycles, and the time that simulating them takes."""
    rng = np.random.default_rng(1)
    arrays = {name: device.alloc(count) for name in "pgmv"}
    for name, buffer in arrays.items():
        values = rng.standard_normal(count, np.float32)
        buffer.write(np.square(values) if name == "v" else values)
    device.update("adam", arrays, step=1).wait()
    begin = time.perf_counter()
    run = device.update("adam", arrays, step=2).wait()
    seconds = time.perf_counter() - begin
    bits = [buffer.read().tobytes() for buffer in arrays.values()]
    return {
        "parameters": count,
        "cycles": run.cycles,
        "simulated_params_per_s": count / seconds,
        "simulated_cycles_per_s": run.cycles / seconds,
        "digest": hash(tuple(bits)),
    }


def main(count: Annotated[int, typer.Option(help="Parameters of a step.")] = 1 << 17) -> None:
    """Run all (the first time builds of some minutes), write build/bench/smartssd_shipped.json."""
    rows = []
    for url in URLS:
        with nearstep.open(url) as device:
            assert isinstance(device, SmartssdDevice)
            rows.append({"url": url, "step": step(device, count), "accesses": accesses(device)})
        console.print(rows[-1])
    if len({row["step"].pop("digest") for row in rows}) != 1:
        raise RuntimeError("the devices give different bits")
    if len({row["step"]["cycles"] for row in rows}) != 1:
        raise RuntimeError("a run takes different cycles")
    console.print(f"written: {report.write('smartssd_shipped', {'bytes': BYTES, 'rows': rows})}")


if __name__ == "__main__":
    typer.run(main)
