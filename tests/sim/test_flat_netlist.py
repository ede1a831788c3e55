"""Cells of ECP5 as statements do what their models do."""

import random
import re

import pytest

from nearstep_sim.bench.twin import TwinError, run_twins
from nearstep_sim.flat_netlist import FlatNetlistError, flat_text
from nearstep_sim.netlist import cells_of, models

TOP = "cells"
INPUTS = 24
"""Bits of the input, which cells are wired to at random, as to earlier cells."""


def cell(kind, values, pins, number):
    listed = ",\n".join(f"    .{name}({value})" for name, value in values.items())
    wired = ",\n".join(f"    .{name}({bit})" for name, bit in pins.items())
    given = f"#(\n{listed}\n  ) " if values else ""
    return f"  {kind} {given}\\a.{kind}${number}  (\n{wired}\n  );\n"


def random_netlist(seed, *, rounds=40):
    """Every plain cell with random parameters and wires, as Yosys writes it; and its ports."""
    rng = random.Random(seed)
    bits = [f"i_x[{index}]" for index in range(INPUTS)] + ["1'h0", "1'h1"]
    body, made = "", 0

    def out():
        nonlocal made
        made += 1
        return f"\\o.w [{made - 1}]"

    def table():
        return f"16'h{rng.randrange(1 << 16):04x}"

    def pick():
        return rng.choice(bits)

    for number in range(rounds):
        new = []
        z = out()
        body += cell("LUT4", {"INIT": table()}, {n: pick() for n in "ABCD"} | {"Z": z}, number)
        new.append(z)
        carry = pick()
        for link in range(3):
            values = {"INIT0": table(), "INIT1": table()}
            values |= {f"INJECT1_{half}": f'"{rng.choice(("YES", "NO"))}"' for half in "01"}
            pins = {f"{n}{half}": pick() for n in "ABCD" for half in "01"} | {"CIN": carry}
            carry, *sums = out(), out(), out()
            pins |= {"COUT": carry, "S0": sums[0]} | ({"S1": sums[1]} if link != 1 else {})
            body += cell("CCU2C", values, pins, f"{number}_{link}")
            new += [carry, sums[0], *(sums[1:] if link != 1 else [])]
        z = out()
        body += cell("PFUMX", {}, {n: pick() for n in ("ALUT", "BLUT", "C0")} | {"Z": z}, number)
        new.append(z)
        z = out()
        body += cell("L6MUX21", {}, {n: pick() for n in ("D0", "D1", "SD")} | {"Z": z}, number)
        new.append(z)
        for kind in ("1", "CE", "INV"):
            q = out()
            values = {"CEMUX": f'"{kind}"', "CLKMUX": '"CLK"', "GSR": '"DISABLED"'}
            values |= {"LSRMUX": '"LSR"', "REGSET": f'"{rng.choice(("SET", "RESET"))}"'}
            reset = rng.choice(["1'h0", "rst", bits[0]])
            if reset != "1'h0":
                values["SRMODE"] = '"LSR_OVER_CE"'
            pins = {"CE": pick()} if kind != "1" else {}
            pins |= {"CLK": "clk", "DI": rng.choice(new), "LSR": reset, "Q": q}
            body += cell("TRELLIS_FF", values, pins, f"{number}_{kind}")
            new.append(q)
        name = f"n{number}"
        high = len(new) - 1
        body += f"  wire [{high + 3}:3] {name};\n  assign {name} = {{ {', '.join(new)} }};\n"
        bits += [f"{name}[{index + 3}]" for index in range(len(new))]
    seen = [bit for bit in bits if bit.startswith("n")]
    text = (
        f"/* Yosys */\n\nmodule {TOP}(clk, rst, i_x, o_y);\n"
        "  input clk;\n  wire clk;\n  input rst;\n  wire rst;\n"
        f"  input [{INPUTS - 1}:0] i_x;\n  wire [{INPUTS - 1}:0] i_x;\n"
        f"  output [{len(seen) - 1}:0] o_y;\n  wire [{len(seen) - 1}:0] o_y;\n"
        f"  wire [{made - 1}:0] \\o.w ;\n{body}"
        f"  assign o_y = {{ {', '.join(seen)} }};\nendmodule\n"
    )
    ports = [("clk", "input", 1), ("rst", "input", 1), ("i_x", "input", INPUTS)]
    ports.append(("o_y", "output", len(seen)))
    return text + "\n" + models(TOP, cells_of(text)), ports


def compare(folder, text, changed, ports):
    paths = []
    for name, each in (("models", text), ("statements", changed)):
        paths.append(folder / f"{name}.v")
        paths[-1].write_text(each)
    return run_twins(TOP, *paths, ports, cycles=5_000, seed=1, cxxflags=("-O0",))


@pytest.mark.deep
def test_statements_do_what_the_models_of_their_cells_do(tmp_path):
    text, ports = random_netlist(1)
    changed = flat_text(text, TOP)
    inside = re.search(r"^module cells_netlist\(.*?^endmodule", changed, re.M | re.S)[0]
    assert cells_of(text) == {"CCU2C": 120, "L6MUX21": 40, "LUT4": 40, "PFUMX": 40} | {
        "TRELLIS_FF": 120
    }
    assert cells_of(inside) == {}
    run = compare(tmp_path, text, changed, ports)
    assert run.compared == 2 * 5_000
    assert run.changed == 1


@pytest.mark.deep
def test_a_wrong_statement_is_found(tmp_path):
    text, ports = random_netlist(2, rounds=4)
    wrong, count = re.subn(r"(<=) 1'b0;", r"\1 1'b1;", flat_text(text, TOP), count=1)
    assert count == 1
    with pytest.raises(TwinError):
        compare(tmp_path, text, wrong, ports)


def test_a_cell_that_is_not_plain_keeps_its_model():
    text, _ = random_netlist(3, rounds=1)
    other = text.replace('.CLKMUX("CLK")', '.CLKMUX("INV")', 1)
    assert "TRELLIS_FF #(" not in flat_text(text, TOP)
    assert flat_text(other, TOP).count("TRELLIS_FF #(") == 1


def test_text_that_is_not_a_netlist_is_refused():
    text, _ = random_netlist(3, rounds=1)
    with pytest.raises(FlatNetlistError, match=r"at \d+, got 'always"):
        flat_text(text.replace("  assign", "  always @* n0 = 0;\n  assign", 1), TOP)
    with pytest.raises(FlatNetlistError, match="at 0, got"):
        flat_text(text, "other")
