"""Mode registers as set by the host, and lost commands of the host."""

from amaranth import Cat, Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.host_command import HostCommandLayout
from nearstep_hw.dram.dfi import HOST_PHASES
from nearstep_spec.dram.command import ADDRESS_BITS
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.mode_registers import MODE_REGISTERS, supported_modes
from nearstep_spec.dram.timing import DramTiming

__all__ = ["LOST_BITS", "HostModes"]

LOST_BITS = ADDRESS_BITS + 4  # address pins, BA and BG


class HostModes(wiring.Component):
    """Tracks the host's MRS of a rank.

    An executed MRS is valid until the next one of its register. Outside normal mode MRS is lost:
    the controller relies on the current registers, and a deferred MRS would need the host to wait.
    MRS of a register that the DRAM does not have (MR7 is for a registering clock driver) and a
    command of the reserved code outside normal mode are lost as well.

    *Timing*: `o_unsupported` follows a cycle later, `o_lost` in the same cycle.

    Parameters
    ----------
    timing, geometry : of the rank.

    Members
    -------
    i_slot : commands of the host; legal commands that can be lost are several clocks apart.
    i_pass : commands are forwarded to the DRAM.
    o_unsupported : a bit for each mode register, MR0 in bit 0, whose value the controller does not
        support; see `supported_modes`. Supported values are assumed after reset.
    o_lost, o_command : a command is lost, and its pins: address, BA, BG.
    """

    def __init__(self, timing: DramTiming, geometry: DramGeometry) -> None:
        self.timing = timing
        super().__init__(
            {
                "i_slot": In(HostCommandLayout(geometry)).array(HOST_PHASES),
                "i_pass": In(1),
                "o_unsupported": Out(MODE_REGISTERS),
                "o_lost": Out(1),
                "o_command": Out(LOST_BITS),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        supported = supported_modes(self.timing)
        for slot in self.i_slot:
            number = Cat(slot.ba, slot.bg)
            lost = (slot.set_mode & (~self.i_pass | (number >= MODE_REGISTERS))) | (
                slot.reserved & ~self.i_pass
            )
            with m.If(lost):
                m.d.comb += [
                    self.o_lost.eq(1),
                    self.o_command.eq(Cat(slot.address, slot.ba, slot.bg)),
                ]
            for register, (mask, value) in enumerate(supported):
                with m.If(slot.set_mode & self.i_pass & (number == register)):
                    m.d.sync += self.o_unsupported[register].eq((slot.address & mask) != value)
        return m
