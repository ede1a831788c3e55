"""COARSE: push, sync and pull of 64 MiB by four clients, whole and in shards.

Cycles are those of the RTL of four devices with their local DRAM. Each client pushes through the
window of its device over a link of its own, and pulls over the same link the other way: the window,
its arbiter and the DRAM are shared with the sync cores. Links of clients and of rings move 16 bytes
a cycle each way, 100 cycles long, so that the client's is the slower: it moves n bytes each way, a
link of two counter-rotating rings (N - 1) / N x n. Bounds are of payload alone, from n, N and the
rates of the links. A client's link has no frames: its rate is what a protocol leaves of it; the two
phits of 130 that a ring's frames take are in its cycles and not in its bound.
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

from nearstep.coarse import CoarsePool
from nearstep.coarse.pipeline import Pipelined, push_sync_pull
from nearstep.coarse.routing import Profile, Shard, shard_bytes
from nearstep_sim.golden.coarse import ring_all_reduce
from nearstep_spec.coarse.config import BEAT_BYTES, FRAME_PHITS, PHIT_BYTES

CLIENTS = 4
URL = f"sim:coarse?devices={CLIENTS}&memory_bytes=256MiB"
CLOCK_HZ = 250e6
MIB = 1 << 20
PROFILED = [1 << i for i in range(12, 23)]
SWEPT = (1 << 15, 1 << 16, 1 << 17, 1 << 18, 1 << 20)
SLOW_RING = "&link_interval=2"
UP = [f"up {client}" for client in range(CLIENTS)]
DOWN = [f"down {client}" for client in range(CLIENTS)]
LANES = [*UP, "rings", *DOWN]

plt.switch_backend("Agg")
console = Console()


def profile() -> tuple[Profile, dict[int, list[int]]]:
    """What each client measures alone, by size: seconds of a pull, and cycles of push and pull."""
    cycles: dict[int, list[int]] = {}
    with CoarsePool.open(URL) as pool:
        tensor = pool.tensor(max(PROFILED) // 4)
        values = np.zeros(tensor.size, np.float32)
        for nbytes in track(PROFILED, "profile", console=console):
            part = slice(0, nbytes // 4)
            buffer = tensor.front(0)[part]
            both = [buffer.submit_write(values[part]).wait(), buffer.submit_read(values[part])]
            cycles[nbytes] = [each.wait().cycles or 0 for each in both]
    seconds = {0: {nbytes: max(both) / CLOCK_HZ for nbytes, both in cycles.items()}}
    return Profile.of(seconds), cycles


def bounds(url: str, nbytes: int) -> dict[str, float]:
    """Cycles of each part, were the others free: payload alone on the links, beats of the DRAM."""
    interval = 2 if SLOW_RING in url else 1
    turns = 2 if "memory=ideal" in url else 1  # a beat read and one written in a cycle, or one
    return {
        "client": nbytes / PHIT_BYTES,
        "ring": (CLIENTS - 1) / CLIENTS * nbytes / PHIT_BYTES * interval,
        "dram": 4 * nbytes / BEAT_BYTES / turns,
    }


def wrong_bits(pool: CoarsePool, shards: list[Shard], arrays: Any, results: Any) -> int:
    """Elements of all clients whose bits differ from the golden rings'."""
    wrong = 0
    for shard in shards:
        first, size = shard.offset // 4, shard.nbytes // 4
        for part in pool.split(size):
            where = slice(first + part.start, first + part.stop)
            golden = ring_all_reduce(
                [each[where] for each in arrays],
                operation="sum",
                wire="fp32",
                config=pool.device.config,
                reverse=part.reverse,
            ).view(np.uint32)
            wrong += sum(int(np.count_nonzero(r[where].view(np.uint32) != golden)) for r in results)
    return wrong


def spans(done: Pipelined) -> dict[str, list[tuple[int, int]]]:
    """When each link had each shard, and the rings: from when those before it were done."""
    begin = min(entry.start for entry in done.timeline.entries)
    found = {
        lane: [(e.start - begin, e.end - begin) for e in done.timeline.lanes[lane]]
        for lane in (*UP, *DOWN)
    }
    ends, sums = 0, []
    for entry in done.syncs:
        sums.append((max(ends, entry.start - begin), entry.end - begin))
        ends = sums[-1][1]
    return {lane: found.get(lane, sums) for lane in LANES}


def run(url: str, nbytes: int, shard: int | None) -> dict[str, Any]:
    """One push, sync and pull, with where the time of the links went."""
    with CoarsePool.open(url) as pool:
        rng = np.random.default_rng(1)
        arrays = [rng.standard_normal(nbytes // 4, np.float32) for _ in range(CLIENTS)]
        results = [np.empty(nbytes // 4, np.float32) for _ in range(CLIENTS)]
        began = time.perf_counter()
        done = push_sync_pull(pool, arrays, results, shard_bytes=shard, hertz=CLOCK_HZ)
        seconds = time.perf_counter() - began
        cycles = done.timeline.makespan
        links = [link for device in pool.counters().devices for link in device.links]
        uses = {
            way: [done.uses(way, client, 1 / PHIT_BYTES) for client in range(CLIENTS)]
            for way in ("up", "down")
        }
        needed = bounds(url, nbytes)
        slower = max(needed["client"], needed["ring"])
        rows = spans(done)
        return {
            "label": "measured (RTL cycles)",
            "url": url,
            "bytes": nbytes,
            "shards": len(done.shards),
            "shard_bytes": done.shards[0].nbytes,
            "cycles": cycles,
            "bounds": needed,
            "of_slower_link": cycles / slower,
            "busy": {way: min(use.busy for use in each) for way, each in uses.items()},
            "uses": {way: vars(min(each, key=lambda u: u.busy)) for way, each in uses.items()},
            "ring_busy": [link.sent_phits * (2 if SLOW_RING in url else 1) / cycles
                          for link in links],
            "sync_cycles": sorted(stop - start for start, stop in rows["rings"]),
            "spans": rows,
            "dram_bytes_per_cycle": pool.device.backend.memory_counters["read_beats"]
            * 2 * BEAT_BYTES / CLIENTS / cycles,
            "elements_differ": wrong_bits(pool, list(done.shards), arrays, results),
            "elements": CLIENTS * nbytes // 4,
            "cycles_per_s": cycles / seconds,
        }  # fmt: skip


def say(name: str, row: dict[str, Any]) -> None:
    busy = ", ".join(f"{way} {100 * share:.2f} %" for way, share in row["busy"].items())
    console.print(
        f"{name}: {row['shards']} shards, {row['cycles']:,} cycles, "
        f"{row['of_slower_link']:.4f} of the slower bound, busy {busy}, "
        f"{row['elements_differ']} bits differ"
    )


def draw(axes: plt.Axes, row: dict[str, Any], until: float, *, numbers: bool) -> None:
    """A lane for each way of each client's link, and one for the rings; shards alternate."""
    shades = {"up": ("#3182bd", "#9ecae1"), "rings": ("#31a354", "#a1d99b"),
              "down": ("#e6550d", "#fdae6b")}  # fmt: skip
    for place, lane in enumerate(LANES):
        for number, (start, stop) in enumerate(row["spans"][lane]):
            if start >= until:
                break
            axes.broken_barh([(start / 1e3, (stop - start) / 1e3)], (place + 0.1, 0.8),
                             color=shades[lane.split()[0]][number % 2], linewidth=0)  # fmt: skip
            if numbers and stop < until:
                axes.text((start + stop) / 2e3, place + 0.5, str(number), ha="center",
                          va="center", fontsize=7)  # fmt: skip
    axes.set_yticks([place + 0.5 for place in range(len(LANES))], LANES, fontsize=8)
    axes.set_ylim(len(LANES), 0)
    axes.set_xlim(0, until / 1e3)


def plot(results: dict[str, Any], path: Path) -> None:
    """Whole and in shards on one axis, and the first shards."""
    shown = results["runs"]
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(12, 9))
    longest = shown["whole"]["cycles"]
    size = shown["whole"]["bytes"] // MIB
    for axes, name, title in (
        (top, "whole", "whole"),
        (middle, "shards", f"in {shown['shards']['shards']} shards"),
    ):
        draw(axes, shown[name], 1.02 * longest, numbers=False)
        axes.set_title(f"{size} MiB {title}: {shown[name]['cycles']:,} cycles", fontsize=10)
    draw(bottom, shown["shards"], shown["shards"]["spans"]["down 0"][8][1], numbers=True)
    bottom.set_title("the first shards, by number", fontsize=10)
    bottom.set_xlabel("thousand cycles")
    figure.suptitle(
        f"Push (up), sync (rings) and pull (down) of {CLIENTS} clients: measured, RTL", fontsize=12
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(
    size: Annotated[int, typer.Option(min=1, help="Bytes of each client, in MiB.")] = 64,
    swept: Annotated[int, typer.Option(min=4, help="Those of other runs, in MiB.")] = 4,
) -> None:
    """Measure, and write build/bench/coarse_pipeline.json and coarse-pipeline.png."""
    measured, cycles = profile()
    best = shard_bytes(measured)
    console.print(f"S' = {best:,} bytes")
    planned = {
        "shards": (URL, size, best),
        "whole": (URL, size, None),
        "ideal": (f"{URL}&memory=ideal", 4 * swept, best),
        "slow_ring": (f"{URL}{SLOW_RING}", 4 * swept, best),
    }
    runs = {}
    for name, (url, mib, shard) in planned.items():
        runs[name] = run(url, mib * MIB, shard)
        say(name, runs[name])
    sweep = []
    for shard in (*SWEPT, None):
        sweep.append(run(URL, swept * MIB, shard))
        say("sweep", sweep[-1])
    for row in sweep:
        del row["spans"]
    results = {
        "clock_hz": CLOCK_HZ,
        "phit_bytes": PHIT_BYTES,
        "frame_phits": FRAME_PHITS,
        "clients": CLIENTS,
        "profile": cycles,
        "shard_bytes": best,
        "runs": runs,
        "sweep": sweep,
    }
    report.FOLDER.mkdir(parents=True, exist_ok=True)
    plot(results, report.FOLDER / "coarse-pipeline.png")
    console.print(f"written: {report.write('coarse_pipeline', results)}")


if __name__ == "__main__":
    typer.run(main)
