"""FuseSoC core files (CAPI2)."""

import json

from nearstep_hw.rtl_tree.constraints import PARTS

__all__ = ["VENDOR", "core_file", "core_name"]

VENDOR = "nearstep:rtl"


def core_name(top: str, version: str) -> str:
    """Return vendor, library, name and version of a core in FuseSoC's syntax."""
    return f"{VENDOR}:{top}:{version}"


def core_file(top: str, summary: str, version: str) -> str:
    """Return the core file of a top, to be written beside the folders of its files.

    Targets: `default`, used by dependent cores, and `lint` run Verilator with the waivers; `synth`
    runs Yosys for UltraScale+; `synth_<part>` runs Vivado's synthesis with the constraint stub.
    """
    lines = [
        "CAPI=2:",
        f"name: {core_name(top, version)}",
        f"description: {json.dumps(summary)}",
        "",
        "filesets:",
        *_fileset("rtl", f"rtl/{top}.v", "verilogSource-2005"),
        *_fileset("lint", "lint/verilator.vlt", "vlt"),
    ]
    for part in PARTS:
        lines += _fileset(part.name, f"constraints/{top}_{part.name}.xdc", "xdc")
    lines += ["", "targets:"]
    for name in ("default", "lint"):
        lines += _target(name, top, "rtl", "lint")
        lines += _flow("lint", tool="verilator", verilator_options=["-Wall"])
    lines += _target("synth", top, "rtl")
    lines += _flow(
        "generic",
        tool="yosys",
        arch="xilinx",
        output_format="json",
        yosys_synth_options=["-family", "xcup", "-flatten"],
    )
    for part in PARTS:
        lines += _target(f"synth_{part.name}", top, "rtl", part.name)
        lines += _flow("vivado", part=part.part, pnr="none")
    return "\n".join(lines) + "\n"


def _fileset(name: str, file: str, kind: str) -> list[str]:
    return [f"  {name}:", f"    files: [{file}]", f"    file_type: {kind}"]


def _target(name: str, top: str, *filesets: str) -> list[str]:
    return [f"  {name}:", f"    filesets: [{', '.join(filesets)}]", f"    toplevel: {top}"]


def _flow(name: str, **options: str | list[str]) -> list[str]:
    lines = [f"    flow: {name}", "    flow_options:"]
    return lines + [f"      {key}: {json.dumps(value)}" for key, value in options.items()]
