"""Writes ``docs/benchmarks.md`` and its plots from the JSON under ``build/bench``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from report import FOLDER

DOCS = FOLDER.parents[1] / "docs"

Results = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; everything but the first column is aligned right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows), ""]


def mega(rate: float) -> str:
    """A rate in parameters a second, as millions a second."""
    return f"{rate / 1e6:.2f} M/s"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def kernel(results: Results) -> list[str]:
    """Cycles against the bound, and speed of the devices."""
    fits = results["fits"]
    lines = ["## The Adam kernel", ""]
    lines += [
        "Cycles from START to done, *measured* (RTL; beyond 10^6 parameters with functional units",
        "in C++, whose cycles were checked to be equal up to there), fitted as a + b x parameters.",
        "",
    ]
    lines += table(
        ["memory", "a, cycles", "b, cycles/parameter", "bound", "bound / b", "of bound at 10^6"],
        (
            [
                f"`{name}`",
                f"{fit['a_cycles']:.0f}",
                f"{fit['b_cycles_per_parameter']:.5f}",
                f"{fit['bound_cycles_per_parameter']:.4f}",
                percent(fit["bound_over_b"]),
                percent(fit["fraction_of_bound"][fit["counts"].index(1_000_000)]),
            ]
            for name, fit in fits.items()
        ),
    )
    lines += ["![Fraction of the bound over the number of parameters](kernel.png)", ""]
    lines += ["Speed of the emulated devices, *measured* (this machine, one core).", ""]
    golden = results["golden"]
    rows = [
        [f"`{row['url']}`", f"{row['parameters']:,}", mega(row["params_per_s"])]
        for row in results["simulation"]
    ]
    rows += [
        [f"`{golden['url']}`", f"{golden['parameters']:,}", mega(golden["golden_params_per_s"])],
        ["`torch.optim.Adam(fused=True)`", f"{golden['parameters']:,}",
         mega(golden["torch_fused_params_per_s"])],
    ]  # fmt: skip
    lines += table(["device", "parameters", "rate"], rows)
    ratio = golden["golden_over_torch"]
    return [*lines, f"`golden:axdimm` runs at {ratio:.2f} of torch, in one run.", ""]


def channel(results: Results) -> list[str]:
    """The kernel and traffic like its own on the DDR4 controller."""
    paper = results["paper"]
    lines = ["## The kernel on a DDR4 channel", ""]
    lines += [
        "Kernel RTL but for its arithmetic, or a model of its traffic, on the controller in one",
        "simulation, *measured* in RTL cycles from START to done, refresh on. The host and the",
        "mode arbiter are not in it. Two channels at 200 MHz are *modelled* as twice one. A",
        "refresh that is still owed at done would cost about 70 cycles (8Gb). Skew is how far the",
        "arrays lie apart in banks, in beats. *Paper*: "
        f"{paper['params_per_s'] / 1e6:.2f} of {paper['peak_params_per_s'] / 1e6:.2f} MP/s, "
        f"{percent(paper['fraction_of_peak'])}, on 32Gb parts.",
        "",
    ]
    lines += table(
        ["source", "part", "mapping", "block, KiB", "units", "skew, beats", "of peak",
         "refresh bound", "refresh", "turnaround", "row", "refreshes owed", "MP/s, 2 channels"],
        (
            [
                row["kind"],
                f"{row['density']} {row['width']}",
                row["mapping"],
                row["block_kib"],
                row["functional_units"],
                row["skew_beats"],
                percent(row["fraction_of_peak"]),
                percent(row["refresh_bound"]),
                percent(row["lost"]["refresh"]),
                percent(row["lost"]["turnaround"]),
                percent(row["lost"]["row"]),
                row["refreshes_due_at_done"],
                f"{row['params_per_s_two_channels'] / 1e6:.1f}",
            ]
            for row in results["rows"]
        ),
    )  # fmt: skip
    return [*lines, "![Where the cycles go](channel.png)", ""]


def functional_unit(results: Results) -> list[str]:
    """Area, latency and simulation speed of the functional unit."""
    paper = results["paper"]
    lines = ["## The functional unit", ""]
    lines += ["Area after `synth_xilinx -family xcup` (*measured*; synthesis only, so timing is"]
    lines += ["unproven). Both run-time modes, Adam and AdamW, are in each unit.", ""]
    lines += table(
        ["order of operations", "DSP48E2", "latency, cycles", "LUT", "FF", "LUT as memory"],
        [
            *(
                [r["order"], r["dsp"], r["latency_cycles"], r["lut"], r["ff"], r["lut_memory"]]
                for r in results.get("area", [])
            ),
            ["*paper*", paper["dsp"], paper["latency_cycles"], "-", "-", "-"],
        ],
    )
    lines += ["Sixteen Verilated units in one loop, *measured* (one core, processor time).", ""]
    return lines + table(
        ["options", "latency, cycles", "rate"],
        (
            [
                ", ".join(f"{k}={v}" for k, v in row["options"].items()) or "default",
                row["latency_cycles"],
                mega(row["params_per_s"]),
            ]
            for row in results["simulation"]
        ),
    )


def accuracy(results: Results) -> list[str]:
    """Bits that differ from torch, and error against float64."""
    lines = ["## Accuracy", ""]
    lines += [
        f"{results['parameters']:,} parameters, {results['steps']} steps, *measured* against the",
        "same steps in float64. Errors in ulp; values near zero dominate the mean. ATen "
        f"capability {results['aten_capability']}.",
        "",
    ]
    return lines + table(
        ["optimizer", "implementation", "array", "bits that differ from torch fused",
         "mean ulp", "median ulp", "max absolute"],
        (
            [
                row["optimizer"],
                row["implementation"],
                row["array"],
                f"{row['bits_that_differ_from_torch_fused']:,}",
                f"{row['mean_ulp']:.3f}",
                f"{row['median_ulp']:.3f}",
                f"{row['max_absolute']:.2e}",
            ]
            for row in results["rows"]
        ),
    )  # fmt: skip


def provenance(results: Results) -> list[str]:
    """The command and the machine, below each section."""
    machine, versions = results["machine"], results["versions"]
    made_with = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return [
        f"Command: `{results['command']}` on {machine['cores']} cores of {machine['cpu']}, "
        f"load average {machine['load_average']:.1f} at the start; {made_with}.",
        "",
    ]


SECTIONS: dict[str, Callable[[Results], list[str]]] = {
    "kernel": kernel,
    "channel": channel,
    "fu": functional_unit,
    "accuracy": accuracy,
}


def main() -> None:
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench`. *Paper* is a printed figure of the AXDIMM paper, *measured* was",
        "counted in RTL cycles or timed on the machine named below each section.",
        "",
    ]
    found = False
    for name, section in SECTIONS.items():
        path = FOLDER / f"{name}.json"
        if path.exists():
            results = json.loads(path.read_text())
            lines += [*section(results), *provenance(results)]
            found = True
        if (plot := path.with_suffix(".png")).exists():
            shutil.copy(plot, DOCS / plot.name)
    if not found:
        raise SystemExit(f"no results in {FOLDER}; run `make bench`")
    (DOCS / "benchmarks.md").write_text("\n".join(lines).rstrip() + "\n")
    print(f"written: {DOCS / 'benchmarks.md'}")


if __name__ == "__main__":
    main()
