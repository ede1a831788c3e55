"""Runs cocotb benches on Verilated designs, with builds cached by content."""

import hashlib
import importlib.metadata
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cocotb_tools import config
from cocotb_tools.runner import Icarus, Verilator

from nearstep_hw import COVERAGE
from nearstep_sim.verilate.build import (
    cache_dir,
    compiler,
    compiler_name,
    coverage_flags,
    coverage_verilog,
    once,
    tool_environment,
    verilate_block,
    verilator_root,
)
from nearstep_spec.cache import claim
from nearstep_spec.errors import NearstepError

FLAGS = ("-Wno-lint", "-Wno-fatal", "-O3", "--x-assign", "fast", "--x-initial", "0")
TIMESCALE = ("1ns", "1ps")
PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")
MAKE = ("OPT_FAST=-O1", "OPT_SLOW=-O0", "OPT_GLOBAL=-O0", "VM_PARALLEL_BUILDS=0")
"""Low optimisation, also of the design: a bench runs for seconds, mostly in Python. One source
file: a dozen would include the same headers.
"""


class BenchError(NearstepError, RuntimeError):
    """A bench failed, or ran no test. `failed` names the tests; the log's end is in the message."""

    def __init__(self, module: str, ran: int, failed: tuple[str, ...], log: Path) -> None:
        self.module = module
        self.ran = ran
        self.failed = failed
        self.log = log
        text = log.read_text(errors="replace") if log.exists() else ""
        tail = "\n".join(text.splitlines()[-60:])
        what = f"failed {', '.join(failed)}" if failed else f"ran {ran} tests, expected at least 1"
        super().__init__(f"{module} {what}; log {log}:\n{tail}")


@dataclass(frozen=True)
class BenchResult:
    """Tests that ran and passed, and the files of log and waves."""

    tests: tuple[str, ...]
    log: Path
    waves: Path | None


class _PortsVerilator(Verilator):
    """cocotb's runner, with the ports of the top public instead of every signal of the design.

    Ten times as fast to compile, and faster to run. Tools are called through links beside the
    build: make accepts no path with a space.
    """

    def __init__(
        self,
        *,
        module_folder: Path | None = None,
        objects: Path | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        self._module_folder = module_folder
        self._objects = objects
        self._settings = settings
        super().__init__()

    def _simulator_in_path_build_only(self) -> None:
        self.executable = str(verilator_root() / "bin" / "verilator_bin")

    def _build_command(self) -> list[list[str]]:
        tools = self.build_dir.parent
        links = {verilator_root(): tools / "verilator", config.base_cocotb_dir: tools / "cocotb"}
        for real, link in links.items():
            link.symlink_to(real)
        self.env["VERILATOR_ROOT"] = str(tools / "verilator")
        ports = self.build_dir / "ports.vlt"
        public = f'public_flat_rw -module "{self.hdl_toplevel}" -var "*"'
        ports.write_text("\n".join(["`verilator_config", public, *self._settings, ""]))
        commands = [[str(part) for part in command] for command in super()._build_command()]
        cocotb = str(config.base_cocotb_dir)
        rpath = f"-Wl,-rpath,{config.libs_dir} "  # the bench gets their paths at run time
        verilate = [
            part.replace(rpath, "").replace(cocotb, str(tools / "cocotb"))
            for part in commands[0]
            if part != "--public-flat-rw"
        ]
        make = [*commands[1], *MAKE]
        cxx = shlex.join(compiler()).replace("$", "$$")
        make += [f"CXX={cxx}", f"LINK={cxx}"]
        ready = sorted(str(path) for path in self._objects.glob("*.o")) if self._objects else []
        copy = [["cp", *ready, str(self.build_dir)]] if ready else []
        return [[*verilate, str(ports)], *copy, make]

    def _set_env_test(self) -> None:
        super()._set_env_test()
        libraries = [str(config.libs_dir), self.env.get("LD_LIBRARY_PATH", "")]
        self.env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        self.env["PYTHONPATH"] = os.pathsep.join([str(self._module_folder), self.env["PYTHONPATH"]])


class _EventDriven(Icarus):
    """cocotb's runner of Icarus Verilog, which simulates unknown values."""

    def __init__(self, *, module_folder: Path) -> None:
        self._module_folder = module_folder
        super().__init__()

    def _set_env_test(self) -> None:
        super()._set_env_test()
        self.env["PYTHONPATH"] = os.pathsep.join([str(self._module_folder), self.env["PYTHONPATH"]])


@contextmanager
def _plain(folder: Path) -> Iterator[Path]:
    """Yield a folder whose path needs no quoting for make and a shell: this or a temporary one."""
    if PLAIN.fullmatch(str(folder)):
        yield folder
        return
    places = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]
    place = next((each for each in places if PLAIN.fullmatch(str(each)) and each.is_dir()), None)
    if place is None:
        raise RuntimeError(f"make cannot work in {folder}, nor in {', '.join(map(str, places))}")
    with tempfile.TemporaryDirectory(prefix="nearstep-", dir=place) as plain:
        yield Path(plain)


@contextmanager
def _tools() -> object:
    """Put the tools on PATH, and restore the environment afterwards."""
    saved = dict(os.environ)
    os.environ.update(tool_environment())
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # the runner would exit instead of raise
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _build(
    top: str, verilog: Path, waves: bool, blocks: Sequence[str], settings: Sequence[str]
) -> Path:
    versions = [importlib.metadata.version(name) for name in ("cocotb", "verilator")]
    parts = [*versions, *FLAGS, *coverage_flags(), *MAKE, str(waves)]
    parts += [compiler_name(), str(Path(sys.prefix))]
    common = "\0".join(parts).encode()
    own = "\0".join([top, *blocks, "", *settings]).encode()
    digest = hashlib.sha256(own + common + coverage_verilog(verilog).read_bytes()).hexdigest()[:24]

    def build(folder: Path) -> Path:
        made = folder / "made"
        made.mkdir()
        with _plain(folder) as plain:
            objects = _runtime(common, waves)
            made_in = _make(plain, top, verilog, waves, objects, blocks, settings)
            shutil.move(made_in / top, made / top)
        return made

    with _tools():
        return once(cache_dir() / "cocotb" / f"{top}-{digest}", build)


def _runtime(common: bytes, waves: bool) -> Path:
    """Return Verilator's own C++ as objects, equal in every build."""

    def build(folder: Path) -> Path:
        made = folder / "objects"
        made.mkdir()
        with _plain(folder) as plain:
            verilog = plain / "nothing.v"
            verilog.write_text("module nothing(input clk); endmodule\n")
            for path in _make(plain, "nothing", verilog, waves, None).glob("verilated*.o"):
                shutil.copy2(path, made)
        return made

    digest = hashlib.sha256(common).hexdigest()[:24]
    return once(cache_dir() / "cocotb" / f"verilated-{digest}", build)


def _make(
    folder: Path,
    top: str,
    verilog: Path,
    waves: bool,
    objects: Path | None,
    blocks: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> Path:
    """Make a folder in `folder` with the executable `top` and its objects."""
    log = folder / "build.log"
    source = Path(shutil.copy(verilog, folder / "top.v"))
    if coverage_flags():
        source = coverage_verilog(verilog)
    flags = [*FLAGS, *coverage_flags()]
    common = ["--cc", *flags, "--timescale", "/".join(TIMESCALE), *(["--trace"] if waves else [])]
    for number, block in enumerate(blocks, 1):
        made = verilate_block(block, source, folder, common, number)
        flags += [*made.options, *made.sources, "-CFLAGS", f"-I{made.folder}"]
    if blocks:  # included by the makefile; blocks are Verilated already
        (folder / "sim").mkdir()
        (folder / "sim" / "Vtop_hier.mk").touch()
    try:
        _PortsVerilator(objects=objects, settings=settings).build(
            sources=[source],
            hdl_toplevel=top,
            build_dir=folder / "sim",
            build_args=flags,
            waves=waves,
            timescale=TIMESCALE,
            log_file=log,
        )
    except RuntimeError as error:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"Verilator build of {top}: {error}\n{tail}") from error
    return folder / "sim"


def run_cocotb(
    *,
    top: str,
    verilog: Path,
    test_module: Path,
    testcase: str | None = None,
    env: Mapping[str, str] | None = None,
    seed: int | None = None,
    icarus: bool = False,
    blocks: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> BenchResult:
    """Build `top` unless cached, and run the tests of `test_module`.

    The log, and with `WAVES=1` in the environment a VCD, are written to `build/cocotb` of the
    checkout, or to the cache if the package is installed.

    Parameters
    ----------
    top : module in `verilog`.
    verilog : plain Verilog, without parameters.
    test_module : the file with the cocotb tests, whose folder is importable in the tests.
    testcase : the only tests to run, comma separated; None for all.
    env : variables for the bench.
    seed : seed of cocotb's random numbers, printed by cocotb.
    icarus : in Icarus Verilog, without waves: slow, but a bench that reads an unknown value fails.
    blocks : modules in `verilog` that are Verilated once for all instances; see
        `nearstep_sim.verilate.build.Model`.
    settings : of Verilator, lines of its configuration.

    Raises
    ------
    BenchError : a test failed, or none ran.
    """
    waves = os.environ.get("WAVES", "0") not in ("", "0")
    waves = waves and not icarus
    folder = _run_folder(f"{test_module.stem}-{secrets.token_hex(12)}")
    folder.mkdir(parents=True)
    log, results = folder / "bench.log", folder / "results.xml"
    module_folder = test_module.resolve().parent
    runner: Verilator | Icarus
    if icarus:
        build_dir = folder / "sim"
        runner = _EventDriven(module_folder=module_folder)
        with _tools():
            runner.build(
                sources=[verilog],
                hdl_toplevel=top,
                build_dir=build_dir,
                timescale=TIMESCALE,
                log_file=folder / "build.log",
            )
    else:
        build_dir = _build(top, verilog, waves, blocks, settings)
        runner = _PortsVerilator(module_folder=module_folder)
        runner.parameters = {}
    try:
        with _tools():
            runner.test(
                test_module=test_module.stem,
                hdl_toplevel=top,
                hdl_toplevel_lang="verilog",
                testcase=testcase,
                seed=seed,
                extra_env={"COCOTB_ANSI_OUTPUT": "0", **(env or {})},
                build_dir=build_dir,
                test_dir=folder,
                results_xml=str(results),
                waves=waves,
                log_file=log,
            )
    except (RuntimeError, SystemExit):
        pass  # the results list failures; without results no test ran
    if not icarus and coverage_flags():
        _keep_counts(folder / "coverage.dat")
    ran, failed = _outcome(results)
    if failed or not ran:
        raise BenchError(test_module.stem, len(ran), failed, log)
    return BenchResult(ran, log, folder / "dump.vcd" if waves else None)


def _keep_counts(written: Path) -> None:
    """Move the counts of a bench that ran to its end into the folder for them."""
    if written.exists():
        kept = Path(os.environ[COVERAGE])
        kept.mkdir(parents=True, exist_ok=True)
        shutil.move(written, kept / f"{written.parent.name}.dat")


def _run_folder(name: str) -> Path:
    """Return the folder of a run: below the checkout, or in the cache of an installed package."""
    checkout = Path(__file__).resolve().parents[3]
    inside = (checkout / "pyproject.toml").exists()
    return checkout / "build" / "cocotb" / name if inside else claim(cache_dir() / "runs" / name)


def _outcome(results: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not results.exists():
        return (), ()
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    ran = tuple(case.get("name", "?") for case in cases if case not in skipped)
    return ran, tuple(case.get("name", "?") for case in failed)
