"""Sections of the page on the SmartSSD card: its rules, its updater, compressed gradients."""

from __future__ import annotations

from page_table import Results, mega, percent, section, table

CLOCK_HZ = 200_000_000
"""Of the paper's updater, in rates that are modelled."""

TOP_K = {None: "whole gradients", "fused": "with fused Top-K", "scatter": "with scatter Top-K"}


def rules(results: Results) -> list[str]:
    """Update rules of one kernel: cycles, and what sharing units saves."""
    lines = section(
        "Update rules in one kernel",
        "One kernel with four rules, of which a register chooses one for a run; 16 functional",
        "units, 16 KiB blocks. Cycles are *measured* (RTL; units in C++ of equal latency), the",
        "bound is a beat of 64 bytes a cycle for every array that the rule reads or writes. MP/s",
        "and GB/s at 200 MHz are *modelled* from them. *Paper* (Smart-Infinity, Fig. 14): an",
        f"updater of more than {results['paper_bytes_per_s'] / 1e9:.0f} GB/s beside an SSD.",
    )
    lines += table(
        ["memory, rule", "cycles", "of bound", "MP/s", "GB/s"],
        (
            [
                f"{row['memory']}, {row['rule']}",
                f"{row['cycles']:,}",
                percent(row["of_bound"]),
                f"{row['params_per_s_at_200_mhz'] / 1e6:.1f}",
                f"{row['bytes_per_s_at_200_mhz'] / 1e9:.2f}",
            ]
            for row in results["runs"]
        ),
    )
    lines += ["One functional unit after `synth_xilinx -family xcup`, *measured*:", ""]
    cells = list(results["area"])
    apart = {key: sum(row[key] for row in cells[:-1]) for key in ("dsp", "lut", "lut_memory", "ff")}
    lines += table(
        ["rules", "arithmetic units", "latency, cycles", "DSP48E2", "LUT", "LUT as memory", "FF"],
        [
            *(
                [row["name"], sum(row["units"].values()), row["latency"]]
                + [f"{row[key]:.0f}" for key in apart]
                for row in cells
            ),
            ["all four, apart", sum(sum(row["units"].values()) for row in cells[:-1]), ""]
            + [f"{value:.0f}" for value in apart.values()],
        ],
    )
    return lines


def compression(results: Results) -> list[str]:
    """Loss with compressed gradients, against whole ones."""
    rows, peak = results["rows"], results["optimizers"]
    lines = section(
        "Compressed gradients",
        f"A GPT of {results['parameters']:,} parameters, {results['steps']} steps from random",
        f"weights on batches of {results['batch']} x {results['context']} bytes, peak learning",
        f"rate {peak['AdamW']['lr']:g} (AdamW) and {peak['SGD']['lr']:g} (SGD without momentum),",
        f"on `{results['device']}`; *measured*, mean of {results['seeds']} seeds.",
        "Loss is in nats a byte, of the last steps of training and on unseen text; the spread is",
        "the largest less the smallest of the seeds. A seed has weights and batches of its own,",
        "the same in every row. An element that is sent takes 8 bytes, index and value. The paper",
        "(Smart-Infinity, Table IV) fine-tunes models that were trained before, and keeps 1 %.",
    )
    whole = {row["optimizer"]: row for row in rows if row["share"] is None}
    lines += table(
        ["optimizer, elements kept", "error feedback", "gradients, B/step", "of whole",
         "training loss", "validation loss", "spread", "above whole"],
        (
            [
                f"{row['optimizer']}, "
                + ("all" if row["share"] is None else f"{100 * row['share']:g} %"),
                "" if row["share"] is None else ("yes" if row["error_feedback"] else "no"),
                f"{row['gradient_bytes_per_step']:,.0f}",
                percent(
                    row["gradient_bytes_per_step"]
                    / whole[row["optimizer"]]["gradient_bytes_per_step"]
                ),
                f"{row['training_loss']:.3f}",
                f"{row['validation_loss']:.3f}",
                f"{row['validation_loss_spread']:.3f}",
                f"{row['validation_loss'] - whole[row['optimizer']]['validation_loss']:+.3f}",
            ]
            for row in rows
        ),
    )  # fmt: skip
    lines += ["![Validation loss over the share of elements that is kept](compression.png)", ""]
    return lines


def smartssd(results: Results) -> list[str]:
    """The card: updates, scan, decompressor, area, simulation."""
    runs, scan, simulation = results["runs"], results["scan"], results["simulation"]
    updater, drive = results["paper_bytes_per_s"], results["drive_bytes_per_s"]
    adam = {(row["form"], row["kept"]): row for row in runs if row["rule"] == "adam"}
    whole, fused, through = adam["dense", 1.0], adam["fused", 0.01], results["through_dram"]
    kept = f"{100 * fused['kept']:g} %"
    lines = section(
        "The SmartSSD card",
        f"Steps of {runs[0]['parameters']:,} parameters on the RTL of the whole card, units in C++",
        "of equal latency. Cycles, and bytes of the card's half-duplex DRAM, are *measured*; the",
        "bound is a beat of 64 bytes a cycle for the bytes that a step needs: each array once, 8",
        "for each pair. *B/parameter* are those that were moved; of pairs the indices are read",
        "twice. MP/s and GB/s (of needed bytes) at 200 MHz are *modelled*. Pairs are at random",
        "places. *Paper* (Smart-Infinity, Fig. 14): an updater",
        f"of more than {updater / 1e9:.0f} GB/s, faster than its SSD, whose reads are taken to be",
        f"{drive / 1e9:.1f} GB/s.",
    )
    rows = [
        [
            f"{row['rule']}, {row['form']}",
            f"{100 * row['kept']:g} %",
            f"{row['cycles']:,}",
            percent(row["of_bound"]),
            f"{row['bytes_per_param']:.2f}",
            f"{row['params_per_s_at_200_mhz'] / 1e6:.1f}",
            f"{row['bytes_per_s_at_200_mhz'] / 1e9:.2f}",
            f"{row['bytes_per_s_at_200_mhz'] / drive:.2f}",
        ]
        for row in runs
    ]
    rows += [
        [
            "scan of gradients",
            "100 %",
            f"{scan['cycles']:,}",
            percent(scan["of_bound"]),
            f"{scan['bytes_per_param']:.2f}",
            f"{scan['parameters'] / scan['cycles'] * CLOCK_HZ / 1e6:.1f}",
            f"{scan['bytes_per_s_at_200_mhz'] / 1e9:.2f}",
            f"{scan['bytes_per_s_at_200_mhz'] / drive:.2f}",
        ],
        ["*paper*, updater", *[""] * 5, f"> {updater / 1e9:.2f}", f"> {updater / drive:.2f}"],
        ["SSD read", *[""] * 5, f"{drive / 1e9:.2f}", "1.00"],
    ]
    lines += table(
        ["run", "kept", "cycles", "of bound", "B/parameter", "MP/s", "GB/s", "x SSD read"], rows
    )
    parts = ", ".join(f"{size} for {name}" for name, size in through.items())
    lines += [
        f"Gradients decompressed in DRAM take {sum(through.values())} bytes a parameter of Adam,",
        f"*modelled* ({parts}), before a pair is read or written. Pairs of {kept} of the elements,",
        f"fused into the stream of gradients, take {fused['bytes_per_param']:.2f}, *measured*, the",
        f"check of their indices included; whole gradients take {whole['bytes_per_param']:g}.",
        "",
        "![Bytes a parameter and rate over the share of elements that is kept](smartssd.png)",
        "",
        "The scatter form by itself, chunks full, *measured*; even indices hit every bank",
        "as often as any other. GB/s of pairs at 200 MHz are *modelled*. *Paper* (section VII-H):",
        "the decompressor slightly surpasses the reads of the SSD.",
        "",
    ]
    lines += table(
        ["pairs a beat, indices", "pairs", "cycles", "pairs/cycle", "GB/s", "x SSD read"],
        (
            [
                f"{row['pairs_of_a_beat']}, {row['indices']}",
                f"{row['pairs']:,}",
                f"{row['cycles']:,}",
                f"{row['pairs_per_cycle']:.2f}",
                f"{row['bytes_per_s_at_200_mhz'] / 1e9:.2f}",
                f"{row['bytes_per_s_at_200_mhz'] / drive:.2f}",
            ]
            for row in results["scatter"]
        ),
    )
    return [
        *lines,
        f"`{simulation['url']}`, units in RTL, simulates a step of {simulation['parameters']:,}",
        f"parameters at {mega(simulation['simulated_params_per_s'])}, *measured* (this machine).",
        "",
    ]


def smartssd_shipped(results: Results) -> list[str]:
    """The card as it is shipped beside the one with emulated BARs."""
    rows = results["rows"]
    kinds = list(rows[0]["accesses"])
    lines = section(
        "The SmartSSD card as it is shipped",
        f"A step of Adam on {rows[0]['step']['parameters']:,} parameters, and accesses of a",
        "host. `top=whole` is the Verilog of `.venv/bin/nearstep rtl smartssd_card`, `bus=pcie`",
        "that of `.venv/bin/nearstep rtl smartssd_pcie_card`, with its endpoint, reached with",
        "packets: each is one Verilated object, its 16 units inside. In `sim:smartssd` units",
        "are objects of their own. Without an endpoint BARs are emulated in front of the card.",
        "Bits and cycles of the step are the same in all rows (the bench fails otherwise).",
        "Accesses: the stream of the PCIe block has 16 bytes a cycle, the port of the memory",
        "64. All is *measured*: cycles of RTL, and of this machine the rates on one core.",
    )
    return lines + table(
        ["device", "cycles of the step", *(f"{kind}, cycles" for kind in kinds),
         "simulated parameters/s", "simulated cycles/s"],
        (
            [
                f"`{row['url']}`",
                f"{row['step']['cycles']:,}",
                *(f"{row['accesses'][kind]:,}" for kind in kinds),
                f"{row['step']['simulated_params_per_s']:,.0f}",
                f"{row['step']['simulated_cycles_per_s']:,.0f}",
            ]
            for row in rows
        ),
    )  # fmt: skip


def smartssd_area(results: Results) -> list[str]:
    """Shares of the chip, beside Table III of the paper."""
    area, paper = results["area"], results["paper_share"]
    keys = ("lut", "bram36", "dsp")
    lines = [
        "## Area of the SmartSSD card",
        "",
        "Area of an updater of Adam after `synth_xilinx -family xcup`, parts added up, *measured*",
        "(synthesis only), and its share of a KU15P. LUT include those that are memory. *Paper*:",
        "Table III.",
        "",
    ]
    rows = [
        [
            f"{row['units']} units, {TOP_K[row['top_k']]}",
            *(f"{row[key]:,}" for key in (*keys, "ff")),
            *(percent(row["of_chip"][key]) for key in keys),
            "none",
        ]
        for row in area
    ]
    rows += [
        [f"*paper*, {name}", *[""] * 4, *(percent(share[key]) for key in (*keys, "uram"))]
        for name, share in paper.items()
    ]
    head = ["LUT", "BRAM, 36 Kib", "DSP", "FF", "of LUT", "of BRAM", "of DSP", "of URAM"]
    return lines + table(["what", *head], rows)


LOST = {
    "first_subgroup_comes": "first subgroup comes",
    "nothing_to_write": "nothing to write",
    "slower_than_its_rate": "slower than its rate",
    "last_parameters_go": "last parameters go",
}


def handler(results: Results) -> list[str]:
    """The transfer handler beside its drive's time, arrays of cards, and the baseline."""
    read, write = (results[f"{kind}_bytes_per_s"] / 1e9 for kind in ("read", "write"))
    rows, arrays = results["rows"], results["arrays"]
    lines = section(
        "The transfer handler, and arrays of cards",
        f"A step of AdamW on {rows[0]['elements']:,} elements whose state is on the drive of one",
        f"card, in {rows[0]['elements'] // rows[0]['subgroup_elements']} subgroups; the second of "
        "two. Steps of cards are *measured* (RTL cycles, units",
        f"in C++ of equal latency), with a drive of {read:g} GB/s to read and {write:g} GB/s to "
        "write, both at once",
        f"(assumed), a link of {results['link_bytes_per_s'] / 1e9:.2f} GB/s each way to each card "
        "and an uplink for all (Table II, datasheets;",
        f"*modelled*), at {results['clock_hz'] // 10**6} MHz. *Of the drive* is the step over the "
        "longer of the drive's times for its reads and",
        "for its writes. RAID0 is ZeRO-Infinity's order of work on the same drives and links,",
        "*modelled*; its writes of gradients in the backward pass are not in it, those to cards",
        "are in the others.",
    )
    classes = list(rows[0]["bytes"])
    lines += table(
        ["step", "cycles", "of the drive", *(f"{each.replace('_', ' ')}, MB" for each in classes)],
        (
            [row["name"], f"{row['cycles']:,}", f"{row['of_drive']:.3f}"]
            + [f"{row['bytes'][each] / 1e6:.2f}" for each in classes]
            for row in rows
        ),
    )
    lines += ["Cycles beyond the drive's, by what its writes waited for:", ""]
    lines += table(
        ["step", *LOST.values()],
        (
            [row["name"], *(f"{row['lost'][each]:,.0f}" for each in LOST)]
            for row in rows
            if "lost" in row
        ),
    )
    lines += ["![Five subgroups of a step](smartssd-handler.png)", ""]
    share = arrays[0]["elements"]
    lines += [f"Cards of {share:,} elements each, and as many drives as RAID0:", ""]
    lines += table(
        ["cards", "uplink, GB/s", "cycles", "of one card", "RAID0, cycles", "RAID0 / cards"],
        (
            [
                own["cards"],
                f"{own['uplink_bytes_per_s'] / 1e9:.2f}",
                f"{own['cycles']:,}",
                f"{own['cycles'] / arrays[0]['cycles']:.3f}",
                f"{base['cycles']:,}",
                f"{base['cycles'] / own['cycles']:.2f}",
            ]
            for own, base in zip(arrays[::2], arrays[1::2], strict=True)
        ),
    )
    return lines
