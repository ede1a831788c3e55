"""Waivers of Verilator's `-Wall` for Verilog written by Yosys."""

from types import MappingProxyType

__all__ = ["WAIVERS", "waiver_file"]

WAIVERS = MappingProxyType(
    {
        "ASCRANGE": "A signal of no bits, of a configuration without that part, is [-1:0].",
        "CASEINCOMPLETE": "What a case leaves out has its value from an assignment before it.",
        "CMPCONST": "A limit that a configuration puts at the end of a range is always met.",
        "DECLFILENAME": "One file holds the top and all modules below it.",
        "PROCASSINIT": "Registers have their power-up value where they are declared, as an FPGA "
        "loads it, and are assigned at the clock.",
        "UNUSEDSIGNAL": "Every intermediate result has a name and all its bits, used or not.",
        "VARHIDDEN": "An instance may have the name of a port of its module.",
        "WIDTHEXPAND": "Operands keep the widths of the source; Verilog extends them as it does.",
        "WIDTHTRUNC": "A sum has a bit more than what takes it; a vector may stand as a condition.",
    }
)
"""Rules waived in every file, with reasons. Other rules must report nothing."""


def waiver_file() -> str:
    """Return the waivers as a configuration file of Verilator."""
    lines = ["`verilator_config"]
    for rule, reason in WAIVERS.items():
        lines += [f"// {reason}", f"lint_off -rule {rule}"]
    return "\n".join(lines) + "\n"
