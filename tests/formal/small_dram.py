"""A DRAM and its timings that are small enough for proofs of who has it and who refreshes it."""

from dataclasses import replace

from amaranth.hdl import Value

from nearstep_hw.axdimm.host_command import CODE, code_of
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import dram_timing


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


def is_refresh(pins: object) -> Value:
    return ~pins.cs_n & pins.act_n & (pins.address[CODE] == code_of(Command.REF))
