"""Register maps of a whole design: one SystemRDL text, and pages made from it."""

from pathlib import Path

import pytest
from systemrdl import RDLCompiler
from systemrdl.node import AddrmapNode

from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import device_maps
from nearstep_spec.csr.export import html, to_systemrdl_space
from nearstep_spec.csr.export.html import HtmlError, write_html
from nearstep_spec.csr.model import RegisterMapError
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import adam_kernel_map

SPACES = {"module": DimmConfig().maps(), "pool": device_maps(CoarseConfig(groups=2))}


@pytest.mark.parametrize("name", SPACES)
def test_every_block_lies_at_its_address(name: str, tmp_path: Path) -> None:
    blocks = SPACES[name]
    path = tmp_path / "space.rdl"
    path.write_text(to_systemrdl_space(f"{name}_space", "All.", blocks))
    compiler = RDLCompiler()
    compiler.compile_file(str(path))
    top = compiler.elaborate().top
    found = {
        each.inst_name: each.absolute_address
        for each in top.children()
        if isinstance(each, AddrmapNode)
    }
    assert len(found) >= 3
    assert found == {block: address for block, (address, _) in blocks.items()}
    for block, (_, each) in blocks.items():
        assert len(list(top.get_child_by_name(block).registers())) == len(list(each))


def test_two_maps_of_one_name_are_refused() -> None:
    first = adam_kernel_map(UpdateKernelConfig())
    second = adam_kernel_map(UpdateKernelConfig(lanes=4))
    assert first.name == second.name
    with pytest.raises(RegisterMapError, match="b: there is another map of the name 'adam'"):
        to_systemrdl_space("top", "All.", {"a": (0, first), "b": (4096, second)})
    with pytest.raises(RegisterMapError, match="a: its map has the name of the address space"):
        to_systemrdl_space("adam", "All.", {"a": (0, first)})


def test_pages_are_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [to_systemrdl_space(f"{name}_space", "All.", each) for name, each in SPACES.items()]
    write_html(texts, tmp_path / "a", "registers")
    monkeypatch.setattr("time.time", lambda: 1e9)
    write_html(texts, tmp_path / "b", "registers")
    files = [path for path in sorted((tmp_path / "a").rglob("*")) if path.is_file()]
    assert len(files) > 60
    for path in files:
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
    data = "".join(path.read_text() for path in (tmp_path / "a" / "data").iterdir())
    assert all(f"{name}_space" in data for name in SPACES)


def test_a_missing_package_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(html.PACKAGES, "no_such_module", "no-such-package")
    with pytest.raises(HtmlError, match="need the package no-such-package") as caught:
        write_html([], tmp_path / "pages", "registers")
    assert caught.value.package == "no-such-package"
    assert not (tmp_path / "pages").exists()
