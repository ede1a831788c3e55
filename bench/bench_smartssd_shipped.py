"""The SmartSSD card as it is shipped, one Verilated object, alone and behind its PCIe endpoint,
beside the one whose units are objects of their own: cycles of what the host does, and how fast they
are simulated."""

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from harness import Results, option, report, script, track
from measuring import arrays, load, timed

import nearstep
from nearstep.smartssd.device import SmartssdDevice

URLS = ("sim:smartssd", "sim:smartssd?top=whole", "sim:smartssd?bus=pcie", "sim:smartssd?fu=native")
BYTES = 1 << 20
BASE = 1 << 30  # where no array is
ACCESSES = ("register read", "register write", "write of 1 MiB", "read of 1 MiB")


def accesses(device: SmartssdDevice) -> dict[str, int]:
    backend = device.backend
    count = device.regs.updater0.count.address
    data = np.random.default_rng(1).integers(0, 256, BYTES, dtype=np.uint8)
    found = np.empty_like(data)
    actions: tuple[Callable[[], Any], ...] = (
        lambda: backend.read_register(count),
        lambda: backend.write_register(count, 1),
        lambda: (backend.write_memory(BASE, data), backend.flush()),
        lambda: backend.read_memory(BASE, found),
    )
    cycles = {}
    for kind, access in zip(ACCESSES, actions, strict=True):
        before = device.cycles or 0
        access()
        cycles[kind] = (device.cycles or 0) - before
    if not np.array_equal(found, data):
        raise RuntimeError("what was read is not what was written")
    return cycles


def step(device: SmartssdDevice, count: int) -> tuple[Results, list[bytes]]:
    buffers = load(device, arrays(count))
    device.update("adam", buffers, step=1).wait()
    seconds, _, run = timed(lambda: device.update("adam", buffers, step=2).wait())
    found = {"parameters": count, "cycles": run.cycles, "simulated_params_per_s": count / seconds,
        "simulated_cycles_per_s": run.cycles / seconds}  # fmt: skip
    return found, [buffer.read().tobytes() for buffer in buffers.values()]


@script
def main(count: Annotated[int, option("Parameters of a step.")] = 1 << 17) -> None:
    """Run all (the first time builds of some minutes), write build/bench/smartssd_shipped.json."""
    rows, bits = [], []
    for url in track(URLS, "cards"):
        with nearstep.open(url) as device:
            assert isinstance(device, SmartssdDevice)
            found, held = step(device, count)
            rows.append({"url": url, "step": found, "accesses": accesses(device)})
            bits.append(held)
    if any(each != bits[0] for each in bits):
        raise RuntimeError("the devices give different bits")
    if len({row["step"]["cycles"] for row in rows}) != 1:
        raise RuntimeError("a run takes different cycles")
    report("smartssd_shipped", bytes=BYTES, rows=rows)
