# amaranth: UnusedElaboratable=no
"""COARSE: exact sums beside sums in the order of the ring, in cycles of the RTL."""

from dataclasses import replace
from itertools import product
from typing import Annotated

import numpy as np
from bench_coarse import arrays_of
from harness import Results, option, report, script, track
from measuring import differ

from nearstep.coarse import CoarsePool
from nearstep_hw.coarse.sync_core import SyncCore
from nearstep_hw.verilog import to_verilog
from nearstep_sim.golden.coarse_cpp import exact_sum
from nearstep_sim.synthesis import (
    ecp5_area,
    ecp5_cells,
    ultrascale_plus_area,
    ultrascale_plus_cells,
)
from nearstep_spec.coarse.config import CoarseConfig

WIRE = "bf16"
DEVICES = (2, 3, 4)
ALUS = (8, 16)
URL = f"sim:coarse?groups=1&window=direct&memory=ideal&memory_bytes=16MiB&exact={WIRE}"


def measure(devices: int, alus: int, nbytes: int) -> Results:
    with CoarsePool.open(f"{URL}&devices={devices}&alus={alus}") as pool:
        arrays = arrays_of(pool, nbytes // 4)
        row: Results = {"devices": devices, "alus": alus, "differ": 0}
        golden = np.empty_like(arrays[0])
        busy = 0
        for name, op, divisor in (
            ("ring", "sum", 0),
            ("sum", "sum", 1),
            ("average", "average", devices),
        ):
            tensor = pool.tensor(arrays)
            pool.all_reduce(tensor, op, WIRE, exact=divisor > 0)
            before, busy = busy, max(d.cores[0].cycles for d in pool.counters().devices)
            row[name] = busy - before
            if divisor:
                exact_sum(arrays, [golden], wire=WIRE, divisor=divisor)
                row["differ"] += sum(differ(tensor.read(d), golden) for d in range(devices))
        return {**row, **{f"{each}_over": row[each] / row["ring"] for each in ("sum", "average")}}


def areas() -> list[Results]:
    """Synthesise a sync core as it is shipped, with exact sums and without, for two families."""
    families = {
        "UltraScale+": lambda text: ultrascale_plus_area(ultrascale_plus_cells(text, "top")),
        "ECP5": lambda text: ecp5_area(ecp5_cells(text, "top")),
    }
    rows = []
    for exact, family in track(list(product(((), (WIRE,)), families)), "cores"):
        text = to_verilog(SyncCore(replace(CoarseConfig(), exact=exact)), "top")
        rows.append(
            {"exact": WIRE if exact else "none", "family": family, **families[family](text)}
        )
    return rows


@script
def main(
    kib: Annotated[int, option("Tensor of each device, in KiB.", min=1)] = 1024,
    area: Annotated[bool, option("Synthesise the sync core instead (may take an hour).")] = False,
) -> None:
    """Measure pools of 2 to 4 devices, and write build/bench/coarse_exact.json."""
    if area:
        report("coarse_exact_area", rows=areas())
        return
    shapes = [(devices, alus) for alus in ALUS for devices in DEVICES]
    rows = [measure(*shape, kib << 10) for shape in track(shapes, "devices")]
    report("coarse_exact", rows=rows, kib=kib, differ=sum(row["differ"] for row in rows))
