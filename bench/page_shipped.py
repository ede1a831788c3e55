"""Sections of the page on tops as they are shipped: how fast they are simulated, their area."""

from __future__ import annotations

from page_table import Results, percent, section, table


def shipped(results: Results) -> list[str]:
    """Whole tops beside the parts that stand for them."""
    lines = section(
        "Tops as they are shipped",
        "Each is the Verilog of `.venv/bin/nearstep rtl` as one Verilated object, with its units;",
        "*parts* is the device that stands for it, an object of each channel, memory device and",
        "unit, joined in C++. A step of Adam on every channel, changes of mode included, or an",
        "average of a tensor over four devices in both rings. Bits and cycles are the same (the",
        "bench fails otherwise). *Measured* on one core of this machine, the fastest of some runs.",
        "The cards are in a section of their own.",
    )
    return lines + table(
        ["top", "elements", "cycles", "parts, cycles/s", "whole, cycles/s", "whole, elements/s",
         "whole over parts"],
        (
            [
                f"`{row['top']}`",
                f"{row['elements']:,}",
                f"{row['cycles']:,}",
                *(f"{rate:,.0f}" for rate in row["cycles_per_s"]),
                f"{row['elements_per_s'][1]:,.0f}",
                f"{row['whole_over_parts']:.2f}",
            ]
            for row in results["rows"]
        ),
    )  # fmt: skip


SHARES = ("lut", "ff", "dsp", "bram")


def whole_area(results: Results) -> list[str]:
    """Whole tops on both families, and papers' shares."""
    lines = section(
        "Area of whole tops",
        "Tops as `.venv/bin/nearstep rtl` writes them, with all that is in them, each in **one**",
        "synthesis, module by module (`synth_xilinx -family xcup`, `synth_ecp5 -noflatten`):",
        "*measured*, no place and route. No registers are packed into DSP48E2, so FF read high.",
        "LUT have six inputs on UltraScale+ and four on ECP5, and count LUT as memory;",
        "multipliers are DSP48E2 and MULT18X18D; block RAM is in Kib. Shares are of a KU15P and",
        "of an LFE5U-85F: what is above 100 % does not fit. Seconds are those of a processor.",
        "*Paper*: Table III of Smart-Infinity, shares alone.",
    )
    head = ["top", "FPGA", "LUT", "FF", "multipliers", "block RAM", "of LUT", "of FF",
            "of multipliers", "of block RAM", "synthesis, s"]  # fmt: skip
    rows = [
        [
            name(row),
            row["family"],
            *(f"{row[key]:,.0f}" for key in ("lut", "ff", "dsp")),
            f"{36 * row['bram36'] if 'bram36' in row else 18 * row['bram18']:,.0f}",
            *shares(row),
            f"{row['cpu_s']:,}" if "cpu_s" in row else "",
        ]
        for row in results["tops"]
    ]
    rows += [
        [f"*paper*, {row['name']}", row["chip"], *[""] * 4, *shares(row), ""]
        for row in results["papers"]
    ]
    return lines + table(head, rows)


def name(row: Results) -> str:
    """A top with its options."""
    options = ", ".join(
        f"{key} {', '.join(value) if isinstance(value, list | tuple) else value}"
        for key, value in row["options"].items()
    )
    return f"`{row['top']}`" + (f", {options}" if options else "")


def shares(row: Results) -> list[str]:
    """Of the chip, as far as they are known."""
    return [percent(row["of_chip"][key]) if key in row["of_chip"] else "" for key in SHARES]
