"""Joins the DDR4 rank model and the host memory controller model to ports under cocotb.

Ports have the names of `DfiSignature`. All outputs that these models sample in the middle of a
cycle are registers of the design.
"""

from collections.abc import Sequence

from cocotb.handle import HierarchyObject
from cocotb.triggers import FallingEdge, RisingEdge

from nearstep_hw.dram.dfi import HOST_DATA_BYTES, HOST_PHASES, PHASES
from nearstep_sim.models.dram.device import Ddr4Device, Ddr4Port
from nearstep_sim.models.dram.host import HostController
from nearstep_spec.dram.command import DESELECT, Pins

__all__ = ["DfiRank", "HostBus"]

PINS = ("act_n", "address", "bg", "ba")


class _Members:
    """Handles of `<prefix>__<member>`."""

    def __init__(self, dut: HierarchyObject, prefix: str, phases: int) -> None:
        self.phases = [
            {name: getattr(dut, f"{prefix}__p{phase}__{name}") for name in ("cs_n", *PINS)}
            for phase in range(phases)
        ]
        for name in ("wrdata", "wrdata_mask", "wrdata_en", "rddata", "rddata_valid"):
            setattr(self, name, getattr(dut, f"{prefix}__{name}"))


class DfiRank:
    """A rank on a DFI port that the design drives: judges every command, keeps the data.

    `device` raises `DramViolationError` out of `run`.
    """

    def __init__(self, dut: HierarchyObject, prefix: str, device: Ddr4Device) -> None:
        self.dut = dut
        self.device = device
        self.port = Ddr4Port(device)
        self.pins = _Members(dut, prefix, PHASES)
        self.commands = 0
        self.pins.rddata_valid.value = 0

    def _slot(self, phase: dict[str, object]) -> Pins:
        if phase["cs_n"].value:
            return DESELECT
        self.commands += 1
        return Pins(0, *(int(phase[name].value) for name in PINS))

    async def run(self) -> None:
        """Follow the port for ever, from the next cycle on."""
        pins = self.pins
        while True:
            await RisingEdge(self.dut.clk)
            slots = [self._slot(phase) for phase in pins.phases]
            data, mask = None, 0
            if pins.wrdata_en.value:
                data = int(pins.wrdata.value).to_bytes(self.port.data_bytes, "little")
                mask = int(pins.wrdata_mask.value)
            answer = self.port.tick(slots, data, mask)
            pins.rddata_valid.value = int(answer is not None)
            if answer is not None:
                pins.rddata.value = int.from_bytes(answer, "little")


class HostBus:
    """A host on the host's bus of the design; `ranks` bits of chip select in a slot.

    `host` raises `HostDataError` out of `run`.
    """

    def __init__(
        self, dut: HierarchyObject, prefix: str, host: HostController, *, ranks: int = 1
    ) -> None:
        self.dut = dut
        self.host = host
        self.none = (1 << ranks) - 1
        self.pins = _Members(dut, prefix, HOST_PHASES)
        for phase in self.pins.phases:
            phase["cs_n"].value = self.none
        self.pins.wrdata_en.value = 0

    def _drive(self, ranks: Sequence[int | None], slots: Sequence[Pins]) -> None:
        for phase, rank, slot in zip(self.pins.phases, ranks, slots, strict=True):
            phase["cs_n"].value = self.none if rank is None else self.none & ~(1 << rank)
            if rank is not None:
                for name in PINS:
                    phase[name].value = getattr(slot, name)

    async def run(self) -> None:
        """Follow the port for ever, from this cycle on."""
        pins = self.pins
        while True:
            await FallingEdge(self.dut.clk)
            data = None
            if pins.rddata_valid.value:
                data = int(pins.rddata.value).to_bytes(HOST_DATA_BYTES, "little")
            cycle = self.host.tick(data)
            self._drive(cycle.ranks, cycle.slots)
            pins.wrdata_en.value = int(cycle.wrdata is not None)
            if cycle.wrdata is not None:
                pins.wrdata.value = int.from_bytes(cycle.wrdata, "little")
                pins.wrdata_mask.value = cycle.wrdata_mask
