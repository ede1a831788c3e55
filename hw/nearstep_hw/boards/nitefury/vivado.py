"""The script for Vivado: cores, sources, constraints, build."""

from nearstep_hw.boards.nitefury.wrapper import CARD, PCIE_CORE, TOP
from nearstep_spec.boards.nitefury import NitefuryConfig
from nearstep_spec.pcie import MSIX_PBA_OFFSET, MSIX_TABLE_OFFSET, REGISTER_BYTES

PART = "xc7a200tfbg484-2"
MEMORY_CORE = "mig_7series_0"
OFFSET_UNIT = 8  # bytes: offsets in the capability lack the lowest three bits
VECTORS = 1

OFF = ("cfg_mgmt_if", "cfg_fc_if", "rcv_msg_if", "err_reporting_if", "pl_interface")
"""Unused interfaces of the PCIe core."""


def _pcie(config: NitefuryConfig) -> dict[str, str]:
    """Return the properties of the core that differ from its defaults or matter."""
    return {
        "mode_selection": "Advanced",
        "Device_Port_Type": "PCI_Express_Endpoint_device",
        "Maximum_Link_Width": "X4",
        "Link_Speed": "5.0_GT/s",
        "Trgt_Link_Speed": "4'h2",
        "Interface_Width": "128_bit",
        "User_Clk_Freq": "125",
        "Ref_Clk_Freq": "100_MHz",
        "PCIe_Blk_Locn": "X0Y0",
        "Max_Payload_Size": "512_bytes",
        "Bar0_Enabled": "true",
        "Bar0_Type": "Memory",
        "Bar0_64bit": "false",
        "Bar0_Prefetchable": "false",
        "Bar0_Scale": "Kilobytes",
        "Bar0_Size": str(REGISTER_BYTES >> 10),
        "Bar1_Enabled": "false",
        "Bar2_Enabled": "true",
        "Bar2_Type": "Memory",
        "Bar2_64bit": "true",
        "Bar2_Prefetchable": "true",
        "Bar2_Scale": "Megabytes",
        "Bar2_Size": str(config.card.memory_bytes >> 20),
        "IntX_Generation": "false",
        "Legacy_Interrupt": "NONE",
        "MSI_Enabled": "false",
        "MSIx_Enabled": "true",
        "MSIx_Table_Size": f"{VECTORS:x}",
        "MSIx_Table_BIR": "BAR_0",
        "MSIx_Table_Offset": f"{MSIX_TABLE_OFFSET // OFFSET_UNIT:x}",
        "MSIx_PBA_BIR": "BAR_0",
        "MSIx_PBA_Offset": f"{MSIX_PBA_OFFSET // OFFSET_UNIT:x}",
        **dict.fromkeys(OFF, "false"),
        "cfg_status_if": "true",
        "cfg_ctl_if": "true",
        "en_ext_clk": "false",
    }


def vivado_flow(config: NitefuryConfig) -> str:
    """Return the text of `vivado.tcl`: `vivado -mode batch -source vivado.tcl`."""
    properties = "\n".join(f"  {name} {{{value}}}" for name, value in _pcie(config).items())
    return f"""\
# NiteFury II with Vivado: vivado -mode batch -source vivado.tcl
# This script was never run: no Vivado was at hand. A core that has no such property, or does not
# keep a value, ends it.
set folder [file dirname [file normalize [info script]]]
set build [file join $folder build]
create_project -force {TOP} $build -part {PART}
set_property target_language Verilog [current_project]

proc configure {{core values}} {{
  foreach {{name value}} $values {{
    if {{[lsearch -exact [list_property $core] CONFIG.$name] < 0}} {{
      error "$core has no property $name"
    }}
  }}
  set all {{}}
  foreach {{name value}} $values {{ lappend all CONFIG.$name $value }}
  set_property -dict $all $core
  foreach {{name value}} $values {{
    set got [get_property CONFIG.$name $core]
    if {{$got ne $value}} {{ error "$core has $name $got, not $value" }}
  }}
}}

# The PCIe hard block: Gen2 x4, 128 bits at 125 MHz. BAR 0 has the registers, BAR 2 the DRAM; the
# offsets of the MSI-X table are in units of {OFFSET_UNIT} bytes.
create_ip -name pcie_7x -vendor xilinx.com -library ip -module_name {PCIE_CORE}
configure [get_ips {PCIE_CORE}] {{
{properties}
}}

# The memory controller: DDR3-800 on 16 pins, AXI4 of 128 bits at 100 MHz.
create_ip -name mig_7series -vendor xilinx.com -library ip -module_name {MEMORY_CORE}
set core_folder [file dirname [get_property IP_FILE [get_ips {MEMORY_CORE}]]]
file copy -force [file join $folder mig.prj] $core_folder
set_property -dict [list CONFIG.XML_INPUT_FILE mig.prj CONFIG.RESET_BOARD_INTERFACE Custom] \\
  [get_ips {MEMORY_CORE}]
generate_target all [get_ips]

add_files [list [file join $folder {TOP}.v] [file join $folder {CARD}.v]]
add_files -fileset constrs_1 [file join $folder pins.xdc]
# Behind those of the PCIe core, which has its lanes on other transceivers.
set_property PROCESSING_ORDER LATE [get_files pins.xdc]
set_property top {TOP} [current_fileset]

launch_runs impl_1 -jobs 4
wait_on_run impl_1
open_run impl_1
report_utilization -file [file join $build utilization.txt]
report_timing_summary -file [file join $build timing.txt]
report_cdc -file [file join $build crossings.txt]
if {{[get_property SLACK [get_timing_paths]] < 0}} {{ error "timing failed: $build/timing.txt" }}
write_bitstream -force [file join $build {TOP}.bit]
"""
