# amaranth: UnusedElaboratable=no
"""The card of a SmartSSD: bytes and cycles of updates, dense and with Top-K pairs, rates.

Cycles are those of the RTL of the whole card, with functional units in C++ of equal latency (the
last section has them in RTL). The bound is a beat of 64 bytes a cycle on the half-duplex DRAM of
the card.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import numpy as np
import report
import typer
from needed import scan_bytes, update_bytes
from rich.console import Console
from rich.progress import track
from rich.table import Table

import nearstep
from nearstep.buffer import Buffer
from nearstep.smartssd.device import SmartssdDevice
from nearstep.updater.pairs import Pairs
from nearstep_hw.updater.pairs.decompress import SCATTER
from nearstep_sim.updater.scatter_run import scatter_cycles
from nearstep_spec.smartssd.config import UPDATER

URL = "sim:smartssd?fu=native"
RTL_URL = "sim:smartssd"
CLOCK_HZ = 200_000_000
DRIVE_BYTES_PER_S = 3.2e9
"""Taken as the read rate of the SSD; the paper plots one and prints none."""
PAPER_BYTES_PER_S = 7e9
"""Updater, at least. Ref: Smart-Infinity, section VII-H and Fig. 14."""
THROUGH_DRAM = {"zero-fill": 4, "re-read of gradients": 4, "states": 24}
"""Bytes a parameter of Adam if the dense gradient is made in DRAM, before any pair is written."""
KEEP = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
STEPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adam": ("adam", "pmv", {"step": 2, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    "sgd": ("sgd", "p", {"lr": 0.1, "weight_decay": 0.01}),
    "sgd_momentum": ("sgd", "pm", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": ("adagrad", "pv", {"step": 2}),
}
"""Method, arrays besides g, and hyper-parameters of a step."""

plt.switch_backend("Agg")
console = Console()


class Card:
    """A card with the arrays of a step."""

    def __init__(self, device: SmartssdDevice, count: int) -> None:
        self.device = device
        self.count = count
        self.rng = np.random.default_rng(1)
        values = self.rng.standard_normal(count, np.float32)
        self.arrays = {name: device.alloc(count) for name in "pgmv"}
        for name, buffer in self.arrays.items():
            buffer.write(np.square(values) if name == "v" else values)

    def pairs(self, share: float, form: str) -> Pairs:
        """That share of the elements, at random places."""
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

    def step(self, rule: str, gradient: Buffer | Pairs) -> dict[str, Any]:
        """Cycles and beats of one step, by the card's own counters."""
        method, states, hyper = STEPS[rule]
        arrays = {name: self.arrays[name] for name in states}
        began = time.perf_counter()
        run = self.device.update(method, {**arrays, "g": gradient}, **hyper).wait()
        seconds = time.perf_counter() - began
        beats = run.counters["read_beats"] + run.counters["write_beats"]
        form = gradient.form if isinstance(gradient, Pairs) else "dense"
        config = self.device.config
        pairs = gradient.size if isinstance(gradient, Pairs) else None
        needed = update_bytes(config, rule, self.count, pairs=pairs)
        kept = gradient.size / self.count if isinstance(gradient, Pairs) else 1.0
        if isinstance(gradient, Pairs):
            gradient.index.free()
            gradient.value.free()
        return {
            "label": "measured (RTL cycles)",
            "rule": rule,
            "form": form,
            "kept": kept,
            "parameters": self.count,
            "cycles": run.cycles,
            "beats": beats,
            "needed_bytes": needed,
            "of_bound": needed / config.beat_bytes / run.cycles,
            "bytes_per_param": beats * config.beat_bytes / self.count,
            "params_per_s_at_200_mhz": self.count / run.cycles * CLOCK_HZ,
            "bytes_per_s_at_200_mhz": needed / run.cycles * CLOCK_HZ,
            "simulated_params_per_s": self.count / seconds,
        }

    def scan(self) -> dict[str, Any]:
        """Cycles of a scan of dense gradients."""
        run = self.device.scan(self.arrays["g"]).wait()
        needed, moved = scan_bytes(self.count), run.counters["read_beats"]
        return {
            "label": "measured (RTL cycles)",
            "parameters": self.count,
            "cycles": run.cycles,
            "of_bound": needed / self.device.config.beat_bytes / run.cycles,
            "bytes_per_param": moved * self.device.config.beat_bytes / self.count,
            "bytes_per_s_at_200_mhz": needed / run.cycles * CLOCK_HZ,
        }


def scatter_rate(pairs: int, spread: str, total: int = 1 << 16) -> dict[str, Any]:
    """Pairs a cycle of the scatter form alone, of every element in random order in its chunk."""
    lanes, chunk = UPDATER.lanes, UPDATER.block_elements
    cycles = scatter_cycles(pairs=pairs, spread=spread, total=total, lanes=lanes, chunk=chunk)
    a_cycle = total / cycles
    return {
        "label": "measured (RTL cycles)",
        "pairs_of_a_beat": pairs,
        "indices": spread,
        "pairs": total,
        "cycles": cycles,
        "pairs_per_cycle": a_cycle,
        "bytes_per_s_at_200_mhz": 8 * a_cycle * CLOCK_HZ,
    }


def show(results: dict[str, Any]) -> None:
    table = Table("rule", "gradients", "kept", "B/param", "% of bound", "MP/s", "GB/s")
    for row in results["runs"]:
        table.add_row(
            row["rule"],
            row["form"],
            f"{100 * row['kept']:g} %",
            f"{row['bytes_per_param']:.3f}",
            f"{100 * row['of_bound']:.2f}",
            f"{row['params_per_s_at_200_mhz'] / 1e6:.1f}",
            f"{row['bytes_per_s_at_200_mhz'] / 1e9:.2f}",
        )
    console.print(table)
    for row in results["scatter"]:
        console.print(
            f"scatter, {row['pairs_of_a_beat']} pairs a beat, {row['indices']}: "
            f"{row['pairs_per_cycle']:.2f} pairs a cycle, "
            f"{row['bytes_per_s_at_200_mhz'] / DRIVE_BYTES_PER_S:.2f} x the drive"
        )
    console.print(f"{RTL_URL}: {results['simulation']['simulated_params_per_s']:,.0f} params/s")


def plot(results: dict[str, Any], path: Path) -> None:
    """Bytes a parameter against the share kept, and the rate that follows."""
    rows = [row for row in results["runs"] if row["rule"] == "adam" and row["form"] == "fused"]
    dense = next(row for row in results["runs"] if row["rule"] == "adam" and row["form"] == "dense")
    kept = [100 * row["kept"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    left.semilogx(kept, [row["bytes_per_param"] for row in rows], "o-", label="fused Top-K")
    left.axhline(dense["bytes_per_param"], color="tab:grey", label="dense gradients")
    left.axhline(
        sum(THROUGH_DRAM.values()), color="tab:red", ls="--", label="zero-fill, scatter, re-read"
    )
    left.set(xlabel="elements kept, %", ylabel="bytes a parameter, card DRAM", ylim=(22, 38))
    right.semilogx(kept, [row["params_per_s_at_200_mhz"] / 1e6 for row in rows], "o-")
    right.axhline(dense["params_per_s_at_200_mhz"] / 1e6, color="tab:grey")
    right.set(xlabel="elements kept, %", ylabel="million parameters/s at 200 MHz")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle("Adam on the card: measured in RTL cycles")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(
    count: Annotated[int, typer.Option(min=1, help="Parameters of a step.")] = 1_000_000,
) -> None:
    """Measure the card, and write build/bench/smartssd.json and smartssd.png."""
    runs = []
    with nearstep.open(URL) as device:
        card = Card(device, count)
        for rule in track(STEPS, "rules", console=console):
            runs.append(card.step(rule, card.arrays["g"]))
            runs.append(card.step(rule, card.pairs(0.01, "fused")))
            runs.append(card.step(rule, card.pairs(0.01, SCATTER)))
        for share in track(KEEP, "shares of Adam", console=console):
            if share != 0.01:
                runs.append(card.step("adam", card.pairs(share, "fused")))
        scan = card.scan()
    runs.sort(key=lambda row: (list(STEPS).index(row["rule"]), row["form"], row["kept"]))
    with nearstep.open(RTL_URL) as device:
        card = Card(device, count)
        card.step("adam", card.arrays["g"])
        simulation = card.step("adam", card.arrays["g"])
    results = {
        "paper_bytes_per_s": PAPER_BYTES_PER_S,
        "drive_bytes_per_s": DRIVE_BYTES_PER_S,
        "through_dram": THROUGH_DRAM,
        "runs": runs,
        "scan": scan,
        "scatter": [scatter_rate(pairs, how) for pairs in (8, 16) for how in ("even", "random")],
        "simulation": {"url": RTL_URL, **simulation},
    }
    show(results)
    report.FOLDER.mkdir(parents=True, exist_ok=True)
    plot(results, report.FOLDER / "smartssd.png")
    console.print(f"written: {report.write('smartssd', results)}")


if __name__ == "__main__":
    typer.run(main)
