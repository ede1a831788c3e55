"""Table 5 of the AXDIMM paper: parameters updated in a second by the kernel, and by a core.

*Measured*: RTL cycles of a step on `sim:axdimm`, at 200 MHz. The paper's chips, K4ABG165WA of 32
Gb, are two dies of 16 Gb in a package (Samsung; JESD79-4 has no die above 16 Gb), so a refresh
takes as long as one of 16 Gb, 550 ns (JESD79-4, tRFC1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearstep.device import open_device
from nearstep.paper.rows import Row, row
from nearstep.updater.device import KernelDevice

BYTES_PER_PARAMETER = 28
"""Four loads and three stores of fp32 (section 6.2)."""

CLOCK_HZ = 200e6
CHANNEL_BYTES_PER_S = 12.8e9
ELEMENTS = 1 << 19
"""Elements of each channel."""

DEVICES: Mapping[str, str] = {
    "32Gb, two dies of 16Gb x8": "sim:axdimm?memory=ddr4-1600&channels=2&density=32Gb&width=x16",
    "8Gb x8": "sim:axdimm?memory=ddr4-1600&channels=2",
}


@dataclass(frozen=True)
class Rate:
    """A row of the table.

    Attributes
    ----------
    kind : `paper` or `measured`.
    theoretical, achieved : parameters a second.
    source : a section, a device, or a description of the measurement.
    copied : bytes a second of the host's copies to a channel and from it, whichever are slower.
    """

    name: str
    kind: str
    theoretical: float | None
    achieved: float
    source: str
    copied: float | None = None

    @property
    def efficiency(self) -> float | None:
        return None if self.theoretical is None else self.achieved / self.theoretical


CPU = Rate("CPU, one core", "paper", 228.57e6, 140.32e6, "Table 5, DDR4-800")
AXDIMM = Rate("AXDIMM, 32Gb", "paper", 914.29e6, 789.38e6, "Table 5, two channels of DDR4-1600")
PRINTED = (CPU, AXDIMM)


def measured(elements: int = ELEMENTS, seed: int = 5) -> Iterator[Rate]:
    """Measure the rows of the RTL: both channels update `elements` each at once."""
    for name, url in DEVICES.items():
        with open_device(url, KernelDevice) as device:
            cycles, copied = _step(device, elements, seed), _copied(device, elements)
            channels = device.channel_count
        theoretical = channels * CHANNEL_BYTES_PER_S / BYTES_PER_PARAMETER
        achieved = channels * elements / (cycles / CLOCK_HZ)
        source = f"{url}, {elements} parameters a channel, {cycles} cycles"
        yield Rate(f"AXDIMM, {name}", "measured", theoretical, achieved, source, copied)


def _step(device: KernelDevice, elements: int, seed: int) -> int:
    """Measure the cycles of the slowest channel in a step of AdamW on all channels."""
    random = np.random.default_rng(seed)
    arrays = []
    for channel in range(device.channel_count):
        made = {}
        for name in ("p", "g", "m", "v"):
            values = random.standard_normal(elements, np.float32)
            made[name] = device.alloc(elements, np.float32, channel=channel)
            made[name].write(np.abs(values) if name == "v" else values)
        arrays.append(made)
    with device.acceleration():
        runs = [device.update("adamw", each, step=1) for each in arrays]
        return max(run.wait().cycles or 0 for run in runs)


def _copied(device: KernelDevice, elements: int) -> float:
    """Measure the rate of copies of an array to a channel and from it, in bytes a second."""
    buffer, array = device.alloc(elements, np.float32, channel=0), np.ones(elements, np.float32)
    at = [device.cycles or 0]
    for copy in (buffer.write, buffer.read):
        copy(array)
        at.append(device.cycles or 0)
    return array.nbytes * CLOCK_HZ / max(at[1] - at[0], at[2] - at[1])


def rows(rates: Sequence[Rate]) -> Iterator[Row]:
    """Make a row of each figure of Table 5; the DIMM's are those of the first measured rate."""
    found = next((rate for rate in rates if rate.name == f"AXDIMM, {next(iter(DEVICES))}"), None)
    achieved = None if found is None else found.achieved / 1e6
    beats = {CPU: CHANNEL_BYTES_PER_S / 2, AXDIMM: 2 * CHANNEL_BYTES_PER_S}
    where, note = "Table 5", "" if found is None else found.source
    for rate, bytes_per_s in beats.items():
        paper, most = float(rate.theoretical or 0) / 1e6, bytes_per_s / BYTES_PER_PARAMETER / 1e6
        yield row(f"{rate.name}: theoretical", where, "M/s", paper, most, kind="counted")
    here = CPU.achieved / 1e6
    yield row(f"{CPU.name}: achieved", where, "M/s", here, here, kind="input")
    of = 100 * float(CPU.efficiency or 0)
    yield row(f"{CPU.name}: efficiency", where, "%", 61.4, of, kind="input")
    paper = AXDIMM.achieved / 1e6
    more: dict[str, Any] = {"kind": "measured", "note": note or "omit --no-kernel"}
    yield row(f"{AXDIMM.name}: achieved", where, "M/s", paper, achieved, **more)
    share = None if found is None else 100 * float(found.efficiency or 0)
    yield row(f"{AXDIMM.name}: efficiency", where, "%", 86.3, share, **more)
    ratio = None if achieved is None else achieved / here
    yield row("AXDIMM over the CPU", "6.2, Table 5", "x", 5.6, ratio, **more)


def this_core(elements: int = 1 << 24) -> Rate | None:
    """Measure one thread of this machine with torch's fused AdamW; None without torch.

    Parameters
    ----------
    elements : more than fit a cache.
    """
    try:
        import torch

        from nearstep.measure.arithmetic import adam_params_per_s
    except ImportError:
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        achieved = adam_params_per_s(torch.device("cpu"), elements)
    finally:
        torch.set_num_threads(threads)
    source = f"torch.optim.AdamW(fused=True), {elements} parameters, median of some steps"
    return Rate("CPU of this machine, one thread", "measured", None, achieved, source)
