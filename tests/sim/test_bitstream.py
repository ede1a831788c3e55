"""What a bitstream for ECP5 holds, read back with the open data base."""

import re

import pytest

from nearstep_hw.generate import verilog
from nearstep_sim.verilate.build import run_tool

pytestmark = pytest.mark.deep
TOP = "fp32_mul"
DEFAULT = "1111111111111111"
"""Of the word of a LUT that is not in a bitstream: its bits are those of an empty chip."""
LUT = re.compile(r"^word: (\S+\.K\d\.INIT) ([01]{16})$", re.M)
TILE = re.compile(r"^\.tile (\S+)\n((?:.+\n)*)", re.M)


def run(folder, tool, *arguments):
    run_tool([f"yowasp-{tool}", *arguments], folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A placed and routed multiplier: its configuration, and the bitstream that is packed of it."""
    folder = tmp_path_factory.mktemp("bitstream")
    (folder / "top.v").write_text(verilog(TOP))
    run(folder, "yosys", "-q", "-p", f"read_verilog top.v; synth_ecp5 -top {TOP} -json top.json")
    run(
        folder, "nextpnr-ecp5", "-q", "--85k", "--package", "CABGA756", "--seed", "1",
        "--json", "top.json", "--lpf-allow-unconstrained", "--textcfg", "top.config",
    )  # fmt: skip
    run(folder, "ecppack", "--input", "top.config", "--bit", "top.bit")
    run(folder, "ecpunpack", "--input", "top.bit", "--textcfg", "back.config")
    return folder


def luts(text):
    """Truth table of each LUT that is configured, by tile and name."""
    return {
        (tile, name): word for tile, body in TILE.findall(text) for name, word in LUT.findall(body)
    }


def test_what_was_unpacked_packs_to_the_same_bits(folder):
    run(folder, "ecppack", "--input", "back.config", "--bit", "back.bit")
    bits = (folder / "top.bit").read_bytes()
    assert len(bits) > 1_000_000
    assert (folder / "back.bit").read_bytes() == bits


def test_every_lut_has_its_truth_table_in_the_bitstream(folder):
    packed = luts((folder / "top.config").read_text())
    unpacked = luts((folder / "back.config").read_text())
    print(f"{len(packed)} LUTs, {len(unpacked)} differ from an empty chip")
    assert len(unpacked) > 1000
    assert {key: packed[key] for key in unpacked} == unpacked
    assert {packed[key] for key in packed.keys() - unpacked.keys()} <= {DEFAULT}


def test_another_truth_table_gives_other_bits_and_is_read_back(folder):
    text = (folder / "top.config").read_text()
    (tile, name), word = next((k, w) for k, w in luts(text).items() if w != DEFAULT)
    other = word[1:] + ("0" if word[0] == "1" else "1")
    at = text.index(f"word: {name} {word}", text.index(f".tile {tile}\n"))
    changed = text[:at] + f"word: {name} {other}" + text[at + len(f"word: {name} {word}") :]
    (folder / "other.config").write_text(changed)
    run(folder, "ecppack", "--input", "other.config", "--bit", "other.bit")
    assert (folder / "other.bit").read_bytes() != (folder / "top.bit").read_bytes()
    run(folder, "ecpunpack", "--input", "other.bit", "--textcfg", "again.config")
    again = luts((folder / "again.config").read_text())
    before = luts((folder / "back.config").read_text())
    assert {key for key in again if again[key] != before.get(key)} == {(tile, name)}
    assert again[tile, name] == other
