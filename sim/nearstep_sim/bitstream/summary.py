"""A report for people, in Markdown."""

from collections.abc import Iterable, Iterator, Sequence

from nearstep_sim.bitstream.report import RESOURCES, Path, Report
from nearstep_sim.bitstream.result import Bitstream

__all__ = ["summary"]


def summary(made: Bitstream, title: str) -> str:
    """Summary of a build: fit, clock rates, critical path."""
    verdict = "TIMING FAILED" if made.report.failed else "timing met"
    lines = [f"# {title}: {verdict}", ""]
    lines += [
        f"`{made.bit.name}`, {made.bit.stat().st_size:,} bytes, SHA-256 `{made.digest}`, "
        f"seed {made.seed}.",
        "",
        "## Cells",
        "",
        *_table(("", "used", "of", "share"), _cells(made.report)),
        "",
        *_kept(made.kept),
        "## Clocks",
        "",
        *_table(("clock", "reaches, MHz", "must reach, MHz", ""), _clocks(made.report)),
        "",
    ]
    if len(made.seeds) > 1:
        lines += ["## Seeds", "", *_table(_seed_heads(made), _seeds(made)), ""]
    if made.report.path is not None:
        lines += _critical(made.report.path, made.report.clocks[0].name)
    if made.warnings:
        lines += ["## Warnings of nextpnr", "", *(f"- {each}" for each in made.warnings), ""]
    lines += ["## Configuration", ""]
    lines += _table(("option", "value"), ((k, _value(v)) for k, v in made.configuration.items()))
    lines += ["", "## Programs", ""]
    lines += _table(("program", "version"), made.tools.items())
    return "\n".join(lines) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)


def _cells(report: Report) -> Iterator[Sequence[str]]:
    for cell, title in RESOURCES.items():
        if cell in report.cells:
            use = report.cells[cell]
            yield title, f"{use.used:,}", f"{use.available:,}", f"{use.used / use.available:.1%}"


def _kept(count: int) -> list[str]:
    if not count:
        return []
    return [f"{count:,} more LUT4 are kept free, in every third row, for the wires there.", ""]


def _clocks(report: Report) -> Iterator[Sequence[str]]:
    for clock in report.clocks:
        short = clock.needed - clock.achieved
        verdict = "met" if clock.met else f"**{short:.2f} MHz short**"
        yield f"`{clock.name}`", f"{clock.achieved:.2f}", f"{clock.needed:.2f}", verdict


def _seed_heads(made: Bitstream) -> Sequence[str]:
    return ("seed", *(f"`{clock.name}`, MHz" for clock in made.report.clocks))


def _seeds(made: Bitstream) -> Iterator[Sequence[str]]:
    names = [clock.name for clock in made.report.clocks]
    for seed, each in made.seeds.items():
        if isinstance(each, Report):
            reached = {clock.name: f"{clock.achieved:.2f}" for clock in each.clocks}
            yield (
                f"{seed}{' (used)' if seed == made.seed else ''}",
                *(reached.get(name, "-") for name in names),
            )
        else:
            yield str(seed), str(each), *("-" for _ in names[1:])
    yield "median", *(f"{made.medians[name]:.2f}" for name in names)


def _critical(path: Path, clock: str) -> list[str]:
    total = path.logic_ns + path.routing_ns
    rows = (
        (
            f"`{each.source}`" if each.source else "-",
            each.block or "(top)",
            f"`{each.net}`" if each.net else "-",
            str(each.cells),
            f"{each.logic_ns:.2f}",
            f"{each.routing_ns:.2f}",
        )
        for each in path.stretches
    )
    return [
        f"## Critical path of `{clock}`",
        "",
        f"{total:.2f} ns: {path.logic_ns:.2f} ns in cells, {path.routing_ns:.2f} ns on wires; "
        f"from `{path.start}` to `{path.end}`.",
        "",
        *_table(("source", "block", "last net", "cells", "cells, ns", "wires, ns"), rows),
        "",
    ]
