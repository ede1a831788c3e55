"""Libraries of a wheel: the best one for this processor, others refused by name, none half read."""

import ctypes
import hashlib
import json
import platform
import shutil
from pathlib import Path

import pytest

from nearstep_sim.verilate import build, prebuilt
from nearstep_sim.verilate.build import Library, NoCompilerError
from nearstep_sim.verilate.prebuilt import TARGETS, DamagedLibraryError, OtherProcessorError

HERE, OTHER = (
    ("x86-64-v3", "aarch64") if platform.machine() == "x86_64" else ("aarch64", "x86-64-v3")
)
NEEDS = {target.name: target.needs for target in TARGETS}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library whose compilation answers 1; those of the package answer otherwise."""
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    (tmp_path / "answer.cpp").write_text('extern "C" int answer() { return 1; }\n')
    return Library("answer", [tmp_path / "answer.cpp"])


def ship(sources: Library, answers: dict[str, int]) -> Path:
    """Make the package's folder, with a library for each target that tells which one it is."""
    prebuilt.FOLDER.mkdir()
    shipped = {}
    for target, answer in answers.items():
        path = sources.cpp[0].with_name("other.cpp")
        path.write_text(f'extern "C" int answer() {{ return {answer}; }}\n')
        data = Library("answer", [path]).compiled().read_bytes()
        (prebuilt.FOLDER / f"{target}.so").write_bytes(data)
        shipped[target] = (f"{target}.so", hashlib.sha256(data).hexdigest())
    (prebuilt.FOLDER / prebuilt.INDEX).write_text(json.dumps({sources.key: shipped}))
    prebuilt._index.cache_clear()
    return prebuilt.FOLDER


def answer(path: Path) -> int:
    return ctypes.CDLL(str(path)).answer()


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build, "_version_of", build._version_of.__wrapped__)
    monkeypatch.setattr("importlib.util.find_spec", lambda *names: None)


def test_the_best_library_that_the_processor_runs_is_loaded(
    sources: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("one target")
    folder = ship(sources, {"x86-64-v3": 3, "x86-64-v4": 4, "aarch64": 8})
    for name, expected in (("x86-64-v3", 3), ("x86-64-v4", 4)):
        monkeypatch.setattr(prebuilt, "features", lambda name=name: NEEDS[name])
        assert sources.compiled() == folder / f"{name}.so"
        assert answer(sources.compiled()) == expected


def test_other_sources_and_flags_are_compiled(
    sources: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(sources, {HERE: 3})
    monkeypatch.setattr(prebuilt, "features", lambda: NEEDS[HERE])
    assert answer(sources.compiled()) == 3
    monkeypatch.setenv(build.OPTIMISE, "-O2")
    assert answer(sources.compiled()) == 1
    monkeypatch.delenv(build.OPTIMISE)
    assert answer(sources._replace(cxxflags=["-DUNUSED"]).compiled()) == 1


def test_a_library_for_another_processor_is_refused_by_name(
    sources: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(sources, {OTHER: 8, "x86-64-v9": 9})
    with monkeypatch.context() as there:
        without_compiler(there)
        with pytest.raises(OtherProcessorError) as found:
            sources.compiled()
        assert found.value.missing.keys() == {OTHER, "x86-64-v9"}
        for name in (f"{OTHER}: this processor lacks", "x86-64-v9", *("g++", "clang++", "ziglang")):
            assert name in str(found.value)
    assert answer(sources.compiled()) == 1  # a compiler makes one for this processor


def test_a_damaged_library_is_refused(sources: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "features", lambda: NEEDS[HERE])
    path = ship(sources, {HERE: 3}) / f"{HERE}.so"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedLibraryError, match="install the package again"):
        sources.compiled()


def test_without_a_compiler_the_error_names_three(
    sources: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch)
    with pytest.raises(NoCompilerError, match=r"g\+\+.*clang\+\+.*ziglang"):
        sources.compiled()


def test_compilers_are_looked_for_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "ziglang" or None)
    found = [build.compiler()[-2:]]
    for name in ("clang++", "g++"):
        shutil.copy(shutil.which("true", path="/bin:/usr/bin") or "true", tmp_path / name)
        found.append(build.compiler())
    assert found == [["ziglang", "c++"], ["clang++"], ["g++"]]
