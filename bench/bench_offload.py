"""How far an offloaded model overlaps on the RTL of the two-channel DIMM, and without overlap."""

from typing import Annotated

from harness import FOLDER, Results, option, report, script, track

from nearstep.measure.overlap import Overlap, Stack
from nearstep.work.trace import picture, write_trace

DEVICE = "sim:axdimm?memory=ddr4-1600&channels=2"
CASES = [(12, 128, 2048, 5), (12, 128, 4096, 5), (12, 128, 8192, 5), (24, 128, 4096, 6),
    (24, 128, 6000, 6), (24, 128, 8192, 6), (12, 512, 8192, 5), (24, 512, 4096, 6),
    (24, 512, 6000, 6)]  # fmt: skip
"""Layers, their width, rows of the input, and the budget in layers."""


def row(stack: Stack, found: Overlap) -> Results:
    phase, serial = found.overlapped.phase, found.serial.phase
    engine = found.overlapped.report
    assert engine is not None, "it was offloaded"
    return {"layers": stack.layers, "parameters": stack.layers * stack.width**2,
        "rows": stack.batch, "budget": engine.budget,
        "share": engine.budget / 4 / (stack.layers * stack.width**2), "peak": engine.peak,
        "bits": found.bits, "cycles": phase.duration, "serial_cycles": serial.duration,
        "busy": dict(phase.busy), "longest": max(phase.busy, key=lambda name: phase.busy[name]),
        "serial_busy": dict(serial.busy), "ratio": found.ratio,
        "ratio_of_bounds": found.ratio_of_bounds, "gain": found.gain}  # fmt: skip


@script
def main(
    device: Annotated[str, option("of the optimizer")] = DEVICE,
    seed: Annotated[int, option("of parameters and input")] = 1,
    most: Annotated[int, option("stacks; the smallest come first")] = len(CASES),
) -> None:
    """Measure each stack, and write build/bench/offload.json, a picture and a trace."""
    rows = []
    for layers, width, batch, room in track(CASES[:most], "stacks"):
        shape = {"layers": layers, "width": width, "batch": batch, "room": room}
        stack = Stack(device=device, seed=seed, **shape)
        found = Overlap.of(stack)
        if found.bits:
            raise AssertionError(f"{found.bits} bits differ: {stack}")
        rows.append(row(stack, found))
        if (layers, width, batch) == (12, 128, 4096):
            timeline = found.overlapped.timeline
            assert timeline is not None, "it was recorded"
            FOLDER.mkdir(parents=True, exist_ok=True)
            picture(timeline, FOLDER / "offload.png", f"{layers} layers on {device}")
            write_trace(timeline, FOLDER / "offload.trace.json")
    report("offload", device=device, rows=rows)
