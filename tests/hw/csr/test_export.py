"""Exports of register maps, read back by other people's tools."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from systemrdl import RDLCompiler
from systemrdl.node import AddrmapNode, FieldNode, RegNode

from nearstep_hw.generate import GENERATORS
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import device_map, sync_core_map
from nearstep_spec.csr.export import (
    FORMATS,
    to_c_header,
    to_markdown,
    to_systemrdl,
    to_systemrdl_space,
)
from nearstep_spec.csr.model import Access, Kind, RegisterMap
from nearstep_spec.smartssd.config import UPDATER
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import adam_kernel_map

FAMILIES = {
    "axdimm": adam_kernel_map(UpdateKernelConfig()),
    "axdimm-arbiter": DimmConfig().maps()["arbiter0"][1],
    "smartssd": adam_kernel_map(UPDATER),
    "coarse": device_map(CoarseConfig()),
    "coarse-sync": sync_core_map(CoarseConfig()),
}
"""What `nearstep registers` writes, by the name it takes."""

COMPILERS = pytest.mark.parametrize(("compiler", "standard"), [("g++", "c++11"), ("cc", "c11")])
DOCS = Path(__file__).resolve().parents[3] / "docs"
CONFIGS = {
    "default": UpdateKernelConfig(),
    "paper": UpdateKernelConfig(order="paper", lanes=4, functional_units=2, windows=1),
    "wide": UpdateKernelConfig(windows=8, block_bytes=4096, address_width=40),
}


@pytest.fixture(params=[*CONFIGS, "every_kind"])
def register_map(request: pytest.FixtureRequest, every_kind: RegisterMap) -> RegisterMap:
    if request.param == "every_kind":
        return every_kind
    return adam_kernel_map(CONFIGS[request.param])


def test_json_says_all_that_the_map_says(register_map: RegisterMap) -> None:
    document = json.loads(register_map.to_json())
    assert document["hash"] == register_map.hash()
    assert [r["name"] for r in document["registers"]] == [r.name for r in register_map]
    compared = 0
    for said, register in zip(document["registers"], register_map, strict=True):
        assert (said["offset"], said["width"]) == (register.offset, register.width)
        assert said["locked"] == register.locked
        for inner, field in zip(said["fields"], register.fields, strict=True):
            assert (inner["lsb"], inner["width"]) == (field.lsb, field.width)
            assert inner["access"] == field.access.value
            assert inner["kind"] == field.kind.value
            compared += 1
    assert compared >= 10


def test_systemrdl_compiles_and_elaborates_to_the_map(
    register_map: RegisterMap, tmp_path: Path
) -> None:
    source = tmp_path / "map.rdl"
    source.write_text(to_systemrdl(register_map))
    compiler = RDLCompiler()
    compiler.compile_file(str(source))
    top = compiler.elaborate().top
    found = {
        (node.parent.inst_name, node.inst_name): node
        for node in top.descendants()
        if isinstance(node, FieldNode)
    }
    compared = 0
    for register, field in register_map.fields():
        node = found.pop((register.name, field.name))
        parent = node.parent
        assert isinstance(parent, RegNode)
        assert parent.absolute_address == register.offset
        assert parent.size * 8 == register.width
        said = str(parent.get_property("desc"))
        assert said.endswith("refused while the block is busy.") == register.locked
        assert (node.lsb, node.msb) == (field.lsb, field.msb)
        assert node.is_sw_writable == field.access.writable
        assert node.is_sw_readable == (field.access is not Access.PULSE)
        assert bool(node.get_property("singlepulse")) == (field.access is Access.PULSE)
        said = str(node.get_property("desc"))
        assert said.endswith("A binary32.") == (field.kind is Kind.FLOAT32)
        if field.access in (Access.CONSTANT, Access.MAP_HASH, Access.CONFIG):
            assert node.get_property("reset") == register_map.reset_value(field)
        if field.values is not None:
            encode = node.get_property("encode")
            assert {m.name: m.value for m in encode} == {
                member.name.lower(): int(member) for member in field.values
            }
        compared += 1
    assert not found
    assert compared >= 10


@COMPILERS
def test_c_header_compiles_without_warnings_and_holds_its_assertions(
    register_map: RegisterMap, tmp_path: Path, compiler: str, standard: str
) -> None:
    (tmp_path / "map.h").write_text(to_c_header(register_map))
    lines = ['#include "map.h"', '#include "map.h"', *_assertions(register_map)]
    assert len(lines) > 30

    def compiled(text: list[str]) -> subprocess.CompletedProcess[str]:
        return _compile(compiler, standard, tmp_path, text)

    done = compiled(lines)
    assert done.returncode == 0, done.stderr
    wrong = f'static_assert(NEARSTEP_{register_map.name.upper()}_SIZE == 3, "size");'
    assert compiled([*lines, wrong]).returncode != 0, "the assertions are not looked at"


@COMPILERS
@pytest.mark.parametrize("turned", [False, True], ids=["in order", "in reverse"])
def test_c_headers_of_all_families_go_into_one_file(
    tmp_path: Path, compiler: str, standard: str, turned: bool
) -> None:
    maps = list(FAMILIES.items())[:: -1 if turned else 1]
    for name, register_map in maps:
        (tmp_path / f"{name}.h").write_text(to_c_header(register_map))
    lines = [f'#include "{name}.h"' for name, _ in maps]
    for _, register_map in maps:
        lines += _assertions(register_map)
    assert len(lines) > 1000
    done = _compile(compiler, standard, tmp_path, lines)
    assert done.returncode == 0, done.stderr


@COMPILERS
def test_two_maps_of_one_name_do_not_compile(tmp_path: Path, compiler: str, standard: str) -> None:
    for name in ("default", "wide"):
        (tmp_path / f"{name}.h").write_text(to_c_header(adam_kernel_map(CONFIGS[name])))
    includes = ['#include "default.h"', '#include "wide.h"']
    done = _compile(compiler, standard, tmp_path, includes)
    assert done.returncode != 0
    assert "two register maps are called adam" in done.stderr


def _assertions(register_map: RegisterMap) -> list[str]:
    """Every offset, mask and shift of a map, as C asserts it."""
    prefix = f"NEARSTEP_{register_map.name}".upper()
    lines = [f'static_assert({prefix}_HASH == {register_map.hash():#x}, "hash");']
    for register in register_map:
        for index, name in enumerate(register.word_names()):
            offset = register.offset + 4 * index
            lines.append(f'static_assert({prefix}_{name.upper()}_OFFSET == {offset}, "{name}");')
            lines.append(
                f'static_assert(offsetof(struct {prefix.lower()}, {name}) == {offset}, "{name}");'
            )
        for field in register.fields:
            name = f"{prefix}_{register.name}_{field.name}".upper()
            lines.append(f'static_assert({name}_MASK == {field.mask:#x}, "{name}");')
            lines.append(f'static_assert({name}_SHIFT == {field.lsb}, "{name}");')
    return lines


def _compile(
    compiler: str, standard: str, folder: Path, text: list[str]
) -> subprocess.CompletedProcess[str]:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    source = folder / "check.c"
    source.write_text("\n".join(text) + "\n")
    language = "c++" if compiler == "g++" else "c"
    command = [compiler, f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x"]
    return subprocess.run(
        [*command, language, str(source)], capture_output=True, text=True, check=False
    )


def test_systemrdl_of_all_families_and_tops_goes_into_one_compiler(tmp_path: Path) -> None:
    """What `nearstep registers` writes of each family, and `nearstep rtl --all` of each top."""
    texts = {each.name: to_systemrdl(each) for each in FAMILIES.values()}
    spaces = {
        name: blocks
        for name, generator in GENERATORS.items()
        if (blocks := dict(generator.maps(generator.config())))
    }
    assert len(spaces) >= 5
    for name, blocks in spaces.items():
        texts[f"{name}_registers"] = to_systemrdl_space(f"{name}_registers", name, blocks)
    compiler = RDLCompiler()
    for name, text in texts.items():
        (tmp_path / f"{name}.rdl").write_text(text)
        compiler.compile_file(str(tmp_path / f"{name}.rdl"))
    found = 0
    for register_map in FAMILIES.values():
        top = compiler.elaborate(register_map.name).top
        offsets = {r.inst_name: r.absolute_address for r in top.registers()}
        assert offsets == {register.name: register.offset for register in register_map}
        found += len(offsets)
    for name, blocks in spaces.items():
        top = compiler.elaborate(f"{name}_registers").top
        for block, (address, register_map) in blocks.items():
            node = top.get_child_by_name(block)
            assert isinstance(node, AddrmapNode)
            offsets = {r.inst_name: r.absolute_address - address for r in node.registers()}
            assert offsets == {register.name: register.offset for register in register_map}
            found += len(offsets)
    print(f"{found} registers of {len(texts)} files")
    assert found > 600


def test_no_two_families_share_the_name_of_their_json() -> None:
    names = [json.loads(register_map.to_json())["name"] for register_map in FAMILIES.values()]
    assert sorted(names) == ["adam", "arbiter", "pool", "sync", "updater"]


def test_markdown_names_every_register_field_and_value(register_map: RegisterMap) -> None:
    page = to_markdown(register_map)
    named = 0
    for register, field in register_map.fields():
        assert f"`{register.name}`" in page
        assert field.name == "value" or f"`{field.name}`" in page
        named += 1
        for member in field.values or ():
            assert f"| {int(member)} | `{member.name.lower()}` |" in page
    assert named >= 10


def test_every_format_ends_in_one_newline(register_map: RegisterMap) -> None:
    for name, export in FORMATS.items():
        text = export(register_map)
        assert text.endswith("\n"), name
        assert not text.endswith("\n\n"), name


@pytest.mark.parametrize("name", FAMILIES)
def test_page_in_the_documentation_is_current(name: str) -> None:
    page = DOCS / f"registers-{name}.md"
    expected = to_markdown(FAMILIES[name])
    assert page.read_text() == expected, f"{page.name} is stale: run `make docs`"
