"""A DRAM and its timings that are small enough for proofs of who has it and who refreshes it."""

from dataclasses import replace

from amaranth.hdl import Assert, Module, Value

from nearstep_hw.axdimm.arbiter import ModeArbiter
from nearstep_hw.axdimm.host_command import CODE, code_of, not_selected
from nearstep_hw.axdimm.shared_dram import SharedDram
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import dram_timing

from .toolkit import Inside


class SmallGeometry(DramGeometry):
    """Two bank groups of a bank, with two rows."""

    bank_group_bits = 1
    bank_bits = 0
    row_bits = 1
    burst_column_bits = 1


# Every distance is there, but short.
SHORT = replace(
    dram_timing("DDR4-1600"),
    cl=1,
    cwl=1,
    t_rcd=1,
    t_rp=1,
    t_ras=5,
    t_rc=6,
    t_ccd_s=1,
    t_ccd_l=1,
    t_rrd_s=1,
    t_rrd_l=1,
    t_faw=4,
    t_wr=1,
    t_wtr_s=1,
    t_wtr_l=1,
    t_rtp=1,
    t_rfc=8,
    t_refi=4 * 32,
    t_mrd=2,
    t_mod=4,
    t_zqcs=8,
    t_zqoper=8,
    calibration_interval=4 * 4 * 32,
)


def is_refresh(pins: object, rank: int = 0) -> Value:
    code = pins.address[CODE] == code_of(Command.REF)
    return ~not_selected(pins, rank) & pins.act_n & code


def state_that_ranks_move_together(m: Module, dram: SharedDram, inside: Inside) -> None:
    """The states in which the arbiters of two ranks can be, of a DRAM that has been elaborated.

    They are as one while the controller has the channel, and on the way there.
    """
    first, second = (rank.arbiter for rank in dram.ranks)

    def among(arbiter: ModeArbiter, *states: str) -> Value:
        found = [arbiter.fsm.ongoing(state) for state in states]
        return sum(found[1:], found[0]) != 0

    for states in (("TAKE", "CLOSED"), ("KERNEL",), ("LEAVE",), ("CUT",)):
        m.d.comb += Assert(among(first, *states) == among(second, *states))
    m.d.comb += [
        Assert(inside["arbiter.cut"] == inside["arbiter1.cut"]),
        Assert(~first.astray),
        Assert(~second.astray),
        Assert(first.o_reset == second.o_reset),
        Assert(first.o_enable == second.o_enable),
        Assert(first.o_acceleration == second.o_acceleration),
    ]
