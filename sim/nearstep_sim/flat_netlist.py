"""A netlist of ECP5 cells as assignments and clocked blocks, which Verilator builds in minutes.

Verilator's time is spent on instances, with a copy of a module for each table of a LUT, and on
signals of the top that a bench accesses. Here LUTs, their multiplexers, carries and registers are
statements, and each bit is a signal with a short name, in one module below the top, of which only
the ports are public. Names of one bit are merged, and nothing else. Other cells keep their models.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nearstep_sim.netlist import ecp5_netlist
from nearstep_sim.verilate.build import cache_dir, once
from nearstep_spec.errors import NearstepError

__all__ = ["FlatNetlistError", "flat_ecp5_netlist", "flat_text"]

NAME = r"(?:\\\S+ |[A-Za-z_$][\w$]*)"
MODULE = re.compile(rf"^module ({NAME})\((.*?)\);\n(.*?)^endmodule\n", re.M | re.S)
ITEM = re.compile(
    r"  (?P<way>input|output|wire) (?:signed )?(?:\[(?P<high>\d+):(?P<low>\d+)\] )?"
    rf"(?P<name>{NAME});\n"
    rf"|  assign (?P<left>.*?) = (?P<right>.*?);\n"
    rf"|  (?P<cell>[A-Z]\w*) (?:#\((?P<values>.*?)\n  \) )?{NAME} \((?P<pins>.*?)\n  \);\n"
    r"|\s+",
    re.S,
)
PIN = re.compile(r"^    \.(\w+)\((.*?)\),?$", re.M)
TOKEN = re.compile(
    rf"\s*(?:(?P<count>\d+)'(?P<base>[hb])(?P<digits>[0-9a-fxz]+)"
    rf"|(?P<name>{NAME})\s*(?:\[(?P<high>\d+)(?::(?P<low>\d+))?\])?|(?P<mark>[{{}},]))"
)
DIGIT_BITS = {"h": 4, "b": 1}
CONSTANTS = {each: f"1'b{each}" for each in "01xz"}


class FlatNetlistError(NearstepError, ValueError):
    """Text that is not a netlist as Yosys writes it, with its position."""

    def __init__(self, place: int, text: str) -> None:
        self.place = place
        self.text = text
        super().__init__(f"Expected a declaration, assignment or cell at {place}, got {text!r}")


@dataclass
class Bits:
    """Bits of a module by their names in the netlist, each with a short name.

    Attributes
    ----------
    vectors : bits of each name, the lowest first, and the index of the lowest.
    same : bits that assignments make equal to another one.
    """

    vectors: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def declare(self, name: str, low: int, high: int, port: bool) -> None:
        """Declare the bits of a new signal; bits of a port keep its name."""
        if name in self.vectors:
            return
        width = high - low + 1
        if port:
            bits = [f"{name}[{low + index}]" for index in range(width)] if width > 1 else [name]
        else:
            bits = [f"n{self.count + index}" for index in range(width)]
            self.count += width
        self.vectors[name] = (low, bits)

    def of(self, text: str) -> list[str]:
        """Bits of an expression, the lowest first, before assignments are followed."""
        parts: list[list[str]] = []
        place = 0
        while place < len(text):
            match = TOKEN.match(text, place)
            if match is None:
                raise FlatNetlistError(place, text[place : place + 40])
            place = match.end()
            if match["digits"] is not None:
                parts.append(_constant(int(match["count"]), match["base"], match["digits"]))
            elif match["name"] is not None:
                low, bits = self.vectors[match["name"].strip()]
                if match["high"] is not None:
                    first = int(match["low"] or match["high"]) - low
                    bits = bits[first : int(match["high"]) - low + 1]
                parts.append(bits)
        return [bit for part in reversed(parts) for bit in part]

    def follow(self, bit: str) -> str:
        """The bit that drives a bit."""
        while bit in self.same:
            bit = self.same[bit]
        return bit


def _constant(count: int, base: str, digits: str) -> list[str]:
    """Bits of a constant, the lowest first."""
    wide = ""
    for digit in digits:
        plain = digit not in "xz"
        width = DIGIT_BITS[base]
        wide += f"{int(digit, 16):0{width}b}" if plain else digit * width
    fill = wide[0] if wide[0] in "xz" else "0"
    return [CONSTANTS[each] for each in reversed(wide.rjust(count, fill)[-count:])]


@dataclass(frozen=True)
class Cell:
    """A cell: its type, its parameters as text, and its pins as bits, the lowest first."""

    kind: str
    values: Mapping[str, str]
    pins: Mapping[str, Sequence[str]]

    def bit(self, pin: str) -> str:
        (bit,) = self.pins[pin]
        return bit


def _lut(table: str, cell: Cell, suffix: str = "") -> str:
    """Return the output of a LUT: the bit of its table selected by its inputs."""
    inputs = ", ".join(cell.bit(name + suffix) for name in "DCBA")
    return f"1'({table} >> {{{inputs}}})"


def _lut4(cell: Cell) -> Iterator[tuple[str, str]]:
    yield cell.bit("Z"), _lut(cell.values["INIT"], cell)


def _pfumx(cell: Cell) -> Iterator[tuple[str, str]]:
    yield cell.bit("Z"), f"{cell.bit('C0')} ? {cell.bit('ALUT')} : {cell.bit('BLUT')}"


def _l6mux21(cell: Cell) -> Iterator[tuple[str, str]]:
    yield cell.bit("Z"), f"{cell.bit('SD')} ? {cell.bit('D1')} : {cell.bit('D0')}"


def _ccu2c(cell: Cell) -> Iterator[tuple[str, str]]:
    """Two bits of a carry chain.

    With INJECT1 a bit takes no carry in; where its LUT gives 0, the carry out is the part of the
    table that A and B select, or 0 with INJECT1.
    """
    carry = cell.bit("CIN")
    for half, out in (("0", f"{cell.bit('COUT')}_half"), ("1", cell.bit("COUT"))):
        table = cell.values[f"INIT{half}"]
        injected = cell.values[f"INJECT1_{half}"] == '"YES"'
        sum_, generate = f"{cell.bit('COUT')}_sum{half}", "1'b0"
        if not injected:
            low = f"4'h{table[-1]}"
            generate = f"1'({low} >> {{{cell.bit('B' + half)}, {cell.bit('A' + half)}}})"
        yield sum_, _lut(table, cell, half)
        if f"S{half}" in cell.pins:
            yield cell.bit(f"S{half}"), sum_ if injected else f"{sum_} ^ {carry}"
        yield out, f"{sum_} ? {carry} : {generate}"
        carry = out


STATEMENTS = {"LUT4": _lut4, "PFUMX": _pfumx, "L6MUX21": _l6mux21, "CCU2C": _ccu2c}
PLAIN = {
    "LUT4": {"INIT": r"16'h[0-9a-f]{4}"},
    "PFUMX": {},
    "L6MUX21": {},
    "CCU2C": {
        "INIT0": r"16'h[0-9a-f]{4}",
        "INIT1": r"16'h[0-9a-f]{4}",
        "INJECT1_0": r'"(YES|NO)"',
        "INJECT1_1": r'"(YES|NO)"',
    },
    "TRELLIS_FF": {
        "CEMUX": r'"(1|CE|INV)"',
        "CLKMUX": r'"CLK"',
        "GSR": r'"\w+"',
        "LSRMUX": r'"LSR"',
        "REGSET": r'"(SET|RESET)"',
        "SRMODE": r'"LSR_OVER_CE"',
    },
}
"""Cells that become statements, and the values that each of their parameters may have there."""
PINS = {
    "LUT4": {"A", "B", "C", "D", "Z"},
    "PFUMX": {"ALUT", "BLUT", "C0", "Z"},
    "L6MUX21": {"D0", "D1", "SD", "Z"},
    "CCU2C": {f"{name}{half}" for name in "ABCD" for half in "01"} | {"CIN", "COUT"},
    "TRELLIS_FF": {"CLK", "LSR", "DI", "Q"},
}
"""Required pins of these cells."""


def _is_plain(cell: Cell) -> bool:
    allowed = PLAIN.get(cell.kind)
    return (
        allowed is not None
        and allowed.keys() >= cell.values.keys()
        and allowed.keys() - cell.values.keys() <= {"SRMODE"}  # by default as here
        and all(re.fullmatch(allowed[name], value) for name, value in cell.values.items())
        and cell.pins.keys() >= PINS[cell.kind]
        and (cell.values.get("CEMUX", '"1"') == '"1"' or "CE" in cell.pins)
    )


def _registers(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a clocked block for all registers of one clock, reset and enable."""
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        enable = {"1": "", "CE": "{}", "INV": "!{}"}[cell.values["CEMUX"].strip('"')]
        if enable:
            enable = enable.format(cell.bit("CE"))
        groups.setdefault((cell.bit("CLK"), cell.bit("LSR"), enable), []).append(cell)
    for (clock, reset, enable), group in groups.items():
        sets = [f"      {c.bit('Q')} <= 1'b{int(c.values['REGSET'] == _SET)};\n" for c in group]
        takes = [f"      {c.bit('Q')} <= {c.bit('DI')};\n" for c in group]
        if reset == "1'b0":
            condition = f"    if ({enable or 1}) begin\n"
            yield f"  always @(posedge {clock})\n{condition}{''.join(takes)}    end\n"
        else:
            condition = f"if ({enable}) " if enable else ""
            yield (
                f"  always @(posedge {clock})\n    if ({reset}) begin\n{''.join(sets)}"
                f"    end else {condition}begin\n{''.join(takes)}    end\n"
            )


_SET = '"SET"'


def flat_text(netlist: str, top: str) -> str:
    """Convert the plain cells in a netlist of `top` by Yosys, followed by the models of its cells,
    to statements.

    Raises
    ------
    FlatNetlistError
    """
    module = MODULE.search(netlist)
    if module is None or module[1].strip() != top:
        raise FlatNetlistError(0, netlist[:40])
    bits, ports, cells, body = Bits(), {}, [], module[3]
    place, joined = 0, []
    while place < len(body):
        match = ITEM.match(body, place)
        if match is None:
            raise FlatNetlistError(module.start(3) + place, body[place : place + 40])
        place = match.end()
        if match["way"]:
            name = match["name"].strip()
            high, low = int(match["high"] or 0), int(match["low"] or 0)
            if match["way"] != "wire":
                ports[name] = (match["way"], high, low)
            bits.declare(name, low, high, port=name in ports)
        elif match["left"]:
            joined.append((match["left"], match["right"]))
        elif match["cell"]:
            cells.append((match["cell"], match["values"] or "", match["pins"]))
    outputs = _join(bits, ports, joined)
    read = [
        Cell(
            kind,
            dict(PIN.findall(values)),
            {pin: [bits.follow(b) for b in bits.of(text)] for pin, text in PIN.findall(pins)},
        )
        for kind, values, pins in cells
    ]
    inner = f"{top}_netlist"
    listed = ", ".join(ports)
    declared = "".join(
        f"  {way} {f'[{high}:{low}] ' if high or low else ''}{name};\n"
        for name, (way, high, low) in ports.items()
    )
    joins = ", ".join(f".{name}({name})" for name in ports)
    return (
        f"module {top}({listed});\n{declared}  {inner} cells ({joins});\nendmodule\n\n"
        f"module {inner}({listed});\n{declared}{_body(read, outputs)}endmodule\n"
        f"{netlist[module.end() :]}"
    )


def _join(
    bits: Bits, ports: Mapping[str, tuple[str, int, int]], joined: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Follow assignments, and return the driver of each bit of the outputs."""
    inside: dict[str, str] = {}
    for name, (way, _, _) in ports.items():
        if way == "output":
            low, outer = bits.vectors[name]
            own = [f"n{bits.count + index}" for index in range(len(outer))]
            bits.count += len(outer)
            inside |= dict(zip(outer, own, strict=True))
            bits.vectors[name] = (low, own)
    for left, right in joined:
        for to, source in zip(bits.of(left), bits.of(right), strict=True):
            bits.same[to] = source
    return [(outer, bits.follow(own)) for outer, own in inside.items()]


def _body(cells: Sequence[Cell], outputs: Sequence[tuple[str, str]]) -> str:
    """Return declarations and statements of a module without its ports."""
    lines: list[str] = []
    plain = [cell for cell in cells if _is_plain(cell)]
    held = [cell for cell in plain if cell.kind == "TRELLIS_FF"]
    initial = {cell.bit("Q"): int(cell.values["REGSET"] == _SET) for cell in held}
    named = {b for cell in cells for pin in cell.pins.values() for b in pin}
    named |= {bit for _, bit in outputs}
    wires = sorted(b for b in named - initial.keys() if re.fullmatch(r"n\d+", b))
    lines += [f"  wire {bit};\n" for bit in wires]
    lines += [f"  reg {bit} = 1'b{value};\n" for bit, value in initial.items()]
    for cell in plain:
        if cell.kind in STATEMENTS:
            for to, value in STATEMENTS[cell.kind](cell):
                word = "assign" if to in named else "wire"
                lines.append(f"  {word} {to} = {value};\n")
    lines += _registers(held)
    for number, cell in enumerate(cell for cell in cells if not _is_plain(cell)):
        values = ", ".join(f".{name}({value})" for name, value in cell.values.items())
        pins = ", ".join(
            f".{name}({{{', '.join(reversed(pin))}}})" for name, pin in cell.pins.items() if pin
        )
        lines.append(f"  {cell.kind} #({values}) cell{number} ({pins});\n")
    lines += [f"  assign {to} = {bit};\n" for to, bit in outputs]
    return "".join(lines)


def flat_ecp5_netlist(verilog: Path, top: str) -> Path:
    """As `nearstep_sim.netlist.ecp5_netlist`, with plain cells as statements.

    Raises
    ------
    BuildError : of Yosys.
    NetlistError
    FlatNetlistError
    """
    text = flat_text(ecp5_netlist(verilog, top).read_text(encoding="utf-8"), top)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]

    def build(folder: Path) -> Path:
        path = folder / "top.v"
        path.write_text(text, encoding="utf-8")
        return path

    return once(cache_dir() / "rtl" / f"{top[:40]}_flat-{digest}.v", build)
