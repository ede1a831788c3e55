"""COARSE: sums in counter-rotating rings against the bound of the links; faults; snapshots.

Cycles are those of the RTL of every device, with half-duplex memories and emulated links of one
phit of 16 bytes a cycle in each direction, 100 cycles long. The bound counts payload:
(N - 1) / N x n / BW for N >= 3 devices, n / BW for two on one link. A local DRAM gives 64 bytes a
cycle and has to give 2 N / (N - 1) x 16 at most, so the links are the limit.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import numpy as np
import report
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nearstep.coarse import CoarsePool, PoolTensor
from nearstep.coarse.counters import PoolCounters
from nearstep_sim.golden.coarse import ring_all_reduce
from nearstep_spec.coarse.config import BEAT_BYTES, PAGE_BYTES, PHIT_BYTES

URL = "sim:coarse?window=direct&memory_bytes=64MiB&devices="
WINDOW_URL = "sim:coarse?devices=4&memory_bytes=16MiB"
CLOCK_HZ = 250_000_000
DEVICES = (2, 4, 8)
MEBIBYTES = (1, 4, 16)
RATES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)
SHARES = (0.0, 0.25, 0.5, 1.0)
ELEMENT_BYTES = 4

plt.switch_backend("Agg")
console = Console()


def bound(devices: int, nbytes: int) -> float:
    """Cycles of payload in the busiest direction of a link, both rings running."""
    share = 1.0 if devices == 2 else (devices - 1) / devices
    return share * nbytes / PHIT_BYTES


def arrays_of(pool: CoarsePool, elements: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(elements, np.float32) for _ in range(pool.devices)]


def wrong_bits(
    pool: CoarsePool, tensor: Any, arrays: list[np.ndarray], wire: str, **how: Any
) -> int:
    """Elements whose bits differ from the golden ring's, over all devices."""
    parts = pool.split(tensor.size, wire, how.get("group"))
    golden = np.concatenate(
        [
            ring_all_reduce(
                [each[part.start : part.stop] for each in arrays],
                operation="sum",
                wire=wire,
                config=pool.device.config,
                reverse=part.reverse,
            )
            for part in parts
        ]
    )
    return sum(
        int(np.count_nonzero(tensor.read(d).view(np.uint32) != golden.view(np.uint32)))
        for d in range(pool.devices)
    )


def directions(counters: PoolCounters, cycles: int) -> list[float]:
    """Share of cycles in which each direction that was used had a phit."""
    sent = [link.sent_phits for device in counters.devices for link in device.links]
    return [phits / cycles for phits in sent if phits]


def reduction(
    url: str, nbytes: int, wire: str = "fp32", group: int | None = None
) -> dict[str, Any]:
    """One sum of a tensor on all devices."""
    with CoarsePool.open(url) as pool:
        arrays = arrays_of(pool, nbytes // ELEMENT_BYTES)
        tensor = pool.tensor(arrays)
        began, first = time.perf_counter(), pool.device.cycles
        pool.all_reduce(tensor, wire=wire, group=group)
        seconds = time.perf_counter() - began
        counters = pool.counters()
        cores = [core for device in counters.devices for core in device.cores if core.cycles]
        cycles = max(core.cycles for core in cores)
        return {
            "label": "measured (RTL cycles)",
            "url": url,
            "devices": pool.devices,
            "bytes": nbytes,
            "wire": wire,
            "rings": 1 if group is not None else pool.groups,
            "cycles": cycles,
            "cycles_with_host": pool.device.cycles - first,
            "bound": bound(pool.devices, nbytes),
            "of_bound": bound(pool.devices, nbytes) / cycles,
            "busy": directions(counters, cycles),
            "replays": sum(link.replays for d in counters.devices for link in d.links),
            "dram_bytes_per_cycle": 2 * nbytes / cycles,
            "beats_per_cycle": max(core.beats / core.cycles for core in cores),
            "elements_differ": wrong_bits(pool, tensor, arrays, wire, group=group),
            "elements": pool.devices * tensor.size,
            "simulated_elements_per_s": tensor.size / seconds,
        }


def dense(devices: int, nbytes: int) -> dict[str, Any]:
    """Everything to one device and back over its two links, as DENSE would: no RTL."""
    links = 1 if devices == 2 else 2
    cycles = (devices - 1) * nbytes / PHIT_BYTES / links
    return {
        "label": "modelled: (N - 1) n / BW over the links of one device, each direction at once",
        "devices": devices,
        "bytes": nbytes,
        "cycles": cycles,
    }


def freeze(pool: CoarsePool, tensor: PoolTensor, nbytes: int) -> None:
    """Open a snapshot of the first `nbytes` of where the next result goes, on every device."""
    for device, node in enumerate(pool.device.nodes):
        back = pool.device.local_address(tensor.back(device).address, device)
        base = back // PAGE_BYTES * PAGE_BYTES
        pages = -(-(back + nbytes - base) // PAGE_BYTES)
        area = pool.device.alloc(pages * PAGE_BYTES, np.uint8, channel=device, align=PAGE_BYTES)
        node.pool.snapshot_base.value = base
        node.pool.snapshot_area.value = pool.device.local_address(area.address, device)
        node.pool.snapshot_pages.value = pages
        node.pool.start.go = 1
        pool.rings.wait_any([node.pool.snapshot.poll(open=1)], 1 << 16)


def snapshot(share: float, elements: int) -> dict[str, Any]:
    """A sum over a tensor of whose destination a share is frozen."""
    with CoarsePool.open(WINDOW_URL) as pool:
        tensor = pool.tensor(arrays_of(pool, elements))
        pool.all_reduce(tensor)  # what lies in the other buffer is of an older version now
        if share:
            freeze(pool, tensor, int(share * elements) * ELEMENT_BYTES)
        before = pool.counters()
        pool.all_reduce(tensor)
        counters = pool.counters()
        counted = (counters - before).devices
        return {
            "label": "measured (RTL cycles)",
            "url": WINDOW_URL,
            "elements": elements,
            "share": share,
            "pages_copied": counters.devices[0].pages_copied,
            "stall": counters.devices[0].snapshot_stall,
            "cycles": max(core.cycles for device in counted for core in device.cores),
        }


def show(results: dict[str, Any]) -> None:
    table = Table(
        "devices", "MiB", "wire", "rings", "cycles", "% of bound", "busy %", "bits differ"
    )
    for row in results["runs"]:
        table.add_row(
            str(row["devices"]),
            f"{row['bytes'] / 2**20:g}",
            row["wire"],
            str(row["rings"]),
            f"{row['cycles']:,}",
            f"{100 * row['of_bound']:.2f}",
            f"{100 * min(row['busy']):.2f}",
            str(row["elements_differ"]),
        )
    console.print(table)
    for row in results["faults"]:
        console.print(f"{100 * row['rate']:g} % of frames lost: {row['cycles']:,} cycles")
    for row in results["snapshots"]:
        console.print(f"{row['pages_copied']} pages copied: {row['cycles']:,} cycles")


def plot(results: dict[str, Any], path: Path) -> None:
    """Cycles against the bound, one ring and DENSE; what faults and snapshots cost."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4))
    rows = [row for row in results["runs"] if row["wire"] == "fp32" and row["bytes"] == 4 << 20]
    for rings, name in ((2, "two rings"), (1, "one ring")):
        picked = [row for row in rows if row["rings"] == rings]
        left.plot([r["devices"] for r in picked], [r["cycles"] for r in picked], "o-", label=name)
    picked = [row for row in rows if row["rings"] == 2]
    left.plot(
        [r["devices"] for r in picked],
        [r["bound"] for r in picked],
        "k--",
        label="bound, two rings",
    )
    left.plot(
        [r["devices"] for r in results["dense"]],
        [r["cycles"] for r in results["dense"]],
        "s:",
        label="DENSE (modelled)",
    )
    left.set(xlabel="devices", ylabel="thousand cycles for 4 MiB a device", ylim=(0, None))
    left.set_xticks(DEVICES)
    left.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f}")
    left.legend()
    faults = results["faults"]
    places = range(len(faults))
    middle.plot(places, [100 * faults[0]["cycles"] / row["cycles"] for row in faults], "o-")
    middle.set_xticks(places, [f"{100 * row['rate']:g}" for row in faults])
    middle.set(xlabel="frames lost, %", ylabel="rate, % of that without loss", ylim=(0, 105))
    snapshots = results["snapshots"]
    right.plot(
        [row["pages_copied"] for row in snapshots],
        [row["cycles"] / snapshots[0]["cycles"] for row in snapshots],
        "o-",
    )
    right.set(
        xlabel="pages copied on each device of 4, 1 MiB each",
        ylabel="cycles, times those without a snapshot",
        ylim=(0, None),
    )
    for axes, title in (
        (left, "Sum on N devices"),
        (middle, f"Lost frames: {faults[0]['devices']} devices, 1 MiB each"),
        (right, "Sum while a snapshot is open"),
    ):
        axes.grid(alpha=0.3)
        axes.set_title(title, fontsize=11)
    figure.suptitle("COARSE, in RTL cycles (measured, but for DENSE and the bound)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(
    largest: Annotated[int, typer.Option(min=1, help="Largest tensor, in MiB a device.")] = 16,
) -> None:
    """Measure pools of 2, 4 and 8 devices, and write build/bench/coarse.json and coarse.png."""
    sizes = [size for size in MEBIBYTES if size <= largest]
    runs = []
    for devices in track(DEVICES, "two rings", console=console):
        runs += [reduction(f"{URL}{devices}", size << 20) for size in sizes]
    for devices in track(DEVICES, "one ring", console=console):
        runs.append(reduction(f"{URL}{devices}", 4 << 20, group=0))
    for wire in track(("fp16", "bf16"), "16 bits on the wire", console=console):
        runs.append(reduction(f"{URL}4", 4 << 20, wire=wire))
    faults = []
    for rate in track(RATES, "lost frames", console=console):
        faults.append({"rate": rate, **reduction(f"{URL}4&drop={rate}", 1 << 20)})
    snapshots = [snapshot(share, 1 << 18) for share in track(SHARES, "snapshots", console=console)]
    results = {
        "phit_bytes": PHIT_BYTES,
        "beat_bytes": BEAT_BYTES,
        "clock_hz": CLOCK_HZ,
        "runs": runs,
        "dense": [dense(devices, 4 << 20) for devices in DEVICES],
        "faults": faults,
        "snapshots": snapshots,
    }
    show(results)
    report.FOLDER.mkdir(parents=True, exist_ok=True)
    plot(results, report.FOLDER / "coarse.png")
    console.print(f"written: {report.write('coarse', results)}")


if __name__ == "__main__":
    typer.run(main)
