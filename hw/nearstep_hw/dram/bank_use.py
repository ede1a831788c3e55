"""Banks that beats in flight to the DRAM still need."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for


class BankUse(wiring.Component):
    """Tracks for every bank whether a beat that entered and has not left needs it.

    Beats leave in the order in which they entered. A bank is in use until its
    last beat leaves: the number of the last beat is stored for each bank, not a count.

    *Timing*: outputs are registers.

    Parameters
    ----------
    banks : number of banks.
    beats : most beats inside.

    Members
    -------
    i_enter, i_enter_bank : a beat enters.
    i_leave, i_leave_bank : the oldest beat leaves.
    o_used : a bit for each bank.
    o_beats : beats inside.
    """

    def __init__(self, *, banks: int, beats: int) -> None:
        self.banks = banks
        self.beats = beats
        super().__init__(
            {
                "i_enter": In(1),
                "i_enter_bank": In(range(banks)),
                "i_leave": In(1),
                "i_leave_bank": In(range(banks)),
                "o_used": Out(banks),
                "o_beats": Out(range(beats + 1)),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        number = bits_for(self.beats)  # beat numbers are modulo a power of two above `beats`
        m.submodules.last = last = Memory(shape=number, depth=self.banks, init=[])
        write_port = last.write_port()
        read_port = last.read_port(domain="comb")
        entering = Signal(number)
        leaving = Signal(number)
        begins = Signal(self.banks)
        ends = Signal(self.banks)

        m.d.comb += [
            write_port.addr.eq(self.i_enter_bank),
            write_port.data.eq(entering),
            write_port.en.eq(self.i_enter),
            read_port.addr.eq(self.i_leave_bank),
            begins.eq(Mux(self.i_enter, 1 << self.i_enter_bank, 0)),
            ends.eq(Mux(self.i_leave & (read_port.data == leaving), 1 << self.i_leave_bank, 0)),
        ]
        m.d.sync += [
            entering.eq(entering + self.i_enter),
            leaving.eq(leaving + self.i_leave),
            self.o_beats.eq(self.o_beats + self.i_enter - self.i_leave),
            self.o_used.eq((self.o_used & ~ends) | begins),
        ]
        return m
