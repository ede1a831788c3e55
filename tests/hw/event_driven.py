"""Generated Verilog in an event-driven simulator with unknown values: Icarus Verilog."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

STANDARDS = ("2005", "2012")
"""Verilog and SystemVerilog. Initial values are assigned among the other events of time 0 in the
one, and before all of them in the other."""

BLOCK = re.compile(r"^  always @\*(?: begin\n(.*?)^  end$|\n(.*?;)$)", re.M | re.S)
TARGET = re.compile(r"^\s*(?:\\\S+ |\w+)(?:\[[\d:]+\])?\s*<?=|^\s*\{[^}]*\}\s*<?=", re.M)
LITERAL = re.compile(r"\d+'s?[bodh][0-9a-fxz_?]+", re.I)
KEYWORD = re.compile(r"\b(?:begin|end|if|else|case[xz]?|endcase|default)\b|\(\*.*?\*\)")


def needs_icarus() -> None:
    if shutil.which("iverilog") is None:
        pytest.skip("Icarus Verilog is not installed (Debian: iverilog)")


def combinational_blocks(text: str) -> list[str]:
    """The body of each `always @*`."""
    return [many or one for many, one in BLOCK.findall(text)]


def blind(body: str) -> bool:
    """Whether a block reads nothing: it would wait for ever."""
    read = KEYWORD.sub("", LITERAL.sub("", TARGET.sub("", body)))
    return re.search(r"[A-Za-z_\\]", read) is None


def simulate(sources: Iterable[Path], top: str, folder: Path, standard: str) -> str:
    """What a test bench prints."""
    needs_icarus()
    program = folder / f"{top}-{standard}.vvp"
    command = ["iverilog", f"-g{standard}", "-Wall", "-s", top, "-o", program, *sources]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "never trigger" not in built.stderr, built.stderr
    done = subprocess.run(["vvp", "-n", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def output_bench(top: str, ports: Iterable[tuple[str, str, int]], cycles: int) -> str:
    """A module `bench` that prints the outputs with unknown bits, and how many values it looked at.

    Inputs are 0 in the first half of the cycles, then change at random in each. `rst` is 1 for
    three cycles; outputs are looked at from the first edge in reset on. Data (`qualifier`)
    may be unknown while its valid is 0: memories have no initial value at their output.
    """
    ports = list(ports)
    names = {name for name, direction, _ in ports if direction == "output"}
    lines = ["`timescale 1ns/1ps", "module bench;", "integer cycle, seed, looked, unknown;"]
    rest, change, look = [], [], []
    for name, direction, width in ports:
        kind = "reg" if direction == "input" else "wire"
        lines.append(f"{kind} [{width - 1}:0] {name};")
        if direction == "input":
            rest.append(f"{name} = 0;")
            if name not in ("clk", "rst"):
                words = ", ".join(["$random(seed)"] * -(-width // 32))
                change.append(f"{name} = {{{words}}};")
            continue
        valid = qualifier(name, names)
        condition = f"({' | '.join(f'(|{each})' for each in valid)}) !== 0" if valid else "1"
        look.append(
            f"if ({condition}) begin looked = looked + 1; if (^{name} === 1'bx) begin "
            f'unknown = unknown + 1; $display("unknown %0d {name} %h", cycle, {name}); end end'
        )
    connections = ", ".join(f".{name}({name})" for name, _, _ in ports)
    lines += [
        f"{top} dut ({connections});",
        "initial begin",
        "seed = 1; looked = 0; unknown = 0;",
        *rest,
        "rst = 1;",
        f"for (cycle = 0; cycle < {cycles}; cycle = cycle + 1) begin",
        "#1 clk = 1; #1 clk = 0; rst = cycle < 3;",
        f"if (2 * cycle >= {cycles}) begin",
        *change,
        "end",
        "#1;",
        *look,
        "end",
        '$display("looked %0d unknown %0d", looked, unknown);',
        "$finish;",
        "end",
        "endmodule",
    ]
    return "\n".join(lines) + "\n"


def qualifier(name: str, outputs: set[str]) -> tuple[str, ...]:
    """The outputs that say when the data output `name` holds; none if it always must.

    Payload of a stream; a channel of AXI; results of a unit; address of a register access; write
    data to a DRAM.
    """
    prefix, _, member = name.rpartition("__")
    channel = re.match(r"aw|ar|w|r|b|t", member)
    candidates = [
        (f"{prefix}__valid",) if member == "payload" else (),
        (f"{prefix}__{channel[0]}valid",) if channel and not member.endswith("valid") else (),
        ("o_valid",) if name.startswith("o_") and name != "o_valid" else (),
        (f"{prefix}__read", f"{prefix}__write") if member == "address" else (),
        (f"{prefix}__wrdata_en",) if member in ("wrdata", "wrdata_mask") else (),
    ]
    return next((each for each in candidates if each and set(each) <= outputs), ())
