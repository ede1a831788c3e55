# amaranth: UnusedElaboratable=no
"""`nearstep rule check`: what a user's rule becomes in hardware, and whether it is exact."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from nearstep.cli.outcome import FAILED, reported, working
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.functional_unit import VerilatedUnit
from nearstep_sim.bench.operands import operands, registers
from nearstep_sim.bench.unit_port import beat_bound, run_on_port
from nearstep_sim.drive_rate import CLOCK_HZ, drive_rate
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.rule_cpp import kernel
from nearstep_sim.synthesis import ultrascale_plus_cells
from nearstep_spec.rule.file import RuleFileError, load_rules
from nearstep_spec.rule.rule import Rule
from nearstep_spec.updater.config import ELEMENT_BYTES

__all__ = ["Area", "Check", "Exactness", "Throughput", "app", "area", "check"]

LANES = 16  # FP32 elements of a 512-bit beat
CONFIRMED = 0.95  # least share of the estimate, in a run that includes filling and draining
PORT_ELEMENTS = 48 * 1024

Arrays = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Exactness:
    """Comparison of bits: RTL and C++ kernel against the numpy model.

    Attributes
    ----------
    vectors : elements that went through the Verilated unit, without and with stalls and bubbles.
    results : words compared with `==`, of all arrays written, RTL and kernel together.
    first : the first difference, or empty.
    """

    vectors: int
    results: int
    differing: int
    first: str


@dataclass(frozen=True)
class Throughput:
    """Parameters a cycle behind one port of 512 bit that reads or writes a beat a cycle.

    Attributes
    ----------
    estimate : modelled: lanes / (arrays read + arrays written).
    simulated : measured: of Verilated units behind such a port, filling and draining included.
    """

    estimate: float
    simulated: float

    @property
    def units(self) -> int:
        """Functional units that keep up with the port: each takes an element a cycle."""
        return math.ceil(self.estimate)

    @property
    def confirmed(self) -> bool:
        return CONFIRMED * self.estimate <= self.simulated <= self.estimate


@dataclass(frozen=True)
class Area:
    """Cells of one functional unit after `synth_xilinx -family xcup`."""

    dsp: int
    lut: int
    ff: int


@dataclass(frozen=True)
class Check:
    """Results of `check`."""

    rule: Rule
    latency: int
    exactness: Exactness
    throughput: Throughput

    @property
    def passed(self) -> bool:
        exact = self.exactness.results > 0 and self.exactness.differing == 0
        return exact and self.throughput.confirmed


class _Tally:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.vectors = self.results = self.differing = 0
        self.first = ""

    def compare(self, who: str, given: Arrays, got: Arrays, expected: Arrays) -> None:
        for name in self.rule.arrays_out:
            ours, theirs = got[name].view(np.uint32), expected[name].view(np.uint32)
            self.results += theirs.size
            wrong = np.flatnonzero(ours != theirs)
            self.differing += wrong.size
            if wrong.size and not self.first:
                at = wrong[0]
                words = ", ".join(
                    f"{each}={array.view(np.uint32)[at]:#010x}" for each, array in given.items()
                )
                self.first = (
                    f"{who}, element {at} ({words}): {name} is {ours[at]:#010x}, "
                    f"expected {theirs[at]:#010x}"
                )


def _exactness(unit: FunctionalUnit, vectors: int, seed: int) -> Exactness:
    rule = unit.rule
    tally = _Tally(rule)
    verilated = VerilatedUnit(unit, cxxflags=["-O1"])
    try:
        for run in range(4):
            count = max(1, vectors // 4)
            given = operands(rule.arrays_in, count, seed + run)
            scalars = registers(dict(rule.registers()), run)
            expected = evaluate(rule, given, scalars)
            free = verilated.run(given, scalars)
            tally.compare("RTL", given, free.arrays, expected)
            part = slice(0, max(1, count // 16))
            few = {name: array[part].copy() for name, array in given.items()}
            stalled = verilated.run(few, scalars, stall=0.3, bubble=0.3, seed=seed + run)
            model = {name: array[part] for name, array in expected.items()}
            tally.compare("RTL with stalls", few, stalled.arrays, model)
            for name, outcome in (("free", free), ("stalled", stalled)):
                lost = outcome.missing + outcome.extra + outcome.changes_while_idle
                if lost and not tally.first:
                    tally.first = f"RTL, {name} run: {lost} results missing, extra or changed"
                tally.differing += lost
            tally.vectors += count + few[rule.arrays_in[0]].size
            arrays = {name: array.copy() for name, array in given.items()}
            arrays |= {name: np.zeros(count, np.float32) for name in rule.outputs}
            kernel(rule)(arrays, scalars)
            tally.compare("C++ kernel", given, arrays, expected)
    finally:
        verilated.close()
    return Exactness(tally.vectors, tally.results, tally.differing, tally.first)


def _throughput(unit: FunctionalUnit, seed: int) -> Throughput:
    rule = unit.rule
    given = operands(rule.arrays_in, PORT_ELEMENTS, seed)
    scalars = registers(dict(rule.registers()), 2)
    run = run_on_port(unit, given, scalars, lanes=LANES)
    expected = evaluate(rule, given, scalars)
    same = all(
        np.array_equal(run.arrays[name].view(np.uint32), expected[name].view(np.uint32))
        for name in rule.arrays_out
    )
    # Wrong results have no rate.
    simulated = PORT_ELEMENTS / run.cycles if same else 0.0
    return Throughput(PORT_ELEMENTS / beat_bound(unit, PORT_ELEMENTS, lanes=LANES), simulated)


def check(
    rule: Rule,
    *,
    vectors: int = 200_000,
    seed: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Check:
    """Build the functional unit of `rule`, Verilate it, and compare it with the numpy model.

    Parameters
    ----------
    rule : with at least one array that is read.
    vectors : elements sent through the unit at full rate; a sixteenth of them again with stalls.
    progress : called with the name of each step that begins.
    """
    unit = FunctionalUnit(rule)
    progress(f"{rule.name}: {vectors} vectors")
    exactness = _exactness(unit, vectors, seed)
    progress(f"{rule.name}: throughput")
    return Check(rule, unit.latency, exactness, _throughput(unit, seed))


def area(rule: Rule) -> Area:
    """Cells of one functional unit of `rule`; takes about a minute."""
    cells = ultrascale_plus_cells(to_verilog(FunctionalUnit(rule), "unit"), "unit")
    return Area(
        dsp=cells.get("DSP48E2", 0),
        lut=sum(count for name, count in cells.items() if name[:3] == "LUT"),
        ff=sum(count for name, count in cells.items() if name[:2] == "FD"),
    )


def _report(done: Check) -> list[tuple[str, str]]:
    rule, exact, rate = done.rule, done.exactness, done.throughput
    scalars, switches = ", ".join(rule.scalars), ", ".join(rule.switches)
    verdict = "RTL, C++ kernel and numpy model agree" if not exact.differing else exact.first
    share = rate.simulated / rate.estimate
    rows = [
        ("bit-exact", f"{exact.differing} of {exact.results} results differ; {verdict}"),
        ("", f"{exact.vectors} vectors through the Verilated unit, random and special"),
        ("registers", f"{scalars or 'none'} (32 bit); switches: {switches or 'none'}"),
        ("latency", f"{done.latency} cycles, one element a cycle"),
        ("units", ", ".join(f"{count} {op}" for op, count in rule.units().items()) or "none"),
        (
            "throughput",
            f"{rate.estimate:.3f} parameters a cycle, modelled: {LANES} lanes, "
            f"{len(rule.arrays_in)} arrays read, {len(rule.arrays_out)} written, "
            "one half-duplex port",
        ),
        (
            "",
            f"{rate.simulated:.3f} measured on {PORT_ELEMENTS} parameters "
            f"({share:.1%} of the estimate, {'confirmed' if rate.confirmed else 'NOT confirmed'})",
        ),
        (
            "",
            f"{rate.simulated * CLOCK_HZ / 1e6:.0f} million parameters/s at "
            f"{CLOCK_HZ // 1_000_000} MHz, modelled from it",
        ),
        ("", f"{rate.units} of {LANES} units keep up with the port, modelled"),
        ("drive", _beside_drive(rule, rate)),
    ]
    if rule.formats:
        formats = ", ".join(f"{name} {form}" for name, form in rule.formats.items())
        rows.append(
            ("in memory", f"{formats}: a kernel moves fewer bytes than the binary32 measured here")
        )
    return rows


def _beside_drive(rule: Rule, rate: Throughput) -> str:
    nbytes = ELEMENT_BYTES * (len(rule.arrays_in) + len(rule.arrays_out))
    moved = drive_rate().beside(nbytes * rate.simulated * CLOCK_HZ)
    return f"{nbytes} bytes read and written a parameter: {moved}"


app = typer.Typer(help="Update rules of your own.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command("check")
def command(
    path: Annotated[Path, typer.Argument(help="Python file that defines rules.")],
    area_: Annotated[
        bool, typer.Option("--area", help="Synthesise one unit as well (a minute for each rule).")
    ] = False,
    vectors: Annotated[
        int, typer.Option(min=1, help="Elements sent through the unit at full rate.")
    ] = 200_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of operands and stalls.")] = 1,
) -> None:
    """Compare RTL with the golden model; print registers, latency, units and throughput.

    Exit status: 1 if a rule is not exact, reads no array, or is slower than estimated; 2 if the
    file gives no rule.
    """
    with reported(wrong=(RuleFileError,)):
        rules = load_rules(path)
    failed = False
    for rule in rules.values():
        if not rule.arrays_in:
            typer.echo(f"error: {rule.location}: rule {rule.name!r} reads no array", err=True)
            failed = True
            continue
        typer.echo(f"{rule.name}: {', '.join(rule.arrays_in)} -> {', '.join(rule.arrays_out)}")
        with working(rule.name, total=3 + area_) as progress:
            done = check(rule, vectors=vectors, seed=seed, progress=progress)
            rows = _report(done)
            if area_:
                progress(f"{rule.name}: synthesis")
                cells = area(rule)
                rows.append(
                    ("area", f"{cells.dsp} DSP48E2, {cells.lut} LUT, {cells.ff} FF a unit (xcup)")
                )
        for name, text in rows:
            typer.echo(f"  {name:11}{text}")
        failed |= not done.passed
    if failed:
        raise typer.Exit(FAILED)
