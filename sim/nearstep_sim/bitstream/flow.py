"""The flow: synthesis, placing and routing with one seed or several, the bitstream, the reports."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from amaranth.build.run import BuildPlan

from nearstep_hw.boards.free_rows import FILE, KEPT
from nearstep_sim.bitstream.dfu import with_suffix
from nearstep_sim.bitstream.errors import (
    BitstreamError,
    DoesNotFitError,
    FolderError,
    PlanError,
    TimingError,
    ToolFailedError,
)
from nearstep_sim.bitstream.floor_plan import FORMATS, draw_placed, draw_routed
from nearstep_sim.bitstream.placement import read_placement
from nearstep_sim.bitstream.report import (
    LUT,
    Report,
    Use,
    read_report,
    utilisation,
    without_kept,
)
from nearstep_sim.bitstream.result import Bitstream
from nearstep_sim.bitstream.summary import summary
from nearstep_sim.bitstream.tools import Program, find, run
from nearstep_sim.bitstream.watch import Watch
from nearstep_spec.cache import unwritable

__all__ = ["BIT", "DFU", "FAILED_BIT", "build"]

BIT = "top.bit"
FAILED_BIT = "top.timing-failed.bit"
"""Name of a bitstream that misses its clock rates, so that no script loads it."""
DFU = "top.dfu"
"""Name of the bitstream for a loader on the board, if any."""
WORK = "work"
PICTURES = ("placed", "routed")
RESULTS = (
    BIT,
    FAILED_BIT,
    DFU,
    "report.json",
    "summary.md",
    *(f"{picture}.{form}" for picture in PICTURES for form in FORMATS),
)
STEPS = ("yosys", "nextpnr-ecp5", "ecppack")
NO_PLACE = ("utilisation limit", "Unable to place cell", "failed to place")
FULLEST = 4  # types of cells in an error


@dataclass
class _Flow:
    """A plan, its programs and the folder of the build."""

    plan: BuildPlan
    folder: Path
    watch: Watch
    programs: Mapping[str, Program]
    commands: Mapping[str, list[str]]
    top: str
    cells: dict[str, Use] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        """Lookup tables that the plan keeps free."""
        return KEPT if FILE in self.plan.files else 0

    @property
    def work(self) -> Path:
        return self.folder / WORK

    def prepare(self) -> None:
        """Remove the results of earlier runs, and write the files of the plan.

        Raises
        ------
        FolderError
        """
        if reason := unwritable(self.folder):
            raise FolderError(self.folder, reason)
        try:
            for name in RESULTS:
                (self.folder / name).unlink(missing_ok=True)
            if self.work.exists():
                shutil.rmtree(self.work)
            for name, content in self.plan.files.items():
                path = self.work / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise FolderError(self.folder, error.strerror or str(error)) from error

    def run(
        self,
        step: str,
        tool: str,
        options: Mapping[str, str | None],
        look: Callable[[str], None] = lambda line: None,
        *,
        into: str = ".",
        log: str | None = None,
    ) -> None:
        """Run the plan's command of this tool, with options replaced.

        Parameters
        ----------
        look : called with each line.
        into : folder for the output.
        log : log written by the tool.
        """

        def line(text: str) -> None:
            self.watch.line(step, text)
            look(text)

        arguments = _with(self.commands[tool], options)
        output = self.work / into / f"{tool}.txt"
        self.watch.begin(step)
        try:
            run(
                self.programs[tool],
                arguments,
                self.work,
                output,
                log=None if log is None else self.work / log,
                watch=line,
            )
        finally:
            self.watch.end(step)

    def place(self, seed: int) -> Report | BitstreamError:
        """Place and route with a seed.

        Raises
        ------
        DoesNotFitError : the chip has too few cells of a type, for any seed.
        ToolFailedError
        """
        name = f"seed-{seed}"
        (self.work / name).mkdir()
        options: dict[str, str | None] = {
            "--seed": str(seed),
            "--log": f"{name}/{self.top}.tim",
            "--textcfg": f"{name}/{self.top}.config",
            "--report": f"{name}/report.json",
            "--write": f"{name}/placed.json",
            "--timing-allow-fail": None,  # the report has the outcome
        }
        cells: dict[str, Use] = {}
        lines: list[str] = []

        def look(line: str) -> None:
            if found := utilisation(line):
                cells.update(without_kept(dict([found]), self.kept))
            elif cells and not lines:
                lines.append(line)  # the table has ended
                _check_room(cells)

        try:
            step = f"place and route, seed {seed}"
            self.run(step, "nextpnr-ecp5", options, look, into=name, log=options["--log"])
        except ToolFailedError as error:
            if any(each in str(error) for each in NO_PLACE):
                fullest = sorted(cells, key=lambda c: -cells[c].used / cells[c].available)
                shown = {c: (cells[c].used, cells[c].available) for c in fullest[:FULLEST]}
                return DoesNotFitError({}, shown)
            raise
        return read_report(self.raw_report(seed))

    def raw_report(self, seed: int) -> dict[str, Any]:
        """Read nextpnr's output for a seed, without the cells of free rows."""
        raw: dict[str, Any] = json.loads((self.work / f"seed-{seed}/report.json").read_bytes())
        uses = {cell: Use(**each) for cell, each in raw["utilization"].items()}
        uses = without_kept(uses, self.kept)
        raw["utilization"] = {cell: asdict(use) for cell, use in uses.items()}
        return raw | {"kept_free": {LUT: self.kept}}


def build(
    plan: BuildPlan,
    folder: Path,
    *,
    title: str,
    configuration: Mapping[str, Any],
    seeds: Sequence[int] = (1,),
    jobs: int = 1,
    dfu: tuple[int, int] | None = None,
    watch: Watch | None = None,
) -> Bitstream:
    """Run a plan, and write `top.bit`, `report.json`, `summary.md` and pictures.

    The files are deterministic for a plan, seeds and programs, in any folder.

    Parameters
    ----------
    plan : of a platform with an ECP5, for the Trellis programs.
    folder : for the results; inputs and outputs of programs are in its folder `work`.
    title : of the design, for people.
    configuration : of the design, for the report.
    seeds : of the placer, one run each; the best is used.
    jobs : runs at once.
    dfu : vendor and product of the board's loader, for which `top.dfu` is written.

    Raises
    ------
    ToolMissingError, PlanError, FolderError : before any file is written.
    DoesNotFitError, ToolFailedError
    TimingError : all files are written, but the bitstream is `top.timing-failed.bit`.
    """
    commands = _commands(plan)
    flow = _Flow(
        plan, folder, watch or Watch(), find(STEPS), commands, plan.script.removeprefix("build_")
    )
    tools = {name: program.version() for name, program in flow.programs.items()}
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one, not {list(seeds)}")
    flow.prepare()
    log = f"{flow.top}.rpt"
    flow.run("synthesis", "yosys", {"-l": log}, log=log)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            placed = dict(zip(seeds, pool.map(flow.place, seeds), strict=True))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # no other seed would do better
            raise
    found = {seed: each for seed, each in placed.items() if isinstance(each, Report)}
    if not found:
        raise next(each for each in placed.values() if isinstance(each, BitstreamError))
    best = min(found, key=lambda seed: (-found[seed].margin, seed))
    name = f"seed-{best}"
    placement = read_placement(flow.work / name / "placed.json", flow.top)
    raw = flow.raw_report(best)
    report = read_report(raw, placement.sources)
    files = {
        "--input": f"{name}/{flow.top}.config",
        "--bit": f"{flow.top}.bit",
        "--svf": f"{flow.top}.svf",
    }
    flow.run("bitstream", "ecppack", files)
    bit = folder / (FAILED_BIT if report.failed else BIT)
    os.replace(flow.work / f"{flow.top}.bit", bit)
    if dfu is not None and not report.failed:
        (folder / DFU).write_bytes(with_suffix(bit.read_bytes(), *dfu))
    made = Bitstream(
        bit=bit,
        digest=hashlib.sha256(bit.read_bytes()).hexdigest(),
        seed=best,
        report=report,
        seeds=placed,
        tools=tools,
        configuration=configuration,
        warnings=_warnings(flow.work / name / f"{flow.top}.tim"),
        kept=flow.kept,
    )
    flow.watch.begin("pictures")
    _write(made, title, raw)
    places = report.path.places if report.path else ()
    slowest = report.clocks[0]
    told = (
        f"seed {best}, {slowest.name} reaches {slowest.achieved:.1f} MHz "
        f"and must reach {slowest.needed:.1f} MHz"
    )
    draw_placed(placement, folder / "placed", f"{title}, placed: {told}", places)
    draw_routed(placement, folder / "routed", f"{title}, routed: {told}", places)
    flow.watch.end("pictures")
    if report.failed:
        raise TimingError(report.failed, folder)
    return made


def _write(made: Bitstream, title: str, raw: Mapping[str, Any]) -> None:
    """Write the report as JSON and as text."""
    content = {
        "design": title,
        "configuration": made.configuration,
        "tools": made.tools,
        "seed": made.seed,
        "timing": "failed" if made.report.failed else "met",
        "bit": {"file": made.bit.name, "sha256": made.digest, "bytes": made.bit.stat().st_size},
        "warnings": made.warnings,
        "median_mhz": made.medians,
        "seeds": {
            str(seed): (
                {clock.name: clock.achieved for clock in each.clocks}
                if isinstance(each, Report)
                else {"error": str(each)}
            )
            for seed, each in made.seeds.items()
        },
        **raw,
    }
    text = json.dumps(content, indent=1)
    (made.folder / "report.json").write_text(text + "\n", encoding="utf-8")
    (made.folder / "summary.md").write_text(summary(made, title), encoding="utf-8")


def _warnings(log: Path) -> tuple[str, ...]:
    """Return nextpnr's warnings, each once."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = (line.removeprefix("Warning: ") for line in lines if line.startswith("Warning: "))
    return tuple(dict.fromkeys(found))


def _commands(plan: BuildPlan) -> dict[str, list[str]]:
    """Arguments of each program of a plan.

    Raises
    ------
    PlanError : the program is not one of Trellis.
    """
    name = f"{plan.script}.json"
    if name not in plan.files:
        raise PlanError(f"the plan has no {name}, expected one among {', '.join(plan.files)}")
    commands = json.loads(plan.files[name])["commands"]
    programs = tuple(command[0] for command in commands)
    if programs != STEPS:
        raise PlanError(f"the plan runs {', '.join(programs)}, expected {', '.join(STEPS)}")
    return {program: arguments for program, *arguments in commands}


def _with(arguments: Sequence[str], options: Mapping[str, str | None]) -> list[str]:
    """Replace or append options in arguments."""
    kept, words = [], list(arguments)
    while words:
        word = words.pop(0)
        if word in options:
            if options[word] is not None:
                words.pop(0)
        else:
            kept.append(word)
    given = [each for name, value in options.items() for each in (name, value) if each is not None]
    return [*given, *kept]


def _check_room(cells: Mapping[str, Use]) -> None:
    """Raise `DoesNotFitError` if more cells of a type are used than available."""
    lacking = {
        cell: (use.used, use.available) for cell, use in cells.items() if use.used > use.available
    }
    if lacking:
        raise DoesNotFitError(lacking)
