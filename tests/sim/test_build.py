"""The build cache: named by content, never half written."""

import ctypes
from pathlib import Path

import pytest

from nearstep_sim import build

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


def test_a_failed_build_leaves_nothing_behind(folder: Path) -> None:
    path = folder / "broken.cpp"
    path.write_text("this is not C++\n")
    with pytest.raises(build.BuildError, match="expected 0"):
        build.compile_library("broken", [path])
    left = [p for p in (folder / "cache").rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert left == []


def test_a_missing_compiler_is_told_in_plain_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    build._compiler.cache_clear()
    try:
        with pytest.raises(build.BuildError, match="nearstep doctor"):
            library(folder, 3)
    finally:
        build._compiler.cache_clear()


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
