"""COARSE: sums in counter-rotating rings against the bound of the links; faults; snapshots."""

from typing import Annotated

import numpy as np
from harness import Results, option, plot, report, script, track
from measuring import ring_differs, timed

from nearstep.coarse import CoarsePool, PoolTensor
from nearstep_spec.coarse.config import BEAT_BYTES, PAGE_BYTES, PHIT_BYTES

URL = "sim:coarse?window=direct&memory_bytes=64MiB&devices="
WINDOW_URL = "sim:coarse?devices=4&memory_bytes=16MiB"
CLOCK_HZ = 250_000_000
DEVICES = (2, 4, 8)
MEBIBYTES = (1, 4, 16)
DENSE_BYTES = 4 << 20
RATES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)
SHARES = (0.0, 0.25, 0.5, 1.0)


def bound(devices: int, nbytes: int) -> float:
    share = 1.0 if devices == 2 else (devices - 1) / devices
    return share * nbytes / PHIT_BYTES


def arrays_of(pool: CoarsePool, elements: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(elements, np.float32) for _ in range(pool.devices)]


def reduction(url: str, nbytes: int, wire: str = "fp32", group: int | None = None) -> Results:
    with CoarsePool.open(url) as pool:
        arrays = arrays_of(pool, nbytes // 4)
        tensor = pool.tensor(arrays)
        first = pool.device.cycles
        seconds = timed(lambda: pool.all_reduce(tensor, wire=wire, group=group)).wall
        counters = pool.counters()
        cores = [core for device in counters.devices for core in device.cores if core.cycles]
        cycles = max(core.cycles for core in cores)
        links = [link for device in counters.devices for link in device.links]
        busy = [link.sent_phits / cycles for link in links if link.sent_phits]
        parts = pool.split(tensor.size, wire, group)
        results = [tensor.read(device) for device in range(pool.devices)]
        return {"url": url, "devices": pool.devices, "bytes": nbytes, "wire": wire,
            "rings": 1 if group is not None else pool.groups, "cycles": cycles,
            "cycles_with_host": pool.device.cycles - first, "bound": bound(pool.devices, nbytes),
            "of_bound": bound(pool.devices, nbytes) / cycles, "busy": busy,
            "busy_span": f"{100 * min(busy):.2f} to {100 * max(busy):.2f} %",
            "replays": sum(link.replays for link in links),
            "dram_bytes_per_cycle": 2 * nbytes / cycles,
            "beats_per_cycle": max(core.beats / core.cycles for core in cores),
            "elements_differ": ring_differs(pool.device.config, parts, arrays, results, wire),
            "elements": pool.devices * tensor.size, "size": tensor.size,
            "simulated_elements_per_s": tensor.size / seconds,
            "simulated_cycles_per_s": cycles / seconds}  # fmt: skip


def design(two: Results, one: Results) -> Results:
    """Compare one ring, and everything sent to one device and back over its two links, as DENSE
    would, with two rings."""
    n, links = two["devices"], 1 if two["devices"] == 2 else 2
    dense = (n - 1) * DENSE_BYTES / PHIT_BYTES / links
    cycles = {"two": two["cycles"], "one": one["cycles"], "dense": dense}
    over = {f"{name}_over": cycles[name] / two["cycles"] for name in ("one", "dense")}
    return {"devices": n, **cycles, **over, "bound": two["bound"]}


def freeze(pool: CoarsePool, tensor: PoolTensor, nbytes: int) -> None:
    """Open a snapshot of the first `nbytes` of where the next result is written, on every
    device."""
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


def snapshot(share: float, elements: int) -> Results:
    with CoarsePool.open(WINDOW_URL) as pool:
        tensor = pool.tensor(arrays_of(pool, elements))
        pool.all_reduce(tensor)  # the other buffer holds an older version now
        if share:
            freeze(pool, tensor, int(share * elements) * 4)
        before = pool.counters()
        pool.all_reduce(tensor)
        counters = pool.counters()
        counted = (counters - before).devices
        return {"url": WINDOW_URL, "elements": elements, "share": share,
            "pages_copied": counters.devices[0].pages_copied,
            "stall": counters.devices[0].snapshot_stall,
            "cycles": max(core.cycles for device in counted for core in device.cores)}  # fmt: skip


def draw(results: Results) -> None:
    title = "COARSE, in RTL cycles (measured, but for DENSE and the bound)"
    with plot("coarse.png", 1, 3, figsize=(14, 4), title=title) as (_, (left, middle, right)):
        designs, faults, snapshots = results["designs"], results["faults"], results["snapshots"]
        for key, style, name in (
            ("two", "o-", "two rings"),
            ("one", "o-", "one ring"),
            ("bound", "k--", "bound, two rings"),
            ("dense", "s:", "DENSE (modelled)"),
        ):
            devices = [row["devices"] for row in designs]
            left.plot(devices, [row[key] for row in designs], style, label=name)
        left.set(xlabel="devices", ylabel="thousand cycles for 4 MiB a device", ylim=(0, None))
        left.set_xticks(DEVICES)
        left.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f}")
        left.legend()
        middle.plot(range(len(faults)), [100 * row["of_lossless"] for row in faults], "o-")
        middle.set_xticks(range(len(faults)), [f"{100 * row['rate']:g}" for row in faults])
        middle.set(xlabel="frames lost, %", ylabel="rate, % of that without loss", ylim=(0, 105))
        pages = [row["pages_copied"] for row in snapshots]
        right.plot(pages, [row["slow_down"] for row in snapshots], "o-")
        right.set(xlabel="pages copied on each device of 4, 1 MiB each",
                  ylabel="cycles, times those without a snapshot", ylim=(0, None))  # fmt: skip
        for axes, name in (
            (left, "Sum on N devices"),
            (middle, f"Lost frames: {faults[0]['devices']} devices, 1 MiB each"),
            (right, "Sum while a snapshot is open"),
        ):
            axes.grid(alpha=0.3)
            axes.set_title(name, fontsize=11)


@script
def main(largest: Annotated[int, option("Largest tensor, in MiB a device.", min=1)] = 16) -> None:
    """Measure pools of 2, 4 and 8 devices, and write build/bench/coarse.json and coarse.png."""
    sizes = [size << 20 for size in MEBIBYTES if size <= largest]
    shapes = [(f"{URL}{n}", size) for n in DEVICES for size in sizes]
    two = [reduction(*shape) for shape in track(shapes, "two rings")]
    one = [reduction(f"{URL}{n}", DENSE_BYTES, group=0) for n in track(DEVICES, "one ring")]
    wires = [reduction(f"{URL}4", DENSE_BYTES, wire=w) for w in track(("fp16", "bf16"), "wires")]
    both = [row for row in two if row["bytes"] == DENSE_BYTES]
    faults: list[Results] = []
    for rate in track(RATES, "lost frames"):
        found = {"rate": rate, **reduction(f"{URL}4&drop={rate}", 1 << 20)}
        faults.append({**found, "of_lossless": [*faults, found][0]["cycles"] / found["cycles"]})
    snapshots = [snapshot(share, 1 << 18) for share in track(SHARES, "snapshots")]
    base = snapshots[0]["cycles"]
    for row in snapshots:
        pages, more = row["pages_copied"], row["cycles"] - base
        row |= {"slow_down": row["cycles"] / base, "a_page": more / pages if pages else None}
    every = [*two, *one, *wires, *faults]
    results = {
        "phit_bytes": PHIT_BYTES, "beat_bytes": BEAT_BYTES, "dense_bytes": DENSE_BYTES,
        "clock_hz": CLOCK_HZ, "two": two, "one": one, "wires": wires,
        "largest": [row for row in two if row["bytes"] == max(sizes)],
        "designs": [design(*pair) for pair in zip(both, one, strict=bool(both))], "faults": faults,
        "snapshots": snapshots,
        **{name: sum(row[name] for row in every) for name in ("elements", "elements_differ")},
    }  # fmt: skip
    draw(results)
    report("coarse", **results)
