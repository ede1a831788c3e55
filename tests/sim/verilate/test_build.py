"""The build cache: named by content, never half written, whole or made again."""

import ctypes
import multiprocessing
import os
import shlex
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as cache_of
from pathlib import Path
from types import ModuleType

import pytest

import nearstep_hw
import nearstep_spec
from nearstep_sim.verilate import build
from nearstep_spec import cache
from nearstep_spec.cache import CacheError

SOURCE = 'extern "C" int answer() {{ return {value}; }}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def library(folder: Path, value: int, **options: object) -> Path:
    path = folder / "answer.cpp"
    path.write_text(SOURCE.format(value=value))
    return build.compile_library("answer", [path], **options)


def test_equal_content_is_built_once_and_other_content_again(folder: Path) -> None:
    first = library(folder, 41)
    made = first.stat().st_mtime_ns
    assert library(folder, 41) == first
    assert first.stat().st_mtime_ns == made
    second = library(folder, 42)
    assert second != first
    assert [ctypes.CDLL(str(lib)).answer() for lib in (first, second)] == [41, 42]


def test_flags_and_cpu_are_part_of_the_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = library(folder, 1)
    assert library(folder, 1, cxxflags=["-DUNUSED=1"]) != plain
    monkeypatch.setattr(build, "cpu_name", lambda: "another cpu")
    assert library(folder, 1) != plain


def test_processors_of_arm_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd{}\nCPU implementer\t: 0x41\nCPU part\t: 0x{}\n"
    names = []
    for more, part in (("", "d0c"), (" sve2", "d4f"), (" sve2", "d40")):
        said = text.format(more, part)
        monkeypatch.setattr(Path, "read_text", lambda _, said=said: said)
        names.append(build.cpu_name.__wrapped__())
    assert len(set(names)) == 3


def test_a_failed_build_leaves_nothing_behind(folder: Path) -> None:
    path = folder / "broken.cpp"
    path.write_text("this is not C++\n")
    with pytest.raises(build.BuildError, match="expected 0"):
        build.compile_library("broken", [path])
    assert [p.name for p in _all(folder / "cache") if p.is_file()] == [cache.MANIFEST]


def test_a_missing_compiler_is_told_in_plain_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="nearstep doctor"):
        library(folder, 3)
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(build.BuildError, match="No closing quotation"):
        library(folder, 3)


def test_what_is_in_the_cache_needs_no_compiler(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_version_of", cache_of(build._version_of.__wrapped__))
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {shlex.join(build.compiler())} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    made = library(folder, 55)
    monkeypatch.setattr(build, "_version_of", cache_of(build._version_of.__wrapped__))
    compiler.unlink()
    assert library(folder, 55) == made
    with pytest.raises(build.BuildError, match="nearstep doctor"):
        library(folder, 56)


def test_the_compiler_may_be_several_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = folder / "calls of a wrapper"
    wrapper = folder / "my wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> "{log}"\nexec "$@"\n')
    wrapper.chmod(0o755)
    compiler = shlex.join(build.compiler())
    monkeypatch.setenv("CXX", f"'{wrapper}' {compiler} -DVALUE=7")
    path = folder / "answer.cpp"
    path.write_text('extern "C" int answer() { return VALUE; }\n')
    first = build.compile_library("answer", [path])
    assert ctypes.CDLL(str(first)).answer() == 7
    calls = log.read_text().splitlines()
    assert len(calls) == 2, calls  # which compiler is it, and the build
    assert all(call.startswith(f"{compiler} -DVALUE=7 ") for call in calls)
    monkeypatch.setenv("CXX", f"'{wrapper}' {compiler} -DVALUE=8")
    assert build.compile_library("answer", [path]) != first


def test_parameters_that_a_compiler_does_not_have_are_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`max-unswitch-level` was in GCC up to release 12."""
    older = folder / "older"
    older.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        "*--help=params*) echo '  --param=max-unswitch-insns=  Instructions of a loop.';;\n"
        "*max-unswitch-level*) echo unrecognized >&2; exit 1;;\n"
        f'*) exec {shlex.join(build.compiler())} "$@";;\nesac\n'
    )
    older.chmod(0o755)
    monkeypatch.setenv("CXX", str(older))
    path = folder / "answer.cpp"
    path.write_text('extern "C" int answer() { return 9; }\n')
    flags = ["--param=max-unswitch-insns=2000", "--param=max-unswitch-level=6"]
    assert ctypes.CDLL(str(build.compile_library("answer", [path], cxxflags=flags))).answer() == 9
    accepted = build._accepted([*flags, "-Wall"], "x86_64", [str(older)])
    assert accepted == [flags[0], "-Wall"]
    assert build._accepted(flags, "x86_64", []) == [], "ziglang is clang"


def test_verilog_is_named_by_its_key_and_extra_sources(folder: Path) -> None:
    extra = folder / "extra.py"
    extra.write_text("a")
    calls: list[int] = []

    def generate() -> str:
        calls.append(1)
        return "module m; endmodule\n"

    first = build.verilog_of("m 1", generate, sources=[extra])
    assert build.verilog_of("m 1", generate, sources=[extra]) == first
    extra.write_text("b")
    assert build.verilog_of("m 1", generate, sources=[extra]) != first
    assert build.verilog_of("m 2", generate, sources=[extra]) != first
    assert len(calls) == 3


@pytest.mark.parametrize("package", [nearstep_hw, nearstep_spec], ids=lambda each: each.__name__)
def test_verilog_is_named_by_the_sources_of_hardware_and_of_its_data(
    package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = build._hardware_sources.__wrapped__
    copy = Path(shutil.copytree(package.__path__[0], tmp_path / package.__name__))
    before = digest()
    monkeypatch.setattr(package, "__path__", [str(copy)])
    assert digest() == before
    changed = sorted(copy.rglob("*.py"))[-1]
    changed.write_text(changed.read_text() + "# changed\n")
    assert digest() != before


def test_the_place_of_the_cache_is_the_environments(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("NEARSTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    usual = Path("/home/someone/.cache/nearstep")
    assert build.cache_dir() == usual
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    assert build.cache_dir() == usual
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert build.cache_dir() == Path("/caches/nearstep")
    monkeypatch.setenv("NEARSTEP_CACHE", "")
    assert build.cache_dir() == Path("/caches/nearstep")
    monkeypatch.setenv("NEARSTEP_CACHE", "~/mine")
    assert build.cache_dir() == Path("/home/someone/mine")
    monkeypatch.setenv("NEARSTEP_CACHE", "here/it is")
    assert build.cache_dir() == tmp_path / "here" / "it is"


def test_a_relative_cache_in_a_path_with_a_space_and_a_letter_that_is_not_ascii(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEARSTEP_CACHE", "a caché")
    made = library(tmp_path, 44)
    assert made.is_relative_to(tmp_path / "a caché")
    assert ctypes.CDLL(str(made)).answer() == 44


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _unmark(path: Path) -> None:
    path.with_name(f"{path.name}.sum").unlink()


@pytest.mark.parametrize("damage", [_truncate, _zero, _unmark, Path.unlink])
def test_a_damaged_library_is_built_again_before_it_is_loaded(folder: Path, damage) -> None:
    made = library(folder, 45)
    whole = made.read_bytes()
    damage(made)
    assert library(folder, 45) == made
    assert made.read_bytes() == whole
    assert ctypes.CDLL(str(made)).answer() == 45  # a truncated one would end the process


def test_a_damaged_folder_is_made_again(folder: Path) -> None:
    texts = {"a.hpp": "one", "b.cpp": "two"}
    made = build.stored("design", texts)
    (made / "a.hpp").write_text("on")
    (made / "more").write_text("")
    assert build.stored("design", texts) == made
    assert {path.name: path.read_text() for path in made.iterdir()} == texts
    assert build.stored("design", {**texts, "a.hpp": "on"}) != made


def test_files_have_the_modes_of_the_umask(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        library(folder, 46)
        build.stored("rule", {"a.cpp": "text"})
        build.verilog_of("m", lambda: "module m; endmodule\n")
    finally:
        os.umask(before)
    modes = {
        stat.filemode(path.stat().st_mode) for path in [folder / "cache", *_all(folder / "cache")]
    }
    assert modes == {"drwxr-x---", "-rw-r-----", "-rwxr-x---"}


def _all(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


@contextmanager
def _as_a_user() -> Iterator[None]:
    """Without the capability of root to write where modes forbid it."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    assert libc.capget(header, held) == 0
    fewer = (ctypes.c_uint32 * 6)(*held)
    fewer[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0


def test_a_cache_that_cannot_be_written_serves_what_it_has(folder: Path) -> None:
    made = library(folder, 47)
    design = build.stored("design", {"a": "b"})
    places = [folder / "cache", *(p for p in _all(folder / "cache") if p.is_dir())]
    for place in places:
        place.chmod(0o555)
    try:
        with _as_a_user():
            assert library(folder, 47) == made
            assert build.stored("design", {"a": "b"}) == design
            with pytest.raises(CacheError, match="Permission denied; NEARSTEP_CACHE can name") as e:
                library(folder, 48)
            assert e.value.folder == folder / "cache" / "lib"
            with pytest.raises(CacheError, match="Permission denied"):
                build.stored("more", {"a": "b"})
            with pytest.raises(CacheError, match="cache cannot be written: Permission denied"):
                cache.yowasp_environment()
            _truncate(made)
            with pytest.raises(CacheError, match="Permission denied"):
                library(folder, 47)
    finally:
        for place in places:
            place.chmod(0o755)
    assert library(folder, 48) != made


def test_a_cache_below_a_file_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("NEARSTEP_CACHE", str(folder / "file" / "cache"))
    with pytest.raises(CacheError, match="Not a directory"):
        library(folder, 49)


def test_yosys_keeps_its_code_in_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("YOWASP_CACHE_DIR", raising=False)
    ours = str(folder / "cache" / "yowasp")
    assert build.tool_environment()["YOWASP_CACHE_DIR"] == ours
    assert cache.yowasp_environment() == {"YOWASP_CACHE_DIR": ours}
    monkeypatch.setenv("YOWASP_CACHE_DIR", str(folder / "theirs"))
    assert cache.yowasp_environment() == {"YOWASP_CACHE_DIR": str(folder / "theirs")}


def test_what_a_killed_build_left_is_removed_by_the_next(folder: Path) -> None:
    library(folder, 50)
    place = folder / "cache" / "lib"
    for name in (f"answer-{1:024x}.so", f"{2:024x}"):
        cache.claim(place / name)
        (place / f"build-{name}").mkdir()
        (place / f"build-{name}" / "half.o").write_bytes(b"half")
        (place / f".{name}.lock").write_text("")
    library(folder, 51)
    assert sorted(path.suffix for path in place.iterdir()) == [".so", ".so", ".sum", ".sum"]


def test_a_build_that_was_killed_is_begun_anew(folder: Path) -> None:
    made = library(folder, 54)
    made.unlink()
    half = made.with_name(f"build-{made.name}")
    half.mkdir()
    (half / "lib.so").write_bytes(b"half")
    (half / "answer.o").write_bytes(b"half")
    assert ctypes.CDLL(str(library(folder, 54))).answer() == 54
    assert not half.exists()


def test_a_build_of_another_is_left_alone(folder: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()
    place = folder / "cache" / "lib"

    def slow(scratch: Path) -> Path:
        (scratch / "out").write_text("slow")
        inside.set()
        assert go_on.wait(60)
        return scratch / "out"

    target = place / "slow-000000000000000000000000"
    thread = threading.Thread(target=build.once, args=(target, slow))
    thread.start()
    assert inside.wait(60)
    library(folder, 52)
    assert cache.clear() > 0
    assert [path.name for path in place.iterdir() if "slow" not in path.name] == []
    go_on.set()
    thread.join(60)
    assert target.read_text() == "slow"
    assert not (place / f".{target.name}.lock").exists()


def _race(folder: str, number: int) -> None:
    os.environ["NEARSTEP_CACHE"] = folder

    def make(scratch: Path) -> Path:
        with open(Path(folder) / "made", "a") as file:
            file.write(f"{number}\n")
        (scratch / "out").write_text("x" * 100_000)
        return scratch / "out"

    for each in range(20):
        target = Path(folder) / "lib" / f"race-{each:024x}"
        assert len(build.once(target, make).read_text()) == 100_000


def test_processes_that_want_the_same_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    racers = [context.Process(target=_race, args=(str(tmp_path), i)) for i in range(4)]
    for each in racers:
        each.start()
    for each in racers:
        each.join(120)
    assert [each.exitcode for each in racers] == [0] * 4
    assert len((tmp_path / "made").read_text().splitlines()) == 20
    left = [path.name for path in (tmp_path / "lib").iterdir()]
    assert len(left) == 40, left


def test_clearing_takes_only_what_the_cache_made(folder: Path) -> None:
    library(folder, 53)
    build.stored("design", {"a": "b"})
    place = folder / "cache" / "lib"
    (place / "libc.so.6").write_text("of the user")
    rows = {row.name: row for row in cache.kinds()}
    assert {name: rows[name].pieces for name in ("lib", "design")} == {"lib": 1, "design": 1}
    assert rows["lib"].nbytes > 1000
    assert cache.clear() == sum(row.nbytes for row in rows.values())
    left = [path.name for path in _all(folder / "cache") if path.is_file()]
    assert left == ["libc.so.6", cache.MANIFEST]
    assert cache.clear() == 0
    assert cache.kinds() == []


def test_a_source_that_libraries_have_in_common_is_compiled_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "cache"))
    shared = tmp_path / "shared.cpp"
    shared.write_text('extern "C" int shared() { return 7; }\n')
    for name in ("one", "two"):
        (tmp_path / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ return 1; }}\n')
        path = build.compile_library(name, [tmp_path / f"{name}.cpp"], common=[shared])
        assert ctypes.CDLL(str(path)).shared() == 7
    assert len(list((tmp_path / "cache" / "lib").glob("shared-*.o"))) == 1
    shared.write_text('extern "C" int shared() { return 8; }\n')
    path = build.compile_library("one", [tmp_path / "one.cpp"], common=[shared])
    assert ctypes.CDLL(str(path)).shared() == 8


def test_levels_of_optimisation_that_change_results_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels = {None: "-O3", "": "-O3", "-O1": "-O1"}
    for given, level in levels.items():
        if given is None:
            monkeypatch.delenv(build.OPTIMISE, raising=False)
        else:
            monkeypatch.setenv(build.OPTIMISE, given)
        assert [each for each in build.cxx_flags() if each.startswith("-O")] == [level]
    monkeypatch.setenv(build.OPTIMISE, "-Ofast")
    with pytest.raises(ValueError, match="must be one of -O0, -O1, -O2, -O3, not '-Ofast'"):
        build.cxx_flags()
