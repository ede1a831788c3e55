"""What the text of Yosys tells about the points of coverage: constants, second names, states, and
the places in the Python sources."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from nearstep_sim.verilate.build import COVERAGE_OFF, COVERAGE_ON

__all__ = ["WIDEST", "Module", "Transition", "modules_of"]

WIDEST = 256
"""Bits of a signal, and words of a memory, beyond which Verilator counts no toggles."""

NAME = r"(?:\\\S+ |[A-Za-z_]\w*)"
SRC = re.compile(r'src = "([^"]*)"')
ATTRIBUTE = re.compile(r"\(\*.*?\*\) ?")
MODULE = re.compile(rf"^module ({NAME})")
DECLARED = re.compile(
    rf"^  (input|output|wire|reg) (?:signed )?(?:\[(\d+):0\] )?({NAME})( ?\[\d+:\d+\])?(?: = .*)?;$"
)
ASSIGN = re.compile(r"^  assign (.+?)  ?= (.+);$")
INSTANCE = re.compile(rf"^  ({NAME}) {NAME} \($")
PORT = re.compile(rf"^    \.({NAME})\((.*)\),?$")
NEXT = re.compile(rf"^    ({NAME})(?: |$)<= ({NAME})\s*;$")
CASEZ = re.compile(r"^( *)casez \((.+)\)$")
LABEL = re.compile(r"^( *)([^ ].*):$")
SET = re.compile(rf"^( *)({NAME}) +=+ (.+);$")
CONDITION = re.compile(r"(?:else )?if \((.+)\) begin")
UNNAMED = re.compile(r"\$\d+")
STATE = re.compile(r"state(?:\$\d+)?$")

Bit = tuple[str, int] | str | None
"""A bit of a signal, a constant 0 or 1, or something else."""


def _plain(name: str) -> str:
    return name.strip().removeprefix("\\")


@dataclass(frozen=True)
class Transition:
    """A line that gives a state machine its next state."""

    register: str
    before: str
    after: str
    line: int


@dataclass
class Module:
    """A module of a file.

    Attributes
    ----------
    name, source : `source` is file and line of its `elaborate`.
    first : number of its first line.
    text : its lines.
    widths, sources : of signals.
    inputs : of its ports.
    ties : constant bits of inputs of each instance of it, as its parents drive them.
    uncounted : signals without toggles: `unnamed` bits of results of operators, `too_wide` bits.
    """

    name: str
    source: str
    first: int
    text: list[str] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)
    assigned: dict[str, str] = field(default_factory=dict)
    _bits: list[tuple[Bit, Bit]] = field(default_factory=list)
    instances: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    ties: list[set[tuple[str, int]]] = field(default_factory=list)
    uncounted: set[str] = field(default_factory=set)
    unnamed: int = 0
    too_wide: int = 0

    def line(self, number: int) -> str:
        """A line of the file, without attributes."""
        return ATTRIBUTE.sub("", self.text[number - self.first])

    def bits(self, text: str) -> list[Bit]:
        """Bits of a value, the lowest first; of an expression a single None."""
        text = ATTRIBUTE.sub("", text).strip()
        if text.startswith("{") and text.endswith("}"):
            parts = _split(text[1:-1])
            return [bit for part in reversed(parts) for bit in self.bits(part)]
        if match := re.fullmatch(r"(\d+)'(?:s)?([hbd])([0-9a-fA-F]+)", text):
            value = int(match[3], {"h": 16, "b": 2, "d": 10}[match[2]])
            return [str(value >> bit & 1) for bit in range(int(match[1]))]
        match = re.fullmatch(r"(\\\S+|[A-Za-z_]\w*)(?:\s*\[(\d+)(?::(\d+))?\])?", text)
        if match is None or (name := _plain(match[1])) not in self.widths:
            return [None]
        high = int(match[2]) if match[2] else self.widths[name] - 1
        low = int(match[3]) if match[3] else (high if match[2] else 0)
        return [(name, bit) for bit in range(low, high + 1)]

    def _pairs(self) -> Iterator[tuple[tuple[str, int], Bit]]:
        for left, right in self.assigned.items():
            to, given = self.bits(left), self.bits(right)
            for number, bit in enumerate(to):
                if isinstance(bit, tuple):
                    yield bit, given[number] if len(to) == len(given) else None

    @cached_property
    def constants(self) -> set[tuple[str, int]]:
        """Bits that are constant: tied off here, or in every parent."""
        found = set.intersection(*self.ties) if self.ties else set()
        pairs = list(self._pairs())
        grew = True
        while grew:
            new = {
                to
                for to, given in pairs
                if to not in found and (isinstance(given, str) or given in found)
            }
            grew = bool(new)
            found |= new
        return found

    @cached_property
    def second_names(self) -> set[tuple[str, int]]:
        """Bits that are only another name of a bit in this module that is counted."""
        return {
            to
            for to, given in self._pairs()
            if isinstance(given, tuple) and given[0] not in self.uncounted
        }

    def tie(self, modules: Mapping[str, "Module"]) -> None:
        """Tell the modules of its instances which of their inputs are constant."""
        for name, ports in self.instances:
            if name in modules:
                child = modules[name]
                tied = set()
                for port, value in ports.items():
                    if port in child.inputs:
                        for number, bit in enumerate(self.bits(value)):
                            if isinstance(bit, str) or bit in self.constants:
                                tied.add((port, number))
                child.ties.append(tied)

    def place(self, names: str) -> str:
        """File and line of the first operator or signal in an expression that has one, in the
        sources of the project; else those of the module."""
        waiting, seen = [names], set[str]()
        while waiting:
            text = waiting.pop(0)
            for source in SRC.findall(text):
                if source.startswith("nearstep_"):
                    return str(source)
            for name in map(_plain, re.findall(NAME, f"{ATTRIBUTE.sub('', text)} ")):
                if name in seen:
                    continue
                seen.add(name)
                if UNNAMED.fullmatch(name):
                    waiting.append(self._assigned_to(name))
                elif self.sources.get(name, "").startswith("nearstep_"):
                    return self.sources[name]
        return self.source

    def _assigned_to(self, name: str) -> str:
        return self.assigned.get(f"\\{name}", self.assigned.get(name, ""))

    def words(self, text: str) -> str:
        """An expression in which the results of operators are written out once."""

        def written(match: re.Match[str]) -> str:
            name = _plain(match[0])
            value = ATTRIBUTE.sub("", self._assigned_to(name)).strip()
            return f"({value})" if value else f"next {self.following.get(name, name)}"

        text = re.sub(r"\\\$\d+ ", written, ATTRIBUTE.sub("", text))
        return re.sub(r"\\(\S+) ", r"\1", text).strip()

    def selected(self, number: int) -> str:
        """The `casez` value that an arm in a line is for."""
        indent = len(self.line(number)) - len(self.line(number).lstrip())
        for above in range(number - 1, self.first, -1):
            match = CASEZ.match(self.line(above))
            if match and len(match[1]) < indent:
                return match[2]
        return ""

    @cached_property
    def following(self) -> dict[str, str]:
        """Next value of a register, to the register."""
        matches = (NEXT.match(ATTRIBUTE.sub("", row)) for row in self.text)
        return {_plain(each[2]): _plain(each[1]) for each in matches if each}

    @cached_property
    def transitions(self) -> list[Transition]:
        """Those of state machines.

        They are registers named `state`, whose next value is a constant in an arm of a `casez` of
        them. The reset is none.
        """
        following = {to: name for to, name in self.following.items() if STATE.search(name)}
        found, arms = [], list[tuple[int, str, str]]()
        for number, row in enumerate(self.text, self.first):
            depth = len(row) - len(row.lstrip())
            while arms and depth <= arms[-1][0]:
                arms.pop()
            if match := CASEZ.match(row):
                arms.append((len(match[1]), _plain(match[2]), ""))
            elif arms and (match := LABEL.match(row)) and len(match[1]) == arms[-1][0] + 2:
                arms[-1] = (*arms[-1][:2], match[2])
            elif (match := SET.match(row)) and _plain(match[2]) in following:
                register = following[_plain(match[2])]
                arm = next((a for a in reversed(arms) if a[1] == register and a[2]), None)
                if arm and re.fullmatch(r"\d+'h[0-9a-f]+", match[3]):
                    for before in arm[2].split(", "):
                        found.append(Transition(register, before, match[3], number))
        return found

    @cached_property
    def states(self) -> dict[tuple[str, str], list[int]]:
        """Register and state to the lines of the arms for it, in any block."""
        registers = {each.register for each in self.transitions}
        known = {(each.register, value) for each in self.transitions
                 for value in (each.before, each.after)}  # fmt: skip
        lines: dict[tuple[str, str], list[int]] = {}
        for number, row in enumerate(self.text, self.first):
            if match := LABEL.match(row):
                register = _plain(self.selected(number))
                for value in match[2].split(", "):
                    if register in registers and value != "default":
                        lines.setdefault((register, value), []).append(number)
        return {each: lines[each] for each in sorted(known | set(lines)) if each in lines}


def _split(text: str) -> list[str]:
    """Parts of a concatenation."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def modules_of(text: str) -> dict[str, Module]:
    """Modules of a file of Yosys, by name, parents before children."""
    modules: dict[str, Module] = {}
    current: Module | None = None
    source = ""
    ports: dict[str, str] | None = None
    for number, row in enumerate(text.splitlines(), 1):
        if match := MODULE.match(row):
            current = Module(_plain(match[1]), source, number)
            modules[current.name] = current
        if current is not None:
            current.text.append(row)
        counted = not row.startswith(COVERAGE_OFF)
        row = row.replace(COVERAGE_OFF, "").replace(COVERAGE_ON, "")
        if row.lstrip().startswith("(* "):
            source = next(iter(SRC.findall(row)), source)
            continue
        if current is not None:
            if match := DECLARED.match(row):
                _declare(current, match, source, counted)
            elif match := ASSIGN.match(row):
                current.assigned[match[1]] = match[2]
            elif match := INSTANCE.match(row):
                ports = {}
                current.instances.append((_plain(match[1]), ports))
            elif ports is not None and (match := PORT.match(row)):
                ports[_plain(match[1])] = match[2]
            if row == "endmodule":
                current = None
        source = ""
    for module in modules.values():  # Yosys writes parents first, save modules that are appended
        module.tie(modules)
    return modules


def _declare(module: Module, match: re.Match[str], source: str, counted: bool) -> None:
    kind, high, name, memory = match[1], match[2], _plain(match[3]), match[4]
    width = int(high or 0) + 1
    if kind == "input":
        module.inputs.add(name)
    if kind in ("input", "output"):
        module.sources[name] = source
        return
    module.sources.setdefault(name, source)
    module.widths[name] = width
    if counted and not memory and width <= WIDEST:
        return
    module.uncounted.add(name)
    if counted:
        module.too_wide += width * (int(memory.split(":")[1][:-1]) + 1 if memory else 1)
    else:
        module.unnamed += width
