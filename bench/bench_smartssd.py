# amaranth: UnusedElaboratable=no
"""The card of a SmartSSD: bytes and cycles of updates, dense and with Top-K pairs, rates."""

from typing import Annotated, Any

import numpy as np
from bench_rules import PAPER_BYTES_PER_S, STEPS
from harness import Results, option, plot, report, script, track
from measuring import CLOCK_HZ, load, scan_bytes, timed, update_bytes

import nearstep
from nearstep.smartssd.device import SmartssdDevice
from nearstep.updater.pairs import Pairs
from nearstep_hw.updater.pairs.decompress import SCATTER
from nearstep_sim.updater.scatter_run import scatter_cycles
from nearstep_spec.smartssd.config import UPDATER

URL = "sim:smartssd?fu=native"
RTL_URL = "sim:smartssd"
DRIVE_BYTES_PER_S = 3.2e9  # taken as the read rate of the SSD; the paper plots one and prints none
THROUGH_DRAM = {"zero-fill": 4, "re-read of gradients": 4, "states": 24}
"""Bytes a parameter of Adam if the dense gradient is made in DRAM, before any pair is written."""

KEEP = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)


def derived(results: Results) -> Results:
    updater, drive = results["paper_bytes_per_s"], results["drive_bytes_per_s"]
    through = results["through_dram"]
    dense, *_ = adam = [row for row in results["runs"] if row["rule"] == "adam"]
    fused = [row for row in adam if row["form"] == "fused"]
    return {
        "every": [*results["runs"], results["scan"]],
        "beside": [
            ["*paper*, updater", *[""] * 5, f"> {updater / 1e9:.2f}", f"> {updater / drive:.2f}"],
            ["SSD read", *[""] * 5, f"{drive / 1e9:.2f}", "1.00"],
        ],
        "sum": sum(through.values()),
        "parts": ", ".join(f"{size} for {name}" for name, size in through.items()), "dense": dense,
        "fused": min(fused, key=lambda row: abs(row["kept"] - 0.01))}  # fmt: skip


def rates(run: Any, config: Any, count: int, needed: int) -> Results:
    beats = run.counters["read_beats"] + run.counters.get("write_beats", 0)
    return {"parameters": count, "cycles": run.cycles, "beats": beats, "needed_bytes": needed,
        "of_bound": needed / config.beat_bytes / run.cycles,
        "over_drive": needed / run.cycles * CLOCK_HZ / DRIVE_BYTES_PER_S,
        "bytes_per_param": beats * config.beat_bytes / count,
        "params_per_s_at_200_mhz": count / run.cycles * CLOCK_HZ,
        "bytes_per_s_at_200_mhz": needed / run.cycles * CLOCK_HZ}  # fmt: skip


class Card:
    """A card with the arrays of a step."""

    def __init__(self, device: SmartssdDevice, count: int) -> None:
        self.device, self.count = device, count
        self.rng = np.random.default_rng(1)
        values = self.rng.standard_normal(count, np.float32)
        self.arrays = load(device, {**dict.fromkeys("pgm", values), "v": np.square(values)})

    def pairs(self, share: float, form: str) -> Pairs:
        kept = max(1, round(share * self.count))
        index = np.sort(self.rng.choice(self.count, kept, replace=False)).astype(np.uint32)
        if form == SCATTER:
            block = index // self.device.config.block_elements
            index = index[np.lexsort((self.rng.random(kept), block))]
        place = self.device.alloc(kept, np.uint32)
        value = self.device.alloc(kept)
        place.write(index)
        value.write(self.rng.standard_normal(kept, np.float32))
        return Pairs(place, value, form)

    def step(self, rule: str, pairs: Pairs | None = None) -> Results:
        method, names, hyper = STEPS[rule]
        buffers = {name: self.arrays[name] for name in names}
        if pairs is not None:
            buffers["g"] = pairs
        run = timed(lambda: self.device.update(method, buffers, **hyper).wait())
        size, form = (None, "dense") if pairs is None else (pairs.size, pairs.form)
        needed = update_bytes(self.device.config, rule, self.count, pairs=size)
        if pairs is not None:
            pairs.index.free()
            pairs.value.free()
        return {"rule": rule, "form": form, "run": f"{rule}, {form}",
            "kept": 1.0 if size is None else size / self.count,
            **rates(run.result, self.device.config, self.count, needed),
            "simulated_params_per_s": self.count / run.wall}  # fmt: skip

    def scan(self) -> Results:
        run = self.device.scan(self.arrays["g"]).wait()
        found = rates(run, self.device.config, self.count, scan_bytes(self.count))
        return {"run": "scan of gradients", "kept": 1.0, **found}


def scatter_rate(pairs: int, spread: str, total: int = 1 << 16) -> Results:
    lanes, chunk = UPDATER.lanes, UPDATER.block_elements
    cycles = scatter_cycles(pairs=pairs, spread=spread, total=total, lanes=lanes, chunk=chunk)
    return {"pairs_of_a_beat": pairs, "indices": spread, "pairs": total, "cycles": cycles,
        "pairs_per_cycle": total / cycles, "bytes_per_s_at_200_mhz": 8 * total / cycles * CLOCK_HZ,
        "over_drive": 8 * total / cycles * CLOCK_HZ / DRIVE_BYTES_PER_S}  # fmt: skip


def draw(runs: list[Results]) -> None:
    rows = [row for row in runs if row["rule"] == "adam" and row["form"] == "fused"]
    dense = next(row for row in runs if row["rule"] == "adam" and row["form"] == "dense")
    kept, per_s = [100 * row["kept"] for row in rows], "params_per_s_at_200_mhz"
    title = "Adam on the card: measured in RTL cycles"
    with plot("smartssd.png", 1, 2, figsize=(10, 4), title=title) as (_, (left, right)):
        left.semilogx(kept, [row["bytes_per_param"] for row in rows], "o-", label="fused Top-K")
        left.axhline(dense["bytes_per_param"], color="tab:grey", label="dense gradients")
        through = {"color": "tab:red", "ls": "--", "label": "zero-fill, scatter, re-read"}
        left.axhline(sum(THROUGH_DRAM.values()), **through)
        left.set(xlabel="elements kept, %", ylabel="bytes a parameter, card DRAM", ylim=(22, 38))
        left.legend()
        right.semilogx(kept, [row[per_s] / 1e6 for row in rows], "o-")
        right.axhline(dense[per_s] / 1e6, color="tab:grey")
        right.set(xlabel="elements kept, %", ylabel="million parameters/s at 200 MHz")
        for axes in (left, right):
            axes.grid(alpha=0.3)


@script
def main(count: Annotated[int, option("Parameters of a step.", min=1)] = 1_000_000) -> None:
    """Measure the card, and write build/bench/smartssd.json and smartssd.png."""
    runs = []
    with nearstep.open(URL) as device:
        card = Card(device, count)
        for rule in track(STEPS, "rules"):
            runs.append(card.step(rule))
            runs += [card.step(rule, card.pairs(0.01, form)) for form in ("fused", SCATTER)]
        for share in track([each for each in KEEP if each != 0.01], "shares of Adam"):
            runs.append(card.step("adam", card.pairs(share, "fused")))
        scan = card.scan()
    runs.sort(key=lambda row: (list(STEPS).index(row["rule"]), row["form"], row["kept"]))
    with nearstep.open(RTL_URL) as device:
        card = Card(device, count)
        card.step("adam")
        simulation = card.step("adam")
    draw(runs)
    report("smartssd", derived, paper_bytes_per_s=PAPER_BYTES_PER_S,
        drive_bytes_per_s=DRIVE_BYTES_PER_S, through_dram=THROUGH_DRAM, runs=runs, scan=scan,
        scatter=[scatter_rate(pairs, how) for pairs in (8, 16) for how in ("even", "random")],
        simulation={"url": RTL_URL, **simulation})  # fmt: skip
