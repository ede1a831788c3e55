"""Structures of ctypes against the compiler, and what cannot be one."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearstep_sim.models.bulk import SOURCE as BULK
from nearstep_sim.models.dram import library
from nearstep_sim.verilate.abi import AbiError, load, structure, values
from nearstep_sim.verilate.build import INCLUDES, compile_library, compiler, cxx_flags

FIRST = "models/dram/library.cpp"
STRUCTURES = {
    "nearstep::Timing": (FIRST, "Timing", {}),
    "nearstep::HostConfig": (FIRST, "HostConfig", {}),
    "nearstep::PortConfig": (FIRST, "PortConfig", {}),
    "nearstep::HostStatistics": (FIRST, "HostStatistics", {}),
    "nearstep::BusClocks": (FIRST, "BusClocks", {}),
    "nearstep::RefreshExtremes": (FIRST, "RefreshExtremes", {}),
    "nearstep::Fault": ("verilate/fault.hpp", "Fault", {}),
    "nearstep::Injection": ("verilate/injection.hpp", "Injection", {}),
    "nearstep::MemoryCounters": ("models/memory.hpp", "MemoryCounters", {}),
    "nearstep::BarFailure": ("models/bar_host.hpp", "BarFailure", {}),
    "nearstep::PeerPacing": ("models/peer_dma.hpp", "PeerPacing", {}),
    "nearstep::PeerEnd": ("models/peer_dma.hpp", "PeerEnd", {}),
    "nearstep::ManagerPins": (
        "models/axi/axi.hpp", "ManagerPins", {"types": {"Beat": ctypes.c_uint8 * 64}}
    ),
    "nearstep::ChannelResult": (
        "models/dram/channel_bench.hpp", "ChannelResult", {"sizes": {"kKinds": 13}}
    ),
}  # fmt: skip
HEADERS = (
    "models/dram/host.hpp", "models/dram/ddr4.hpp", "models/dram/port.hpp", "verilate/fault.hpp",
    "verilate/injection.hpp", "models/memory.hpp", "models/bar_host.hpp", "models/axi/axi.hpp",
    "models/peer_dma.hpp", "models/dram/channel_bench.hpp",
)  # fmt: skip


def assertions() -> Iterator[str]:
    """What the compiler is to find true."""
    for cpp, (source, name, options) in STRUCTURES.items():
        made = structure(source, name, **options)
        yield f"static_assert(sizeof({cpp}) == {ctypes.sizeof(made)});"
        for member, *_ in made._fields_:
            field = getattr(made, member)
            yield f"static_assert(offsetof({cpp}, {member}) == {field.offset});"
            yield f"static_assert(sizeof({cpp}::{member}) == {field.size});"


def compiled(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = folder / "check.cpp"
    source.write_text(text)
    command = [*compiler(), *cxx_flags(), f"-I{INCLUDES}", "-fsyntax-only", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_members_lie_where_the_compiler_has_them(tmp_path: Path) -> None:
    checks = list(assertions())
    includes = "".join(f'#include "{each}"\n' for each in HEADERS)
    found = compiled(includes + "#include <cstddef>\n" + "\n".join(checks), tmp_path)
    assert found.returncode == 0, found.stderr
    assert len(checks) > 150
    wrong = checks[1].replace("== 0", "== 4")
    assert wrong != checks[1]
    assert compiled(includes + "#include <cstddef>\n" + wrong, tmp_path).returncode != 0


def test_a_structure_is_made_once_and_has_its_members_by_name() -> None:
    made = structure(FIRST, "PortConfig")
    assert made is structure(FIRST, "PortConfig")
    assert made is structure("models/dram/port.hpp", "PortConfig")
    assert dict(structure(FIRST, "HostConfig")._fields_)["timing"] is structure(FIRST, "Timing")
    assert issubclass(library.CPortConfig, made)
    names = ("phases", "data_bytes", "read_latency", "write_latency")
    assert values(made(1, 2, 3, 4)) == dict(zip(names, (1, 2, 3, 4), strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("struct Other {\n    int x;\n};\n", "declare no struct Mine"),
        ("struct Mine {\n    std::vector<int> x;\n};\n", "not understood: std::vector<int> x"),
        ("struct Mine {\n    Missing x;\n};\n", "declare no struct Missing"),
        ("struct Mine {\n    char x[kLong];\n};\n", "size kLong is no number"),
    ],
)
def test_what_is_no_structure_is_told(tmp_path: Path, text: str, message: str) -> None:
    source = tmp_path / "mine.hpp"
    source.write_text(text)
    with pytest.raises(AbiError, match=message):
        structure(str(source), "Mine")


FUNCTIONS = """\
#include <cstdint>
extern "C" std::uint64_t wide(std::uint8_t low, std::uint64_t high) { return high << 8 | low; }
extern "C" {
const char* text(
    const char* given) {
    return given;
}
// void comment(int) {
void* place(const float* at, std::int32_t index) { return const_cast<float*>(at + index); }
int many(const std::uint8_t* const* rows, int row) { return *rows[row]; }
#ifdef LEFT_OUT
void left_out(int x) { (void)x; }
#endif
}  // extern "C"
"""


def test_functions_have_the_types_of_their_declaration(tmp_path: Path) -> None:
    source = tmp_path / "functions.cpp"
    source.write_text(FUNCTIONS)
    library = load(compile_library("functions", [source]), source)
    assert library.wide(0xFF, 1 << 55) == 1 << 63 | 0xFF
    assert library.text(b"as it was") == b"as it was"
    floats = (ctypes.c_float * 3)()
    assert library.place(floats, 2) == ctypes.addressof(floats) + 8
    rows = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.c_char_p(b"\x07"), ctypes.c_void_p))
    assert library.many(rows, 0) == 7
    assert not hasattr(library, "left_out")
    with pytest.raises(ctypes.ArgumentError):
        library.wide(1.5, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int mine(int x) { return x; }\n", "no function is declared"),
        ('extern "C" void mine(std::vector<int> x) {\n}\n', "of mine are not understood"),
        ('extern "C" void mine(Missing x) {\n}\n', "declare no struct Missing"),
    ],
)
def test_what_is_no_function_of_c_is_told(tmp_path: Path, text: str, message: str) -> None:
    source = tmp_path / "mine.cpp"
    source.write_text(text)
    with pytest.raises(AbiError, match=message):
        load(Path(load(compile_library("bulk", [BULK]), BULK)._name), source)
