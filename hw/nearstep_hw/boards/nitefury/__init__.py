"""Project files for NiteFury II, see `project`: neither flow was run; no bitstream exists."""

from functools import partial

from nearstep_hw.boards.nitefury.constraints import open_pins, pins
from nearstep_hw.boards.nitefury.memory_controller import memory_project
from nearstep_hw.boards.nitefury.open_flow import open_flow
from nearstep_hw.boards.nitefury.vivado import vivado_flow
from nearstep_hw.boards.nitefury.wrapper import CARD, TOP, boxes, wrapper
from nearstep_hw.smartssd.series7_card import Series7Card
from nearstep_hw.updater.generators import functional_unit
from nearstep_hw.updater.unit_instance import UnitInstance
from nearstep_hw.verilog import to_verilog
from nearstep_spec.boards.nitefury import NitefuryConfig

__all__ = ["CARD", "TOP", "card", "project", "surroundings"]

UNIT = "smartssd_fu"


def card(config: NitefuryConfig) -> Series7Card:
    """Return the design without the hard block and the memory controller."""
    unit = partial(UnitInstance, module=UNIT)
    return Series7Card(config.card, unit=unit, crossed=True)


def surroundings(config: NitefuryConfig, design: Series7Card) -> dict[str, str]:
    """Return the files of the project by name, without the Verilog of the card `design`."""
    return {
        f"{TOP}.v": wrapper(design),
        "boxes.v": boxes(design),
        "pins.xdc": pins(),
        "pins_open.xdc": open_pins(),
        "mig.prj": memory_project(len(design.m_axi.ar.payload.id)),
        "vivado.tcl": vivado_flow(config),
        "Makefile": open_flow(),
    }


def project(config: NitefuryConfig | None = None) -> dict[str, str]:
    """Return the files of the project by name: Verilog, constraints, and the scripts of both flows.

    - `vivado.tcl` makes the cores of the PCIe block and of the memory controller, and builds.
    - `Makefile` is for Yosys and openXC7; `make synth` needs only Yosys, `make bit` also sources of
      both cores, which are not included.

    The texts are the same for the same configuration and tools.
    """
    config = config or NitefuryConfig()
    design = card(config)
    files = surroundings(config, design)
    verilog = to_verilog(design, CARD, {UNIT: functional_unit(config.card.kernel)})
    return {f"{CARD}.v": verilog, **files}
