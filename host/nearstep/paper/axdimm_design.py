"""Figures of the AXDIMM paper's design and of its models, counted from those of nearstep.

Sections 2 to 4 (arrays of Adam, channels, units, blocks), 6.2 (bytes a parameter, channels beside
the host's memory), and the sizes of Table 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nearstep.paper.axdimm_kernel import CLOCK_HZ
from nearstep.paper.rows import Row, row
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.dram.timing import dram_timing
from nearstep_spec.platform.load import load
from nearstep_spec.platform.models import MODELS
from nearstep_spec.rule.adam import ADAM
from nearstep_spec.updater.config import ELEMENT_BYTES

TABLE_4 = {
    "gpt3-large": (0.76, 3.0, 6.1),
    "gpt3-xl": (1.3, 5.2, 10.4),
    "gpt3-2.7b": (2.7, 10.8, 20.2),
    "gpt3-6.7b": (6.7, 26.8, 53.6),
    "gpt3-13b": (13.0, 52.0, 104.0),
}
"""Billions of parameters, GB of parameters, and GB of optimizer states."""

STATES = {"gpt3-2.7b": "8 bytes a parameter are 21.6 GB of 2.7 billion, not the printed 20.2"}
HALF = "the host's bus, 64 bits of DDR4-800, moves 256 bits in a cycle (docs/axdimm.md)"


def design() -> Iterator[Row]:
    """Make a row of each figure of the design."""
    dimm, machine = DimmConfig(density="32Gb", width="x16"), load("axdimm")
    kernel, geometry = dimm.kernel, dimm.geometry
    channel = float(machine.dimms["axdimm"].channel_bytes_per_s)
    host = float(machine.links["ddr"].bytes_per_s)
    host_timing = dram_timing("DDR4-800", dimm.density, dimm.width)
    loads, stores = len(ADAM.arrays_in), len(ADAM.arrays_out)
    gib = 1 << 30
    for name, section, unit, paper, found in (
        ("Adam: loads for a parameter", "2.2, 6.2", "", 4, loads),
        ("Adam: stores for a parameter", "2.2, 6.2", "", 3, stores),
        ("Adam: bytes for a parameter", "6.2", "bytes", 28, (loads + stores) * ELEMENT_BYTES),
        ("Channels", "3.1, 6.2", "", 2, dimm.channels),
        ("A channel", "3.1", "GiB", 16, dimm.channel_bytes / gib),
        ("Memory that the host sees", "3", "GiB", 32, dimm.channels * dimm.channel_bytes / gib),
        ("Host's clock", "3.1", "MHz", 400, 1e6 / host_timing.tck_ps),
        ("DRAM's clock", "3.1", "MHz", 800, 1e6 / dimm.timing.tck_ps),
        ("Kernel's port, a cycle", "3.3", "bits", 512, 8 * kernel.beat_bytes),
        ("Host's port, a cycle", "3.1", "bits", 512, 8 * host / CLOCK_HZ),
        ("Functional units", "3.3", "", 16, kernel.units),
        ("Block", "3.4", "KiB", 16, kernel.block_bytes / 1024),
        ("Rows of all chips in a block", "3.4", "", 2, kernel.block_bytes / geometry.row_bytes),
        ("Line of the host", "4.1", "bytes", 64, BEAT_BYTES),
        ("A channel's rate over the host's", "6.2", "x", 2, channel / host),
        ("Both channels' rate over the host's", "6.2", "x", 4, dimm.channels * channel / host),
    ):
        note = HALF if name.startswith("Host's port") else ""
        yield row(name, section, unit, float(paper), float(found), kind="counted", note=note)


def table_4(models: Iterable[str] = TABLE_4) -> Iterator[Row]:
    """Make the rows of models: parameters, and bytes of them and of their states in fp32."""
    for name in models:
        model, (billions, parameters, states) = MODELS[name], TABLE_4[name]
        layers = model.layers(model.batch, model.sequence)  # type: ignore[attr-defined]
        count = sum(layer.parameter_count for layer in layers) / 1e9
        moments = len(ADAM.states) - 1
        for what, unit, paper, found, note in (
            ("parameters", "B", billions, count, ""),
            ("bytes of parameters", "GB", parameters, ELEMENT_BYTES * count, ""),
            (
                "bytes of states",
                "GB",
                states,
                moments * ELEMENT_BYTES * count,
                STATES.get(name, ""),
            ),
        ):
            yield row(f"{name}: {what}", "Table 4", unit, paper, found, kind="counted", note=note)
