"""Writes `docs/benchmarks.md` and its plots from the JSON under `build/bench`."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from page_coarse import (
    coarse,
    coarse_area,
    coarse_pipeline,
    coarse_service,
    coarse_update,
    coarse_wire,
)
from page_formats import formats, state_losses
from page_fu import accuracy, functional_unit
from page_memferry import memferry
from page_shipped import shipped, whole_area
from page_smartssd import (
    compression,
    handler,
    rules,
    smartssd,
    smartssd_area,
    smartssd_shipped,
)
from page_storage import cards, offload, overflow, storage
from page_table import Results, mega, percent, section, table
from report import FOLDER

DOCS = FOLDER.parents[1] / "docs"
FIGURES = Path(__file__).with_name("figures.md")
"""The table that the page begins with, whose numbers a test compares with the sections."""


def kernel(results: Results) -> list[str]:
    """Cycles against the bound, and speed of the devices."""
    fits = results["fits"]
    lines = section(
        "The Adam kernel",
        "Cycles from START to done, *measured* (RTL; beyond 10^6 parameters with functional units",
        "in C++, whose cycles were checked to be equal up to there), fitted as a + b x parameters.",
    )
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
    lines += [
        "Speed of the emulated devices, *measured* (this machine, one core). With `ddr4-1600` a",
        "step goes to acceleration mode, runs on both channels, and comes back; the DRAM, its",
        "controllers, the arbiters and the host's memory controller are simulated cycle by cycle.",
        "",
    ]
    golden = results["golden"]
    rows = [
        [
            f"`{row['url']}`",
            f"{row['parameters']:,}",
            mega(row["params_per_s"]),
            mega(row["params_per_cpu_s"]) if "params_per_cpu_s" in row else "",
        ]
        for row in results["simulation"]
    ]
    rows += [
        [f"`{url}`", f"{golden['parameters']:,}", mega(golden[f"{name}_params_per_s"]), ""]
        for name, url in (
            ("golden", golden["url"]),
            ("torch_fused", "torch.optim.Adam(fused=True)"),
        )
    ]
    lines += table(["device", "parameters", "rate", "by processor time"], rows)
    dimm = next(row for row in results["simulation"] if "fraction_of_peak" in row)
    lines += [
        f"`{dimm['url']}` took {dimm['cycles']:,} cycles for a step of {dimm['parameters']:,}",
        f"parameters, functional units in RTL: {percent(dimm['fraction_of_peak'])} of the peak of",
        "its two channels, by the kernels' own counters.",
        f"`golden:axdimm` runs at {golden['golden_over_torch']:.2f} of torch, in one run.",
        "",
    ]
    return lines


CAUSES = {
    "refresh": "refresh",
    "turnaround": "turnaround",
    "row": "row",
    "bank_group": "bank group",
    "empty": "units busy",
    "other": "no request",
    "start_drain": "start and drain",
    "start": "start",
    "drain": "drain",
}
"""Where cycles are lost, in the order of the columns."""

SWEEPS: dict[str, Callable[[Results], str]] = {
    "block": lambda row: f"blocks of {row['block_kib']} KiB",
    "units": lambda row: f"functional units: {row['functional_units']}",
    "skew": lambda row: f"arrays {row['skew_beats']} beats apart in banks",
    "part": lambda row: f"{row['density']} {row['width']}",
    "mapping": lambda row: row["mapping"],
}


RANK_SWEEPS: dict[str, Callable[[Results], str]] = {
    "interleave": lambda row: f"{row['interleave'] >> 10:,} KiB in a rank before the other",
    "bursts ahead": lambda row: f"read bursts ahead: {row['bursts_ahead']}",
    "block": lambda row: f"blocks of {row['block_kib']} KiB",
    "skew": lambda row: f"arrays {row['skew_beats']} beats apart",
    "part": lambda row: f"{row['density']} {row['width']}",
}


def lost(rows: Sequence[Results], row: Results) -> list[str]:
    """Cells of one row for the causes that the table has."""
    return [f"{100 * row['lost'][cause]:.3f}" for cause in CAUSES if cause in rows[0]["lost"]]


def lost_head(rows: Sequence[Results]) -> list[str]:
    return [f"{name}, %" for cause, name in CAUSES.items() if cause in rows[0]["lost"]]


def channel(results: Results) -> list[str]:
    """The kernel and traffic like its own on the DDR4 controller."""
    paper = results["paper"]
    rows = results["rows"]
    head = ["of peak", "settled", "refresh bound", *lost_head(rows), "due", "MP/s, 2 channels"]

    def cells(row: Results) -> list[str]:
        return [
            percent(row["fraction_of_peak"]),
            percent(row["fraction_with_due_refreshes"]),
            percent(row["refresh_bound"]),
            *lost(rows, row),
            str(row["refreshes_due_at_done"]),
            f"{row['params_per_s_two_channels'] / 1e6:.1f}",
        ]

    lines = section(
        "The kernel on a DDR4 channel",
        "The controller in RTL with one rank, *measured* in cycles from START to done, refresh on,",
        "1,000,000 parameters, every beat compared. The host and the mode arbiter are not in it:",
        "see the module below. Two channels at 200 MHz are *modelled* as twice one. *Due* counts",
        "the refreshes that are still owed at done; *settled* is the share if they had been given",
        "before. Lost cycles: *units busy* is a controller without a request, *start* and *drain*",
        "lie before the first and after the last column command. *Paper*: "
        f"{paper['params_per_s'] / 1e6:.2f} of {paper['peak_params_per_s'] / 1e6:.2f} MP/s, "
        f"{percent(paper['fraction_of_peak'])}, on 32Gb parts.",
        "",
        "The kernel's RTL, with stand-ins of equal latency for its arithmetic; 16 KiB blocks:",
    )
    lines += table(
        ["part, functional units", *head],
        (
            [f"{row['density']} {row['width']}, {row['functional_units']}", *cells(row)]
            for row in rows
            if row["kind"] == "kernel"
        ),
    )
    lines += [
        "A C++ model of the kernel's traffic; 8Gb x8, 16 KiB blocks, 16 units,",
        f"{rows[0]['mapping']}, where nothing else is said:",
        "",
    ]
    lines += table(
        ["what", *head],
        (
            [SWEEPS[row["sweep"]](row), *cells(row)]
            for sweep in SWEEPS
            for row in rows
            if row["sweep"] == sweep
        ),
    )
    return [*lines, "![Where the cycles go](channel.png)", ""]


def channel_ranks(results: Results) -> list[str]:
    """The same with two ranks."""
    rows = results["rows"]
    head = ["of peak", "settled", *lost_head(rows), "due", "MP/s, 2 channels"]

    def cells(row: Results) -> list[str]:
        return [
            percent(row["fraction_of_peak"]),
            percent(row["fraction_with_due_refreshes"]),
            *lost(rows, row),
            " + ".join(map(str, row["refreshes_due_at_done"])),
            f"{row['params_per_s_two_channels'] / 1e6:.1f}",
        ]

    lines = section(
        "Two ranks on a channel",
        "The same controller with two ranks: one is refreshed while the other moves data. Columns",
        "as above; *settled* counts the refreshes due at done, of both ranks, one after the other,",
        "and *turnaround* the changes of direction and of rank. The kernel's RTL, 16 KiB blocks,",
        f"{rows[0]['parameters']:,} parameters:",
        "",
    )
    lines += table(
        ["part, functional units", *head],
        (
            [f"{row['density']} {row['width']}, {row['functional_units']}", *cells(row)]
            for row in rows
            if row["kind"] == "kernel"
        ),
    )
    swept = [row for row in rows if row["sweep"] in RANK_SWEEPS]
    lines += [
        f"The C++ model of its traffic, {swept[0]['parameters']:,} parameters; 8Gb x8, 16 KiB in a",
        "rank before the other, 16 KiB blocks, 16 units, where nothing else is said:",
        "",
    ]
    lines += table(
        ["what", *head],
        (
            [RANK_SWEEPS[sweep](row), *cells(row)]
            for sweep in RANK_SWEEPS
            for row in swept
            if row["sweep"] == sweep
        ),
    )
    return [*lines, "![Where the cycles of two ranks go](channel_ranks.png)", ""]


def module(results: Results) -> list[str]:
    """The module with its arbiters: kernels, host, hand-overs, area."""
    paper, steps = results["paper"], results["steps"]
    lines = section(
        "The module",
        "Two channels behind one host bus, each with mode arbiter, controller and kernel, all in",
        "RTL, *measured*: START through the register window, needed beats over all cycles from",
        "START to done by the kernel's own counter, the slower channel where there are two. 16 KiB",
        f"blocks, {steps[0]['parameters_per_channel']:,} parameters a channel. Stand-ins of equal",
        "latency do the arithmetic; all of memory is compared. Lost clocks are those of the DRAM's",
        "data bus. MP/s at 200 MHz, by the host's count of cycles from before the first START to",
        "the poll that finds both done.",
    )
    lines += table(
        ["part, units, channels", "of peak", "settled", "refresh bound", *lost_head(steps), "due",
         "MP/s"],
        [
            *(
                [
                    f"{row['density']} {row['width']}, {row['functional_units']}, "
                    f"{row['channels']}",
                    percent(row["fraction_of_peak"]),
                    percent(row["fraction_with_due_refreshes"]),
                    percent(row["refresh_bound"]),
                    *lost(steps, row),
                    row["refreshes_due_at_done"],
                    f"{row['params_per_s'] / 1e6:.1f}",
                ]
                for row in steps
            ),
            *(
                [
                    f"*paper*, {name}",
                    percent(paper[key]["params_per_s"] / paper[key]["peak_params_per_s"]),
                    *("" for _ in range(2 + len(lost_head(steps)) + 1)),
                    f"{paper[key]['params_per_s'] / 1e6:.2f} of "
                    f"{paper[key]['peak_params_per_s'] / 1e6:.2f}",
                ]
                for key, name in (("kernel", "32Gb, 16, 2"), ("cpu", "CPU"))
            ),
        ],
    )  # fmt: skip
    lines += ["![Parameters a second](module.png)", ""]
    lines += [
        "A controller in a channel gathers five refreshes, not eight, so that a host that pulls in",
        "eight behind it keeps the DRAM's 16 in two tREFI. What that costs, by the controller",
        "alone:",
        "",
    ]
    lines += table(
        ["part, refreshes postponed", "of peak", "due", "settled"],
        (
            [
                f"{row['density']}, {row['postponed']}",
                percent(row["fraction_of_peak"]),
                row["refreshes_due_at_done"],
                f"{100 * row['fraction_with_due_refreshes']:.3f} %",
            ]
            for row in results["postponing"]
        ),
    )
    return lines


def module_ranks(results: Results) -> list[str]:
    """The module with two ranks on each channel."""
    rows = results["rows"]
    lines = section(
        "The module with two ranks a channel",
        "Both channels at once, START to done by the kernel's own counter, the slower channel,",
        f"{rows[0]['parameters_per_channel']:,} parameters a channel, 16 KiB blocks, 16 KiB in a",
        "rank before the other, *measured*; C++ operators of equal bits and latency do the",
        "arithmetic, and all results are compared with golden's. *Due* are refreshes of both ranks",
        "when the host looks, after the poll that finds both done. An idle controller has given",
        "others since the run ended, so *settled* is of all cycles from before the first START to",
        "that poll, and of those still due, one after the other. MP/s at 200 MHz, by the same",
        "count of cycles.",
    )
    lines += table(
        ["part, ranks, units", "of peak", "due", "settled", "MP/s, 2 channels"],
        (
            [
                f"{row['density']} {row['width']}, {row['ranks']}, {row['functional_units']}",
                percent(row["fraction_of_peak"]),
                " + ".join(map(str, row["refreshes_due_at_done"])),
                percent(row["fraction_with_due_refreshes"]),
                f"{row['params_per_s'] / 1e6:.1f}",
            ]
            for row in rows
        ),
    )
    hosts = results["hosts"]
    lines += [
        "The host in normal mode, columns as [below](#the-host-in-normal-mode), beside two ranks",
        f"of bare DRAM; {hosts[0]['accesses']:,} accesses queued at once:",
        "",
    ]
    lines += beside_bare(hosts)
    lines += [
        "Arbiters, host side and controller of a channel after synthesis for UltraScale+:",
        "",
    ]
    return lines + table(
        ["ranks", "LUT", "of them as memory", "FF", "BRAM of 36 Kib", "DSP48E2"],
        (
            [
                row["ranks"],
                *(f"{row[key]:,}" for key in ("lut", "lut_memory", "ff")),
                f"{row['bram36']:.1f}",
                row["dsp"],
            ]
            for row in results["area"]
        ),
    )


def beside_bare(rows: Sequence[Results]) -> list[str]:
    """The host's throughput on a channel, on bare DRAM, and on DRAM as late as the module."""
    return table(
        ["scheduler, accesses", "channel, bytes/cycle", "bare DRAM, bytes/cycle", "of bare",
         "of DRAM as late"],
        (
            [
                f"{row['scheduler']}, {row['pattern']}",
                f"{row['bytes_per_cycle']['channel']:.2f}",
                f"{row['bytes_per_cycle']['bare']:.2f}",
                percent(row["throughput_over_bare"]),
                percent(row["throughput_over_late"]),
            ]
            for row in rows
        ),
    )  # fmt: skip


def module_host(results: Results) -> list[str]:
    """The host in normal mode beside DRAM without a module."""
    rows = results["rows"]
    lines = [
        "### The host in normal mode",
        "",
        "The same host model at the same clock on the module's channel and on DRAM chips alone,",
        "which have the latencies of their own, CL 6 and CWL 5, and the turnarounds that follow",
        f"from those; {rows[0]['accesses']:,} accesses queued at once, and",
        f"{min(row['accesses'] for row in rows):,} one at a time, *measured*; 32",
        "bytes a cycle is the bus. The module answers seven cycles later, so after a read its",
        "host waits longer before it may write. *As late* is DRAM with the module's latencies:",
        "what differs from that is the arbiter's doing.",
        "",
    ]
    return lines + beside_bare(rows)


def module_hand_overs(results: Results) -> list[str]:
    """Cycles of changes of mode."""
    rows = results["rows"]
    lines = [
        "### Changing the mode",
        "",
        "Cycles of 5 ns from the request to the mode, by the arbiter's own counter, *measured* at",
        "random times with random bursts in the kernel's place. The bound adds up what the",
        "docstring of `longest_to_normal` names: worst cases that hardly meet.",
        "",
    ]
    lines += table(
        ["to, part, load", "changes", "median", "worst", "bound"],
        (
            [
                f"{row['to']}, {row['density']}, {row['load']}",
                row["times"],
                f"{row['median']:.0f}",
                row["worst"] if row["worst"] <= row["bound"] else f"**{row['worst']}**",
                row["bound"],
            ]
            for row in rows
        ),
    )
    if any(row["worst"] > row["bound"] for row in rows):
        lines += ["**Bold**: beyond the bound, which therefore is none for that load.", ""]
    return [*lines, "![Cycles of a change of mode](module-hand-over.png)", ""]


def module_simulation(results: Results) -> list[str]:
    """Simulated DIMMs on one thread and on two."""
    rows = results["rows"]
    lines = [
        "### Threads of a simulation",
        "",
        f"A step of {rows[0]['parameters_per_channel']:,} parameters on each of two channels,",
        "functional units in RTL: wall time, *measured*, the fastest of",
        f"{len(rows[0]['cycles'])} steps on each number of threads, which take turns; processor",
        "time is the sum over threads. Bits and cycles are compared.",
        "",
    ]
    return lines + table(
        ["parts", "cycles", "1 thread, s", "2 threads, s", "times as fast", "processor time, s"],
        (
            [
                row["parts"],
                f"{row['cycles'][0]:,}",
                *(f"{min(each):.3f}" for each in row["seconds"]),
                f"{row['speedup_of_the_fastest']:.2f}",
                " and ".join(f"{min(each):.3f}" for each in row["processor_seconds"]),
            ]
            for row in rows
        ),
    )


def step(results: Results) -> list[str]:
    """Whole steps, transfers included."""
    rows = results["rows"]
    lines = section(
        "A step of the optimizer",
        "Device cycles of a whole `optimizer.step()` of AdamW on the module, transfers included,",
        "*measured*: the same steps on the same device in turn, once one thing after the other",
        "(all gradients down, both kernels, all parameters up), and once as a graph, which is what",
        "a device with a clock gets. Both have the same bits. The *limit* is the resource that the",
        "graph holds longest: the host's bus, or a channel, which its kernel holds as well as the",
        "transfers to and from it. Stand-ins of equal latency do the arithmetic;",
        f"{rows[0]['tensors']} tensors of two sizes.",
    )
    lines += table(
        ["channels, parameters", "in sequence", "as a graph", "of it", "bus", "slower channel",
         "before, over the limit", "after"],
        (
            [
                f"{row['channels']}, {row['parameters']:,}",
                f"{row['sequence_cycles']:,.0f}",
                f"{row['graph_cycles']:,.0f}",
                percent(1 / row["sequence_over_graph"]),
                f"{row['busy_cycles']['bus']:,}",
                f"{max(v for k, v in row['busy_cycles'].items() if k != 'bus'):,}",
                f"{row['sequence_cycles'] / max(row['busy_cycles'].values()):.3f}",
                f"{row['graph_cycles'] / max(row['busy_cycles'].values()):.3f}",
            ]
            for row in rows
        ),
    )  # fmt: skip
    return lines


def module_area(area: Results) -> list[str]:
    """Blocks, and sums of them."""
    keys = ("dsp", "lut", "lut_memory", "ff", "bram36")

    def row(name: str, cells: Results) -> list[str]:
        return [name, *(f"{cells[key]:,}" for key in keys)]

    return [
        "### Area",
        "",
        "After `synth_xilinx -family xcup`, *measured* block by block (synthesis only, so timing",
        "is unproven, and no registers are packed into DSP48E2, so FF counts read high); sums in",
        "italics are added up: n functional units and one kernel without units.",
        "",
        *table(
            ["block", "DSP48E2", "LUT", "LUT as memory", "FF", "BRAM, 36 Kib"],
            [
                *(row(each["name"], each) for each in area["blocks"]),
                *(row(f"*{name}*", each) for name, each in area["sums"].items()),
            ],
        ),
    ]


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
    "channel_ranks": channel_ranks,
    "module": module,
    "module_ranks": module_ranks,
    "module_host": module_host,
    "module_hand_overs": module_hand_overs,
    "module_simulation": module_simulation,
    "module_area": module_area,
    "shipped": shipped,
    "whole_area": whole_area,
    "step": step,
    "formats": formats,
    "state_losses": state_losses,
    "fu": functional_unit,
    "rules": rules,
    "smartssd": smartssd,
    "smartssd_shipped": smartssd_shipped,
    "handler": handler,
    "smartssd_area": smartssd_area,
    "coarse": coarse,
    "coarse_wire": coarse_wire,
    "coarse_pipeline": coarse_pipeline,
    "coarse_update": coarse_update,
    "coarse_area": coarse_area,
    "coarse_service": coarse_service,
    "accuracy": accuracy,
    "compression": compression,
    "storage": storage,
    "overflow": overflow,
    "cards": cards,
    "offload": offload,
    "memferry": memferry,
}


MARK = "<!-- {} -->"
"""Begins a section of the page."""

SEAL = "<!-- {} is as it was written: {} -->"
"""Ends a section of the page: its name, and a digest of its text. A test finds a figure that was
changed by hand."""


def seal(name: str, lines: Sequence[str]) -> str:
    """The last line of a section."""
    digest = hashlib.sha256("\n".join(lines).rstrip().encode()).hexdigest()
    return SEAL.format(name, digest[:16])


def kept(page: str) -> dict[str, list[str]]:
    """Sections of the page as it is: those without new results stay."""
    sections: dict[str, list[str]] = {}
    marks = {MARK.format(name): name for name in SECTIONS}
    lines: list[str] = []
    for line in page.splitlines():
        if line in marks:
            lines = sections.setdefault(marks[line], [])
        else:
            lines.append(line)
    return {name: [*"\n".join(text).rstrip().splitlines(), ""] for name, text in sections.items()}


def main() -> None:
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench`. *Paper* is a printed figure: of the AXDIMM paper, or of the one",
        "that is named. *Measured* was counted in RTL cycles or after synthesis, or timed on the",
        "machine named below each section. *Modelled* follows from measured figures and from what",
        "is said there. Cycles and area are the same everywhere; speeds of simulation are not: one",
        "commit has given rates 2 times apart on machines of the same name.",
        "",
        *FIGURES.read_text(encoding="utf-8").splitlines(),
        "",
    ]
    page = DOCS / "benchmarks.md"
    sections = kept(page.read_text() if page.exists() else "")
    found = False
    for name, render in SECTIONS.items():
        path = FOLDER / f"{name}.json"
        if path.exists():
            results = json.loads(path.read_text())
            section = [*render(results), *provenance(results)]
            sections[name] = [*section, seal(name, section), ""]
            found = True
        for plot in sorted(FOLDER.glob(f"{name}*.png")):
            shutil.copy(plot, DOCS / plot.name)
        if name in sections:
            lines += [MARK.format(name), *sections[name]]
    if not found:
        raise SystemExit(f"no results in {FOLDER}; run `make bench`")
    page.write_text("\n".join(lines).rstrip() + "\n")
    print(f"written: {page}")


if __name__ == "__main__":
    main()
