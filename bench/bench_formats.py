"""Cycles of AdamW on a DDR4-1600 channel by the formats in memory: binary32, bfloat16, and moments
in 8 bits."""

from typing import Annotated

from harness import Results, option, report, script, track
from measuring import CLOCK_HZ

import nearstep
from nearstep.axdimm.device import SKEW_BEATS
from nearstep.updater.device import KernelDevice
from nearstep.updater.formats import DTYPES
from nearstep_spec.blockwise import SIGNED
from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.updater.operands import array_bytes, operands

DEVICE = "sim:axdimm?memory=ddr4-1600&fu=native&gradient_formats=fp32,bf16"
MOMENTS = "state_format=bf16"
ALL = f"{MOMENTS}&parameter_format=bf16"
EIGHT_BIT = "state_format=dynamic8"
STOCHASTIC = "stochastic_rounding=yes"
KINDS = {"p, g, m, v fp32": ("", "fp32"), "m, v bf16": (MOMENTS, "fp32"),
    "m, v bf16, stochastic": (f"{MOMENTS}&{STOCHASTIC}", "fp32"), "g, m, v bf16": (MOMENTS, "bf16"),
    "g, m, v bf16, stochastic": (f"{MOMENTS}&{STOCHASTIC}", "bf16"),
    "p, g, m, v bf16": (ALL, "bf16"),
    "p, g, m, v bf16, stochastic": (f"{ALL}&{STOCHASTIC}", "bf16"),
    "m, v 8 bits": (EIGHT_BIT, "fp32"), "g bf16, m, v 8 bits": (EIGHT_BIT, "bf16"),
    "p, g bf16, m, v 8 bits": (f"{EIGHT_BIT}&parameter_format=bf16", "bf16"),
    "m, v 8 bits, 4 units": (f"{EIGHT_BIT}&functional_units=4", "fp32")}  # fmt: skip
"""Options of the kernel and format of the gradients, by what is in which format."""

NEAR = {
    "m, v 8 bits": "m, v bf16",
    "g bf16, m, v 8 bits": "g, m, v bf16",
    "p, g bf16, m, v 8 bits": "p, g, m, v bf16",
}
"""Moments in 8 bits, and bfloat16 in their place."""

BANKS = 16  # of a rank of x8 parts: arrays begin in the same one, as they are placed on a DIMM


def than_bf16(results: Results) -> Results:
    faster = [f"{row['than_bf16']:.3f}" for row in results["rows"] if "than_bf16" in row]
    return {"faster": " and ".join([", ".join(faster[:-1]), faster[-1]])}


def measure(kind: str, count: int) -> Results:
    options, gradient = KINDS[kind]
    rounding = nearstep.Rounding(seed=1) if STOCHASTIC in options else None
    with nearstep.open("&".join(filter(None, (DEVICE, options))), KernelDevice) as device:
        table = operands(device.config)
        formats = {n: gradient if n == "g" else each.format for n, each in table.items()}
        nbytes = {n: array_bytes(device.config, form, count) for n, form in formats.items()}
        quantized = [n for n, form in formats.items() if form in SIGNED]
        skews = {n: (1 + k) * SKEW_BEATS * BEAT_BYTES for k, n in enumerate(quantized)}
        buffers = {}
        for n, form in formats.items():
            size, dtype = nbytes[n] // DTYPES[form].itemsize, DTYPES[form]
            place = {"align": BANKS * BEAT_BYTES, "offset": skews.get(n, 0)}
            buffers[n] = device.alloc(size, dtype, **place)
            buffers[n].fill(0)
        with device.acceleration():
            run = device.update(
                "adamw", buffers, step=1, gradient_format=gradient, rounding=rounding
            ).wait()
        # Each array that is read, and each that is written, once.
        moved = sum((bool(table[n].read) + bool(table[n].write)) * nbytes[n] for n in formats)
        assert run.cycles is not None
        return {"formats": kind, "device": device.url, "bytes_per_parameter": moved / count,
            "cycles": run.cycles, "beats": run.counters["read_beats"] + run.counters["write_beats"],
            "fraction_of_peak": moved / (device.config.beat_bytes * run.cycles),
            "params_per_s": count * CLOCK_HZ / run.cycles}  # fmt: skip


@script
def main(count: Annotated[int, option("Parameters.")] = 1_000_000) -> None:
    """Measure, print, and write build/bench/formats.json."""
    rows = [measure(kind, count) for kind in track(KINDS, "formats")]
    base, by_kind = rows[0], {row["formats"]: row for row in rows}
    for kind, near in NEAR.items():
        by_kind[kind]["than_bf16"] = by_kind[near]["cycles"] / by_kind[kind]["cycles"]
    for row in rows:
        row["faster"] = base["cycles"] / row["cycles"]
        row["fewer_bytes"] = base["bytes_per_parameter"] / row["bytes_per_parameter"]
    report("formats", than_bf16, count=count, rows=rows)
