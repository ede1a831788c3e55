"""Import arrows between the three packages, read from the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = {"nearstep_hw": "hw", "nearstep_sim": "sim", "nearstep": "host"}

PURE_HARDWARE = {
    "nearstep_hw",
    "nearstep_hw.axdimm.arbiter_registers",
    "nearstep_hw.axdimm.config",
    "nearstep_hw.axdimm.dimm",
    "nearstep_hw.axdimm.hand_over",
    "nearstep_hw.axdimm.registers",
    "nearstep_hw.cache",
    "nearstep_hw.coarse",
    "nearstep_hw.coarse.config",
    "nearstep_hw.coarse.registers",
    "nearstep_hw.csr.block",
    "nearstep_hw.csr.export",
    "nearstep_hw.csr.model",
    "nearstep_hw.dram",
    "nearstep_hw.dram.address",
    "nearstep_hw.dram.geometry",
    "nearstep_hw.dram.latency",
    "nearstep_hw.dram.timing",
    "nearstep_hw.fp.format",
    "nearstep_hw.pcie",
    "nearstep_hw.pcie.layout",
    "nearstep_hw.rule",
    "nearstep_hw.rule.adagrad",
    "nearstep_hw.rule.adam",
    "nearstep_hw.rule.expr",
    "nearstep_hw.rule.combine",
    "nearstep_hw.rule.rules",
    "nearstep_hw.rule.program",
    "nearstep_hw.rule.errors",
    "nearstep_hw.rule.rule",
    "nearstep_hw.rule.scalars",
    "nearstep_hw.rule.scale",
    "nearstep_hw.rule.sgd",
    "nearstep_hw.smartssd",
    "nearstep_hw.smartssd.compression",
    "nearstep_hw.smartssd.config",
}
"""What the host may import: plain data, free of Amaranth (shown by `test_pure_modules...`)."""


def imports(source: str, package: str) -> set[str]:
    """Absolute names of the modules that a source file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def _modules(package: str) -> list[tuple[str, Path]]:
    top = ROOT / TREES[package]
    rows = []
    for path in sorted((top / package).rglob("*.py")):
        parts = path.relative_to(top).with_suffix("").parts
        rows.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return rows


def module_of(name: str) -> str:
    """The module that holds `name`: `nearstep_hw.rule.expr.Value` is in `nearstep_hw.rule.expr`."""
    parts = name.split(".")
    top = ROOT / TREES[parts[0]]
    while len(parts) > 1:
        path = top.joinpath(*parts)
        if path.is_dir() or path.with_suffix(".py").exists():
            break
        parts.pop()
    return ".".join(parts)


def forbidden(package: str, name: str) -> bool:
    """Whether a module of `package` may not import `name`."""
    root = name.split(".")[0]
    if package == "nearstep_hw":
        return root in {"nearstep", "nearstep_sim"}
    if package == "nearstep":
        if root == "nearstep_hw":
            module = module_of(name)
            prefix = any(pure.startswith(module + ".") for pure in PURE_HARDWARE)
            return module not in PURE_HARDWARE and not prefix
        return root in {"amaranth", "nearstep_sim"}
    return False


def _violations(package: str, source: str, module: str) -> set[str]:
    return {name for name in imports(source, module) if forbidden(package, name)}


@pytest.mark.parametrize("package", sorted(TREES))
def test_import_arrows_hold(package: str) -> None:
    modules = _modules(package)
    assert modules, f"no modules found for {package}"
    wrong = {}
    for module, path in modules:
        if bad := _violations(package, path.read_text(), module):
            wrong[str(path.relative_to(ROOT))] = sorted(bad)
    assert not wrong


def test_the_checker_fires() -> None:
    cases = [
        ("nearstep_hw", "import nearstep_sim.build"),
        ("nearstep_hw", "def f():\n    from nearstep import errors"),
        ("nearstep", "import amaranth"),
        ("nearstep", "from amaranth.hdl import Module"),
        ("nearstep", "from nearstep_hw.fp import add"),
        ("nearstep", "from nearstep_hw.csr.bank import CsrBank"),
        ("nearstep", "from nearstep_hw.rule.rtl import FunctionalUnit"),
        ("nearstep", "import nearstep_sim"),
    ]
    for package, source in cases:
        assert _violations(package, source, f"{package}.x"), (package, source)
    allowed = [
        ("nearstep_sim", "from nearstep_hw.csr.bank import CsrBank"),
        ("nearstep", "from nearstep_hw.axdimm.config import AdamKernelConfig"),
        ("nearstep", "from nearstep_hw.axdimm import config"),
    ]
    for package, source in allowed:
        assert not _violations(package, source, f"{package}.x"), (package, source)


def test_pure_modules_do_not_load_amaranth_or_torch() -> None:
    code = "import importlib, sys\n"
    code += f"for name in {sorted([*PURE_HARDWARE, 'nearstep', 'nearstep.cli'])!r}:\n"
    code += "    importlib.import_module(name)\n"
    code += "print(sorted({'amaranth', 'torch', 'nearstep_sim'} & set(sys.modules)))"
    # the command line loads commands of other packages only when it runs
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_folder_names_say_what_is_inside() -> None:
    folders = {p.parent.name for tree in TREES.values() for p in (ROOT / tree).rglob("*.py")}
    assert folders, "no folders found"
    assert not folders & {"utils", "common", "misc", "core"}
