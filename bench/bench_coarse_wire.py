"""COARSE: what limits a sum whose elements have 16 bits on the links.

Runs with more ALUs and with a memory that reads and writes at the same time tell ALUs and DRAM
apart.
"""

from bench_coarse import URL, reduction
from harness import report, script, track

NBYTES = 4 << 20
DEVICES = 4
RUNS = (("fp32", 8, "halfduplex"), ("fp16", 8, "halfduplex"), ("fp16", 8, "ideal"),
    ("fp16", 16, "halfduplex"), ("fp16", 16, "ideal"))  # fmt: skip
LIMITS = {"links": "links", "alus": "ALUs", "dram": "DRAM"}


def bounds(wire: str, alus: int, memory: str) -> dict[str, float]:
    elements = NBYTES / 4 / 2  # of each ring
    per_entry = 2048 if wire == "fp32" else 4096  # bytes in memory of an entry of 128 phits
    entries = elements * 4 / per_entry  # of one step of all chunks, of all parts
    chunks = entries / DEVICES
    return {
        "links": chunks * (2 * DEVICES - 2) * 130,
        "alus": chunks * (2 * DEVICES - 1) * (per_entry // (4 * alus)),
        "dram": 2 * NBYTES / 64 / (2 if memory == "ideal" else 1),
    }


@script
def main() -> None:
    """Measure a pool of 4 devices, and write build/bench/coarse_wire.json."""
    rows = []
    for wire, alus, memory in track(RUNS, "wires"):
        found = reduction(f"{URL}{DEVICES}&memory={memory}&alus={alus}", NBYTES, wire=wire)
        limits = bounds(wire, alus, memory)
        name = max(limits, key=lambda each, limits=limits: limits[each])
        slowest = f"{LIMITS[name]}, {100 * limits[name] / found['cycles']:.2f} %"
        more = {"alus": alus, "memory": memory, "bounds": limits, "slowest": slowest}
        rows.append({**found, **more})
    report("coarse_wire", rows=rows)
