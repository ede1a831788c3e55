"""`nearstep decompressor check`: whether a user's decompressor is exact, and how fast it is."""

import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer
from amaranth.hdl import UnusedElaboratable

from nearstep.cli.outcome import FAILED, reported, working
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.record_bench import (
    KINDS,
    RecordBench,
    cases,
    made,
    meaning_again,
)
from nearstep_sim.bench.stream_bench import STALLS
from nearstep_sim.drive_rate import CLOCK_HZ, drive_rate
from nearstep_sim.synthesis import ultrascale_plus_cells
from nearstep_spec.rule.file import RuleFileError
from nearstep_spec.updater.compression import ValueFormat
from nearstep_spec.updater.decompressor import Decompressor, DecompressorError, load

__all__ = ["Exactness", "Rate", "app", "exactness", "rates", "round_trips"]

LANES = 16  # FP32 elements of a 512-bit beat
BLOCK = 4096  # elements of a block of a kernel
RATE_ELEMENTS = 1 << 16
RECORD_BYTES = 8  # a word and a value of binary32
SHARES = (0.01, 0.1, 1.0)
ARRAYS_MOVED = 6  # p, m and v of Adam, in and out
EVERY = 7  # one in this many runs follows an abandoned run
LINE = 16  # elements: where a run of a kernel may begin


@dataclass(frozen=True)
class Exactness:
    """Comparison of bits: RTL against the numpy function.

    Attributes
    ----------
    checks : runs, each dry and then not.
    compared : elements compared with `==`.
    outcomes : runs by outcome.
    first : the first difference, or empty.
    """

    checks: int
    compared: int
    outcomes: dict[str, int]
    first: str

    @property
    def passed(self) -> bool:
        return not self.first and self.compared > 0


@dataclass(frozen=True)
class Rate:
    """Cycles of one run on RTL without stalls.

    Attributes
    ----------
    share : argument of `compress`.
    nonzero : elements other than 0, of which the run has `elements`.
    cycles : from the start to the last transfer.
    """

    share: float
    elements: int
    records: int
    nonzero: int
    cycles: int


def round_trips(user: Decompressor, *, trips: int, seed: int) -> Exactness:
    """Compress, decompress, cut at a line, and compress again: the bits must be preserved.

    Raises
    ------
    DecompressorError : a function breaks its contract.
    """
    rng = np.random.default_rng(seed)
    compared = changed = 0
    for trip in range(trips):
        form = list(ValueFormat)[trip % 3]
        count, share = int(rng.integers(1, 3000)), float(rng.choice([0.01, 0.25, 1.0]))
        case = made(user, rng, count, form, share)
        wrong = user.first_wrong(case.words, count)
        where = f"trip {trip}: {count} elements, share {share}, {form.name}, seed {seed}"
        if wrong is not None:
            first = f"{where}: record {wrong} that compress gave is wrong"
            return Exactness(trip, compared, {}, first)
        sent = user.dense(case.words, case.widened, count)
        begin = LINE * int(rng.integers(0, -(-count // LINE)))
        end = int(rng.integers(begin + 1, count + 1)) if trip % 2 else count
        part = np.append(sent[begin:end], np.zeros(int(rng.integers(0, 40)), np.uint32))
        part[part == np.uint32(1 << 31)] = 0
        again = meaning_again(user, part, form, share)
        compared += part.size
        changed += int(np.count_nonzero(part))
        differing = np.flatnonzero(again != part)
        if differing.size:
            at = int(differing[0])
            first = (
                f"{where}, elements {begin} to {end}: element {at} was {part[at]:#010x} and is "
                f"{again[at]:#010x} when it is compressed again"
            )
            return Exactness(trip + 1, compared, {}, first)
    first = "" if changed else f"seed {seed}: nothing but zeros was ever sent"
    return Exactness(trips, compared, {}, first)


def exactness(bench: RecordBench, *, runs: int, seed: int) -> Exactness:
    """Compare RTL with numpy for records of every kind, format and stall, up to the first
    difference.

    Raises
    ------
    DecompressorError : a function breaks its contract.
    """
    done, first = 0, ""
    found = cases(bench.user, seed, runs, lanes=bench.lanes, block=BLOCK)
    for done, case in enumerate(found, 1):
        stalls = list(STALLS)[(done - 1) // len(KINDS) % len(STALLS)]
        if done % EVERY == 0:
            first = bench.give_up(case, seed=seed + done)
        first = first or bench.difference(case, stalls=stalls, seed=seed + done)
        if first:
            break
    return Exactness(done, bench.compared, dict(bench.runs), first)


def rates(bench: RecordBench, shares: Sequence[float] = SHARES, *, seed: int) -> list[Rate]:
    """Cycles of gradients of 65,536 normal numbers, for each share."""
    found = []
    for share in shares:
        rng = np.random.default_rng(seed)
        normal = rng.standard_normal(RATE_ELEMENTS).astype(np.float32)
        case = made(bench.user, rng, RATE_ELEMENTS, ValueFormat.FP32, share, of=normal)
        run = bench.run(case)
        dense = bench.user.dense(case.words, case.widened, RATE_ELEMENTS)
        # A run that does not end has no rate.
        cycles = run.cycles if run.outputs["o_done"] else 0
        found.append(
            Rate(share, RATE_ELEMENTS, case.words.size, int(np.count_nonzero(dense)), cycles)
        )
    return found


def _rate_rows(found: Sequence[Rate]) -> list[tuple[str, str]]:
    rows = []
    drive = drive_rate()
    for each in found:
        density = f"share {each.share:g}, {each.nonzero / each.elements:.1%} not 0"
        if not each.cycles:
            rows.append(("rate", f"{density}: the run did not end"))
            continue
        dense, records = each.elements / each.cycles, each.records / each.cycles
        rows += [
            (
                "rate",
                f"{density}: {dense:.3f} elements and {records:.3f} records a cycle, measured: "
                f"{each.records} records in {each.cycles} cycles",
            ),
            ("  dense", f"out: {drive.beside(4 * dense * CLOCK_HZ)}"),
            ("  records", f"in: {drive.beside(RECORD_BYTES * records * CLOCK_HZ)}"),
        ]
    needed = LANES / ARRAYS_MOVED
    slowest = min((each.elements / each.cycles for each in found if each.cycles), default=0.0)
    verdict = "keeps up" if slowest >= needed else "does NOT keep up"
    rows.append(
        (
            "needed",
            f"{needed:.3f} elements a cycle, modelled: Adam's p, m and v in and out of one "
            f"half-duplex port of {LANES} lanes; the decompressor {verdict}",
        )
    )
    return rows


def _exact_rows(trips: Exactness, exact: Exactness, seed: int) -> list[tuple[str, str]]:
    verdict = exact.first or "RTL and numpy agree"
    return [
        (
            "round trip",
            f"{trips.checks} gradients of {trips.compared} elements compressed again, seed {seed}; "
            + (trips.first or "nothing is lost"),
        ),
        (
            "bit-exact",
            f"{exact.checks} checks of {exact.compared} elements, seed {seed}: "
            f"{exact.outcomes.get('done', 0)} runs done, {exact.outcomes.get('wrong', 0)} ended "
            f"at a wrong record, {exact.outcomes.get('dry', 0)} dry; {verdict}",
        ),
        ("", f"records: {', '.join(KINDS)}; stalls: {', '.join(STALLS)}"),
    ]


app = typer.Typer(help="Decompressors of your own.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command("check")
def command(
    name: Annotated[str, typer.Argument(help="FILE.py:NAME of a decompressor.")],
    area: Annotated[
        bool, typer.Option("--area", help="Synthesise the unit as well (about a minute).")
    ] = False,
    runs: Annotated[int, typer.Option(min=len(KINDS), help="Number of runs on RTL.")] = 324,
    seed: Annotated[int, typer.Option(min=0, help="Seed of records and stalls.")] = 1,
) -> None:
    """Compare the RTL of a decompressor with its numpy function, and print the rate of the RTL.

    Exit status: 1 if a bit differs, a run does not end, bits are lost when compressed again, or a
    function violates its contract; 2 if the file has no decompressor.
    """
    # Cached Verilog is not made again: the unit only checks its ports.
    warnings.simplefilter("ignore", UnusedElaboratable)
    with reported(wrong=(RuleFileError, DecompressorError, TypeError)):
        user = load(name)
    typer.echo(
        f"{name}: a record for {user.elements_per_record} elements or more, "
        f"digest {user.digest[:16]}"
    )
    with reported(failed=(TypeError,)):  # `unit` is not a unit
        bench = RecordBench(user, lanes=LANES)
    with reported(failed=(DecompressorError,)), working(name, total=4 + area) as progress:
        with closing(bench):
            progress(f"{name}: compressed again")
            trips = round_trips(user, trips=runs, seed=seed)
            progress(f"{name}: {runs} runs")
            exact = exactness(bench, runs=runs, seed=seed)
            rows = _exact_rows(trips, exact, seed)
            if exact.passed:  # no rate of wrong results
                progress(f"{name}: rates")
                rows += _rate_rows(rates(bench, seed=seed))
        if area:
            progress(f"{name}: synthesis")
            rows.append(("area", _area(user)))
    for title, text in rows:
        typer.echo(f"  {title:11}{text}")
    if not (trips.passed and exact.passed):
        raise typer.Exit(FAILED)


def _area(user: Decompressor) -> str:
    cells = ultrascale_plus_cells(to_verilog(user.unit(lanes=LANES, records=LANES), "unit"), "unit")
    counts = {
        "DSP48E2": cells.get("DSP48E2", 0),
        "LUT": sum(count for name, count in cells.items() if name[:3] == "LUT"),
        "FF": sum(count for name, count in cells.items() if name[:2] == "FD"),
        "RAMB36E2": cells.get("RAMB36E2", 0),
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items()) + " (xcup)"
