"""Log of refused host accesses."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

COUNT_BITS = 32


class AccessLog(wiring.Component):
    """Latches the first refused access, and counts refused accesses, saturating.

    *Timing*: outputs follow a cycle later.

    Parameters
    ----------
    address_bits : of a byte address in the channel.

    Members
    -------
    i_refused : an access is refused in this cycle.
    i_write, i_address : kind and byte address of the access.
    i_clear : clear the log; an access in this cycle is logged.
    o_seen : an access was refused.
    o_write, o_address : kind and byte address of the first refused access.
    o_count : refused accesses.
    """

    def __init__(self, address_bits: int) -> None:
        super().__init__(
            {
                "i_refused": In(1),
                "i_write": In(1),
                "i_address": In(address_bits),
                "i_clear": In(1),
                "o_seen": Out(1),
                "o_write": Out(1),
                "o_address": Out(address_bits),
                "o_count": Out(COUNT_BITS),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        fresh = Signal()
        m.d.comb += fresh.eq(self.i_clear | ~self.o_seen)
        with m.If(self.i_clear):
            m.d.sync += [self.o_seen.eq(0), self.o_count.eq(0)]
            m.d.sync += [self.o_write.eq(0), self.o_address.eq(0)]
        with m.If(self.i_refused):
            m.d.sync += self.o_seen.eq(1)
            with m.If(fresh):
                m.d.sync += [
                    self.o_write.eq(self.i_write),
                    self.o_address.eq(self.i_address),
                    self.o_count.eq(1),
                ]
            with m.Elif(~self.o_count.all()):
                m.d.sync += self.o_count.eq(self.o_count + 1)
        return m
