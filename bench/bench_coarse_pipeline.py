"""COARSE: push, sync and pull of 64 MiB by four clients, whole and in shards.

The window, its arbiter and the DRAM are shared with the sync cores. A client's link has no frames:
its rate is what a protocol leaves of it; the two phits of 130 that a ring's frames take are in its
cycles and not in its bound.
"""

from typing import Annotated, Any

import numpy as np
from harness import Results, option, plot, report, script, track
from measuring import ring_differs, timed

from nearstep.coarse import CoarsePool
from nearstep.coarse.pipeline import Pipelined, push_sync_pull
from nearstep.coarse.routing import Profile, shard_bytes
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
SHADES = {"up": ("#3182bd", "#9ecae1"), "rings": ("#31a354", "#a1d99b"),
    "down": ("#e6550d", "#fdae6b")}  # fmt: skip
NAMES = {"shards": "in shards", "whole": "whole", "ideal": "in shards, `memory=ideal`",
    "slow_ring": "in shards, `link_interval=2`"}  # fmt: skip


def derived(results: Results) -> Results:
    every = [*results["runs"].values(), *results["sweep"]]
    return {
        "ways": [
            {"name": row["name"], "way": way, **row["uses"][way]}
            for row in results["runs"].values()
            for way in ("up", "down")
        ],
        **{name: sum(row[name] for row in every) for name in ("elements", "elements_differ")},
    }  # fmt: skip


def profile() -> tuple[Profile, dict[int, list[int]]]:
    cycles: dict[int, list[int]] = {}
    with CoarsePool.open(URL) as pool:
        tensor = pool.tensor(max(PROFILED) // 4)
        values = np.zeros(tensor.size, np.float32)
        for nbytes in track(PROFILED, "profile"):
            part = slice(0, nbytes // 4)
            buffer = tensor.front(0)[part]
            both = [buffer.submit_write(values[part]).wait(), buffer.submit_read(values[part])]
            cycles[nbytes] = [each.wait().cycles or 0 for each in both]
    seconds = {0: {nbytes: max(both) / CLOCK_HZ for nbytes, both in cycles.items()}}
    return Profile.of(seconds), cycles


def bounds(url: str, nbytes: int) -> dict[str, float]:
    interval = 2 if SLOW_RING in url else 1
    turns = 2 if "memory=ideal" in url else 1  # a beat read and one written in a cycle, or one
    return {
        "client": nbytes / PHIT_BYTES,
        "ring": (CLIENTS - 1) / CLIENTS * nbytes / PHIT_BYTES * interval,
        "dram": 4 * nbytes / BEAT_BYTES / turns,
    }


def wrong_bits(pool: CoarsePool, done: Pipelined, arrays: Any, results: Any) -> int:
    wrong = 0
    for shard in done.shards:
        where = slice(shard.offset // 4, (shard.offset + shard.nbytes) // 4)
        both = ([each[where] for each in of] for of in (arrays, results))
        wrong += ring_differs(pool.device.config, pool.split(shard.nbytes // 4), *both)
    return wrong


def spans(done: Pipelined) -> dict[str, list[tuple[int, int]]]:
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


def run(url: str, nbytes: int, shard: int | None) -> Results:
    """Measure one push, sync and pull, with where the time of the links was spent."""
    with CoarsePool.open(url) as pool:
        rng = np.random.default_rng(1)
        arrays = [rng.standard_normal(nbytes // 4, np.float32) for _ in range(CLIENTS)]
        results = [np.empty(nbytes // 4, np.float32) for _ in range(CLIENTS)]
        how = {"shard_bytes": shard, "hertz": CLOCK_HZ}
        seconds, _, done = timed(lambda: push_sync_pull(pool, arrays, results, **how))
        cycles = done.timeline.makespan
        links = [link for device in pool.counters().devices for link in device.links]
        uses = {
            way: min(
                (done.uses(way, client, 1 / PHIT_BYTES) for client in range(CLIENTS)),
                key=lambda use: use.busy,
            )
            for way in ("up", "down")
        }
        needed, rows = bounds(url, nbytes), spans(done)
        interval, beats = 2 if SLOW_RING in url else 1, pool.device.backend.memory_counters
        return {"url": url, "bytes": nbytes, "shards": len(done.shards),
            "shard_bytes": done.shards[0].nbytes, "cycles": cycles, "bounds": needed,
            "of_slower_link": cycles / max(needed["client"], needed["ring"]),
            "busy": {way: use.busy for way, use in uses.items()},
            "uses": {way: vars(use) for way, use in uses.items()},
            "ring_busy": [link.sent_phits * interval / cycles for link in links],
            "sync_cycles": sorted(stop - start for start, stop in rows["rings"]), "spans": rows,
            "dram_bytes_per_cycle": beats["read_beats"] * 2 * BEAT_BYTES / CLIENTS / cycles,
            "elements_differ": wrong_bits(pool, done, arrays, results),
            "elements": CLIENTS * nbytes // 4, "cycles_per_s": cycles / seconds}  # fmt: skip


def draw(axes: Any, row: Results, until: float, title: str, *, numbers: bool) -> None:
    for place, lane in enumerate(LANES):
        for number, (start, stop) in enumerate(row["spans"][lane]):
            if start >= until:
                break
            axes.broken_barh([(start / 1e3, (stop - start) / 1e3)], (place + 0.1, 0.8),
                             color=SHADES[lane.split()[0]][number % 2], linewidth=0)  # fmt: skip
            if numbers and stop < until:
                axes.text((start + stop) / 2e3, place + 0.5, str(number), ha="center",
                          va="center", fontsize=7)  # fmt: skip
    axes.set_yticks([place + 0.5 for place in range(len(LANES))], LANES, fontsize=8)
    axes.set_ylim(len(LANES), 0)
    axes.set_xlim(0, until / 1e3)
    axes.set_title(title, fontsize=10)


def picture(whole: Results, shards: Results) -> None:
    title = f"Push (up), sync (rings) and pull (down) of {CLIENTS} clients: measured, RTL"
    options = {"figsize": (12, 9), "title": title, "dpi": 110}
    with plot("coarse-pipeline.png", 3, **options) as (_, (*both, bottom)):
        names = ("whole", f"in {shards['shards']} shards")
        for axes, row, name in zip(both, (whole, shards), names, strict=True):
            said = f"{whole['bytes'] // MIB} MiB {name}: {row['cycles']:,} cycles"
            draw(axes, row, 1.02 * whole["cycles"], said, numbers=False)
        pulled = shards["spans"]["down 0"]
        until = pulled[min(8, len(pulled) - 1)][1]
        draw(bottom, shards, until, "the first shards, by number", numbers=True)
        bottom.set_xlabel("thousand cycles")


@script
def main(
    size: Annotated[int, option("Bytes of each client, in MiB.", min=1)] = 64,
    swept: Annotated[int, option("Those of other runs, in MiB.", min=4)] = 4,
) -> None:
    """Measure, and write build/bench/coarse_pipeline.json and coarse-pipeline.png."""
    measured, cycles = profile()
    best = shard_bytes(measured)
    planned: dict[str, tuple[str, int, int | None]] = {
        "shards": (URL, size, best),
        "whole": (URL, size, None),
        "ideal": (f"{URL}&memory=ideal", 4 * swept, best),
        "slow_ring": (f"{URL}{SLOW_RING}", 4 * swept, best),
    }
    runs = {
        name: {"name": f"{mib:g} MiB, {NAMES[name]}", **run(url, mib * MIB, shard)}
        for name, (url, mib, shard) in track(planned.items(), "runs")
    }
    sweep = [run(URL, swept * MIB, shard) for shard in track((*SWEPT, None), "sizes of shards")]
    for row in sweep:
        del row["spans"]
    picture(runs["whole"], runs["shards"])
    report("coarse_pipeline", derived, clock_hz=CLOCK_HZ, phit_bytes=PHIT_BYTES,
        frame_phits=FRAME_PHITS, clients=CLIENTS, profile=cycles, shard_bytes=best, runs=runs,
        sweep=sweep)  # fmt: skip
