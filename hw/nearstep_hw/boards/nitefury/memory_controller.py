"""The project of the memory controller (MIG 7 series): DDR3-800, 16 pins, AXI4."""

from xml.etree import ElementTree

from nearstep_hw.boards.nitefury.constraints import memory_pins
from nearstep_spec.boards.nitefury import MEMORY_BYTES, MEMORY_LANES

CORE = "mig_7series_0"
WORD_BITS = 32
INPUT_MHZ = 200

OPTIONS = {
    "ModuleName": CORE,
    "dci_inouts_inputs": "1",
    "dci_inputs": "1",
    "Debug_En": "OFF",
    "DataDepth_En": "1024",
    "LowPower_En": "ON",
    "XADC_En": "Enabled",
    "TargetFPGA": "xc7a200t-fbg484/-2",
    "Version": "4.2",
    "SystemClock": "Differential",
    "ReferenceClock": "Use System Clock",
    "SysResetPolarity": "ACTIVE LOW",
    "BankSelectionFlag": "FALSE",
    "InternalVref": "0",
    "dci_hr_inouts_inputs": "50 Ohms",
    "dci_cascade": "0",
}
"""Options of the project. The clock of 200 MHz is also the reference of the delays."""

CONTROLLER = {
    "MemoryDevice": "DDR3_SDRAM/Components/MT41K256M16XX-125",
    "TimePeriod": "2500",
    "VccAuxIO": "1.8V",
    "PHYRatio": "4:1",
    "InputClkFreq": str(INPUT_MHZ),
    "UIExtraClocks": "0",
    "MMCM_VCO": "800",
    "MMCMClkOut0": "1.000",
    "MMCMClkOut1": "1",
    "MMCMClkOut2": "1",
    "MMCMClkOut3": "1",
    "MMCMClkOut4": "1",
    "DataWidth": "16",
    "DeepMemory": "1",
    "DataMask": "1",
    "ECC": "Disabled",
    "Ordering": "Strict",
    "BankMachineCnt": "4",
    "CustomPart": "TRUE",
    "NewPartName": "MT41K512M16XX-125",
    "RowAddress": "16",
    "ColAddress": "10",
    "BankAddress": "3",
    "MemoryVoltage": "1.5V",
    "C0_MEM_SIZE": str(MEMORY_BYTES),
    "UserMemoryAddressMap": "BANK_ROW_COLUMN",
}
"""Options of the controller: a part of 8 Gb, derived from the part of 4 Gb that the core supports.
"""

TIMING = {
    "tcke": "5", "tfaw": "40", "tras": "35", "trcd": "13.75", "trefi": "7.8", "trfc": "350",
    "trp": "13.75", "trrd": "7.5", "trtp": "7.5", "twtr": "7.5",
}  # fmt: skip
"""Nanoseconds, tREFI in microseconds. Source: Micron, 8Gb DDR3L (MT41K512M16), -125."""

MODES = {
    "mrBurstLength": ("Burst Length", "8 - Fixed"),
    "mrBurstType": ("Read Burst Type and Length", "Sequential"),
    "mrCasLatency": ("CAS Latency", "6"),
    "mrMode": ("Mode", "Normal"),
    "mrDllReset": ("DLL Reset", "No"),
    "mrPdMode": ("DLL control for precharge PD", "Slow Exit"),
    "emrDllEnable": ("DLL Enable", "Enable"),
    "emrOutputDriveStrength": ("Output Driver Impedance Control", "RZQ/7"),
    "emrMirrorSelection": ("Address Mirroring", "Disable"),
    "emrCSSelection": ("Controller Chip Select Pin", "Disable"),
    "emrRTT": ("RTT (nominal) - On Die Termination (ODT)", "RZQ/4"),
    "emrPosted": ("Additive Latency (AL)", "0"),
    "emrOCD": ("Write Leveling Enable", "Disabled"),
    "emrDQS": ("TDQS enable", "Enabled"),
    "emrRDQS": ("Qoff", "Output Buffer Enabled"),
    "mr2PartialArraySelfRefresh": ("Partial-Array Self Refresh", "Full Array"),
    "mr2CasWriteLatency": ("CAS write latency", "5"),
    "mr2AutoSelfRefresh": ("Auto Self Refresh", "Enabled"),
    "mr2SelfRefreshTempRange": ("High Temparature Self Refresh Rate", "Normal"),
    "mr2RTTWR": ("RTT_WR - Dynamic On Die Termination (ODT)", "Dynamic ODT off"),
}
"""Mode registers, by the names of the core: its spelling is part of the format."""


def memory_project(id_bits: int) -> str:
    """Return the text of `mig.prj` for AXI4 IDs of `id_bits` bits."""
    root = ElementTree.Element("Project", NoOfControllers="1")
    for name, text in OPTIONS.items():
        ElementTree.SubElement(root, name).text = text
    controller = ElementTree.SubElement(root, "Controller", number="0")
    for name, text in CONTROLLER.items():
        ElementTree.SubElement(controller, name).text = text
    selection = ElementTree.SubElement(controller, "PinSelection")
    for port, pin, standard in memory_pins():
        ElementTree.SubElement(
            selection, "Pin", IN_TERM="", IOSTANDARD=standard, PADName=pin, SLEW="", VCCAUX_IO="",
            name=port,
        )  # fmt: skip
    clock = ElementTree.SubElement(controller, "System_Clock")
    ElementTree.SubElement(clock, "Pin", Bank="15", PADName="J19/H19(CC_P/N)", name="sys_clk_p/n")
    control = ElementTree.SubElement(controller, "System_Control")
    for name in ("sys_rst", "init_calib_complete", "tg_compare_error"):
        ElementTree.SubElement(control, "Pin", Bank="Select Bank", PADName="No connect", name=name)
    timing = ElementTree.SubElement(controller, "TimingParameters")
    ElementTree.SubElement(timing, "Parameters", TIMING)
    for mode, (name, text) in MODES.items():
        ElementTree.SubElement(controller, mode, name=name).text = text
    ElementTree.SubElement(controller, "PortInterface").text = "AXI"
    axi = ElementTree.SubElement(controller, "AXIParameters")
    for name, text in {
        "C0_C_RD_WR_ARB_ALGORITHM": "RD_PRI_REG",
        "C0_S_AXI_ADDR_WIDTH": str((MEMORY_BYTES - 1).bit_length()),
        "C0_S_AXI_DATA_WIDTH": str(WORD_BITS * MEMORY_LANES),
        "C0_S_AXI_ID_WIDTH": str(id_bits),
        "C0_S_AXI_SUPPORTS_NARROW_BURST": "0",
    }.items():
        ElementTree.SubElement(axi, name).text = text
    ElementTree.indent(root)
    head = '<?xml version="1.0" encoding="UTF-8" standalone="no" ?>\n'
    return head + ElementTree.tostring(root, encoding="unicode") + "\n"
