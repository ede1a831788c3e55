"""Import arrows between packages, families and modules, read from the sources."""

import ast
import builtins
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = {"nearstep_spec": "hw", "nearstep_hw": "hw", "nearstep_sim": "sim", "nearstep": "host"}
MAY_IMPORT = {
    "nearstep_spec": {"nearstep_spec"},
    "nearstep_hw": {"nearstep_hw", "nearstep_spec"},
    "nearstep": {"nearstep", "nearstep_spec"},
    "nearstep_sim": set(TREES),
}
FREE_OF = {
    "nearstep_spec": {"amaranth", "torch"},
    "nearstep_hw": {"torch"},
    "nearstep": {"amaranth"},
}
FAMILIES = {"axdimm", "smartssd", "coarse", "memferry"}
SHARED = {"updater", "storage"}
"""Blocks that families share: what they import belongs to no family."""


@cache
def modules() -> Mapping[str, Path]:
    """Every module of the four packages, by name."""
    found = {}
    for package, tree in TREES.items():
        for path in sorted((ROOT / tree / package).rglob("*.py")):
            parts = path.relative_to(ROOT / tree).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source: str, module: str) -> Iterator[str]:
    """Absolute names that a source imports: at any depth, in a function, or for types alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                base = ".".join([*parents[: len(parents) - node.level], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str:
    """The module that holds `name`, or nothing: `nearstep_spec.rule.expr` for a class of it."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


def arrows(sources: Mapping[str, str]) -> "nx.DiGraph[str]":
    """Who imports whom; other packages by the first part of their names."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module, source in sources.items():
        graph.add_node(module)
        for name in imports(source, module):
            imported = module_of(name) or name.partition(".")[0]
            if imported != module:
                graph.add_edge(module, imported)
    return graph


@cache
def tree() -> "nx.DiGraph[str]":
    return arrows({module: path.read_text() for module, path in modules().items()})


def package_of(module: str) -> str:
    return module.partition(".")[0]


def family_of(module: str) -> str | None:
    return next((part for part in module.split(".") if part in FAMILIES), None)


def wrong_packages(graph: "nx.DiGraph[str]") -> list[tuple[str, str]]:
    """Arrows that leave a package for one that it must not know."""
    wrong = []
    for module, imported in graph.edges:
        mine, other = package_of(module), package_of(imported)
        forbidden = set(TREES) - MAY_IMPORT[mine] | FREE_OF.get(mine, set())
        if other in forbidden:
            wrong.append((module, imported))
    return sorted(wrong)


def wrong_families(graph: "nx.DiGraph[str]") -> list[tuple[str, str]]:
    """Arrows from a family, or from a block that families share, to another family."""
    wrong = []
    for module, imported in graph.edges:
        mine, other = family_of(module), family_of(imported)
        parts = set(module.split("."))
        shared = not SHARED.isdisjoint(parts) or (
            mine is None and package_of(module) in HARDWARE and PRODUCTS.isdisjoint(parts)
        )
        if other and other != mine and (mine or shared):
            wrong.append((module, imported))
        if mine and not PRODUCTS.isdisjoint(imported.split(".")):
            wrong.append((module, imported))
    return sorted(wrong)


HARDWARE = {"nearstep_spec", "nearstep_hw"}
PRODUCTS = {"boards"}  # what is made of families, and no family imports


def circles(graph: "nx.DiGraph[str]") -> list[list[str]]:
    return sorted(sorted(each) for each in nx.strongly_connected_components(graph) if len(each) > 1)


def test_no_package_imports_one_that_it_must_not_know() -> None:
    graph = tree()
    assert len(graph.edges) > 1000
    assert wrong_packages(graph) == []


def test_no_family_imports_another() -> None:
    counted = sum(1 for module in tree() if family_of(module))
    assert counted > 80
    assert wrong_families(tree()) == []


def test_there_is_no_circle() -> None:
    assert circles(tree()) == []


@pytest.mark.parametrize(
    ("module", "source", "checker"),
    [
        ("nearstep_spec.x", "from nearstep_hw.csr.bank import CsrBank", wrong_packages),
        ("nearstep_spec.x", "import amaranth", wrong_packages),
        ("nearstep_hw.x", "import nearstep_sim.verilate.build", wrong_packages),
        ("nearstep_hw.x", "def f():\n    from nearstep import errors", wrong_packages),
        ("nearstep.x", "from amaranth.hdl import Module", wrong_packages),
        ("nearstep.x", "from nearstep_hw.csr.bank import CsrBank", wrong_packages),
        ("nearstep.x", "def f():\n    import nearstep_sim", wrong_packages),
        ("nearstep_hw.axdimm.x", "from nearstep_hw.smartssd import card", wrong_families),
        ("nearstep_hw.updater.x", "from nearstep_spec.axdimm import config", wrong_families),
        ("nearstep_hw.axi.x", "from nearstep_hw.coarse import wire", wrong_families),
        ("nearstep_hw.smartssd.x", "from nearstep_hw.boards import plan", wrong_families),
        ("nearstep.coarse.x", "def f():\n    import nearstep.axdimm.device", wrong_families),
        ("nearstep.storage.x", "from nearstep.coarse.frozen import Frozen", wrong_families),
    ],
)
def test_a_wrong_arrow_is_found(module: str, source: str, checker: object) -> None:
    assert callable(checker)
    assert len(checker(arrows({module: source}))) == 1


def test_a_circle_is_found_wherever_its_imports_stand() -> None:
    graph = arrows(
        {
            "nearstep.device": "def f():\n    from nearstep.buffer import Buffer",
            "nearstep.buffer": "if TYPE_CHECKING:\n    from nearstep.device import Device",
        }
    )
    assert circles(graph) == [["nearstep.buffer", "nearstep.device"]]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("nearstep_sim.x", "from nearstep_hw.csr.bank import CsrBank\nimport nearstep.errors"),
        ("nearstep.axdimm.x", "from nearstep_spec.updater.config import UpdateKernelConfig"),
        ("nearstep_hw.smartssd.x", "from nearstep_hw.updater import kernel_core"),
        ("nearstep_hw.boards.x", "from nearstep_hw.smartssd import card"),
        ("nearstep.coarse.x", "from nearstep.storage.snapshot_file import save"),
        ("nearstep.x", "from . import errors"),
    ],
)
def test_a_right_arrow_is_none_of_them(module: str, source: str) -> None:
    graph = arrows({module: source})
    assert len(graph.edges) >= 1
    assert wrong_packages(graph) == wrong_families(graph) == circles(graph) == []


def test_plain_data_loads_neither_amaranth_nor_torch() -> None:
    names = [each for each in modules() if package_of(each) == "nearstep_spec"]
    assert len(names) > 30
    code = "import importlib, sys\n"
    code += f"for name in {[*names, 'nearstep', 'nearstep.cli']!r}:\n"
    code += "    importlib.import_module(name)\n"
    code += "print(sorted({'amaranth', 'torch', 'nearstep_hw', 'nearstep_sim'} & set(sys.modules)))"
    # the command line loads commands of other packages only when it runs
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_every_shared_block_is_there() -> None:
    assert {path.parent.name for path in modules().values()} >= SHARED


def test_folder_names_say_what_is_inside() -> None:
    folders = {path.parent.name for path in modules().values()}
    assert len(folders) > 20
    assert not folders & {"utils", "common", "misc", "core"}


INSIDE = {"IndexFormatError", "StoppedError"}
"""Errors that never leave the package that raises them."""


def test_every_error_has_the_base_of_nearsteps() -> None:
    """But private ones, and those of failed checks of benches, which are `AssertionError`s."""
    checked, wrong = 0, []
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef) or not node.name.endswith("Error"):
                continue
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if node.name == "NearstepError" or node.name in INSIDE or node.name.startswith("_"):
                continue
            checked += 1
            if node.bases and bases <= set(vars(builtins)) - {"AssertionError"}:
                wrong.append(f"{module}.{node.name}")
    assert checked > 150
    assert wrong == []
