"""Sections on the functional unit: area, latency, speed of simulation, accuracy."""

from __future__ import annotations

from page_table import Results, mega, section, table


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
    lines = section(
        "Accuracy",
        f"{results['parameters']:,} parameters, {results['steps']} steps, *measured* against the",
        "same steps in float64. Errors in ulp; values near zero dominate the mean. ATen "
        f"capability {results['aten_capability']}.",
    )
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
