# amaranth: UnusedElaboratable=no
"""Area of a SmartSSD card's updater with and without Top-K: `synth_xilinx -family xcup`."""

from harness import Results, report, script, track
from measuring import area

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.pairs.load import PairLoad
from nearstep_hw.updater.update_kernel import UpdateKernel
from nearstep_sim.area_table import CHIPS
from nearstep_sim.synthesis import AREA
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import update_rule

CHIP = {**CHIPS["KU15P"], "bram36": CHIPS["KU15P"]["bram"] // 36}
"""KU15P (DS922); Table III rounds the LUTs to 522 K."""

SHARES = ("lut", "bram36", "dsp", "uram")
PAPER_SHARE = {
    "updater": {"lut": 0.3366, "bram36": 0.2713, "uram": 0.3438, "dsp": 0.1103},
    "with Top-K": {"lut": 0.3412, "bram36": 0.2713, "uram": 0.3594, "dsp": 0.1103},
}
"""Ref: Smart-Infinity, Table III."""

TOP_K = {None: "whole gradients", "fused": "with fused Top-K", "scatter": "with scatter Top-K"}


@script
def main() -> None:
    """Count cells (takes some minutes), and write build/bench/smartssd_area.json."""
    plain = UpdateKernelConfig(windows=8)
    parts = {
        "shell": lambda: UpdateKernel(plain, unit=None),
        "unit": lambda: FunctionalUnit(update_rule(plain)),
        **{
            form: lambda form=form: PairLoad(UpdateKernelConfig(windows=8, compression=(form,)))
            for form in ("fused", "scatter")}}  # fmt: skip
    cells = {name: area(make()) for name, make in track(parts.items(), "area")}
    rows: list[Results] = []
    for units in (16, 4):
        for form in TOP_K:
            counts = {"shell": 1, "unit": units, **({form: 1} if form else {})}
            sums = {key: sum(n * cells[name][key] for name, n in counts.items()) for key in AREA}
            sums["lut"] += sums["lut_memory"]
            of_chip = {key: sums[key] / CHIP[key] for key in SHARES[:3]}
            rows.append(
                {
                    "what": f"{units} units, {TOP_K[form]}", "units": units, "top_k": form, **sums,
                    "of_chip": of_chip})  # fmt: skip
    report(
        "smartssd_area",
        lambda results: {
            "papers": [
                [f"*paper*, {name}", *[""] * 4, *(f"{100 * share[key]:.2f} %" for key in SHARES)]
                for name, share in results["paper_share"].items()
            ]
        },
        paper_share=PAPER_SHARE, area=rows)  # fmt: skip
