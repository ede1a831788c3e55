"""Table 5 of the AXDIMM paper: parameters updated in a second by the kernel, and by a core.

*Measured*: RTL cycles of a step on `sim:axdimm`, at 200 MHz. The paper's chips, K4ABG165WA of 32
Gb, are two dies of 16 Gb in a package (Samsung; JESD79-4 has no die above 16 Gb), so a refresh
takes as long as one of 16 Gb, 550 ns (JESD79-4, tRFC1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from nearstep.device import open_device
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
    """

    name: str
    kind: str
    theoretical: float | None
    achieved: float
    source: str

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
            cycles = _step(device, elements, seed)
            channels = device.channel_count
        theoretical = channels * CHANNEL_BYTES_PER_S / BYTES_PER_PARAMETER
        achieved = channels * elements / (cycles / CLOCK_HZ)
        source = f"{url}, {elements} parameters a channel, {cycles} cycles"
        yield Rate(f"AXDIMM, {name}", "measured", theoretical, achieved, source)


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
