"""Address of the host's column commands."""

from amaranth import Cat, Const, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.axdimm.host_command import HostCommandLayout
from nearstep_hw.axdimm.host_modes import LOST_BITS
from nearstep_hw.dram.dfi import HOST_PHASES
from nearstep_hw.dram.request import rank_select
from nearstep_spec.axdimm.registers import WINDOW_BYTES
from nearstep_spec.csr.model import LINE_BYTES
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.dram.timing import BURST_LENGTH


class HostAccess(wiring.Component):
    """Computes the byte address of the host's read or write, from its bank, the row opened in the
    bank, and its column.

    *Timing*: combinational.

    Parameters
    ----------
    mapping : of the channel.

    Members
    -------
    i_slot : commands of the host, see `HostFrontEnd`; at most one is a read or write.
    i_row : rows by bank, see `HostShadow`; those of rank 0 first.
    o_read, o_write : kind of the access.
    o_address : byte address in the channel.
    o_window, o_line : the access is in the CSR window, and its line.
    o_command : pins of the access: address, BA, BG.
    o_turned : the burst does not begin with the first byte: the DRAM reorders the burst, the window
        does not.
    o_rank : a bit for each rank, high for that of the access; with two ranks.
    """

    def __init__(self, mapping: AddressMapping) -> None:
        self.mapping = mapping
        geometry = mapping.geometry
        super().__init__(
            {
                "i_slot": In(HostCommandLayout(geometry)).array(geometry.ranks * HOST_PHASES),
                "i_row": In(geometry.row_bits).array(geometry.all_banks),
                "o_read": Out(1),
                "o_write": Out(1),
                "o_address": Out(geometry.address_bits),
                "o_window": Out(1),
                "o_line": Out(range(WINDOW_BYTES // LINE_BYTES)),
                "o_command": Out(LOST_BITS),
                "o_turned": Out(1),
                **({"o_rank": Out(geometry.ranks)} if geometry.ranks > 1 else {}),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        geometry = self.mapping.geometry
        bank = Signal(range(geometry.all_banks))
        at = geometry.bank_bits + geometry.bank_group_bits  # of the rank
        column = Signal(geometry.column_bits)
        row = Signal(geometry.row_bits)
        for number, slot in enumerate(self.i_slot):
            with m.If(slot.read | slot.write):
                m.d.comb += [
                    bank.eq(Cat(slot.bank, Const(number // HOST_PHASES, geometry.rank_bits))),
                    column.eq(slot.address),
                    self.o_read.eq(slot.read),
                    self.o_write.eq(slot.write),
                    self.o_command.eq(Cat(slot.address, slot.ba, slot.bg)),
                ]
        with m.Switch(bank):
            for number, each in enumerate(self.i_row):
                with m.Case(number):
                    m.d.comb += row.eq(each)
        words = {
            "row": row,
            "column": column[exact_log2(BURST_LENGTH) :],
            "bank": bank[: geometry.bank_bits],
            "bankgroup": bank[geometry.bank_bits : at],
        }
        beat = Cat(words[word] for word in self.mapping.fields)
        if geometry.ranks > 1:
            low = self.mapping.rank.shift - exact_log2(BEAT_BYTES)
            beat = Cat(beat[:low], bank[at:], beat[low:])
            m.d.comb += self.o_rank.eq(rank_select(geometry, bank))
        window = exact_log2(WINDOW_BYTES)
        m.d.comb += [
            self.o_address.eq(beat << exact_log2(BEAT_BYTES)),
            self.o_line.eq(self.o_address[exact_log2(LINE_BYTES) : window]),
            self.o_window.eq(self.o_address[window:].all()),
            self.o_turned.eq(column[: exact_log2(BURST_LENGTH)].any()),
        ]
        return m
