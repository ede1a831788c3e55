"""Structures of ctypes against the compiler, and what cannot be one."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearstep_sim.models.dram import library
from nearstep_sim.verilate.abi import AbiError, structure, values
from nearstep_sim.verilate.build import INCLUDES, compiler, cxx_flags

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
