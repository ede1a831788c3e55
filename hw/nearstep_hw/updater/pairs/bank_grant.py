"""Arbitration of the pairs of a beat for banks of two write ports."""

from amaranth import Elaboratable, Module, Signal
from amaranth.hdl import Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

__all__ = ["BankGrant"]


def _lowest(m: Module, wanted: Value, name: str) -> Signal:
    """Return the lowest set bit."""
    one = Signal(len(wanted), name=name)
    m.d.comb += one.eq(wanted & ~(wanted - 1)[: len(wanted)])
    return one


class BankGrant(wiring.Component):
    """Grants each bank its first two requests, in the order of the requesters.

    Requests of a bank are granted in order, also across cycles; the first grant of a cycle precedes
    the second. Combinational.

    Parameters
    ----------
    requesters, banks : banks a power of two.

    Members
    -------
    i_want : In(requesters), the requests.
    i_bank : In, the bank of each request.
    o_first, o_second : for each bank, the granted requester, at most one bit each.
    o_left : Out(requesters), the requests without a grant.
    """

    def __init__(self, *, requesters: int, banks: int) -> None:
        self.requesters = requesters
        self.banks = banks
        super().__init__(
            {
                "i_want": In(requesters),
                "i_bank": In(exact_log2(banks)).array(requesters),
                "o_first": Out(requesters).array(banks),
                "o_second": Out(requesters).array(banks),
                "o_left": Out(requesters),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        granted: Value = Signal(self.requesters, name="nobody")
        for bank in range(self.banks):
            asking = Signal(self.requesters, name=f"asking{bank}")
            for k in range(self.requesters):
                m.d.comb += asking[k].eq(self.i_want[k] & (self.i_bank[k] == bank))
            first = _lowest(m, asking, f"first{bank}")
            second = _lowest(m, asking & ~first, f"second{bank}")
            m.d.comb += [self.o_first[bank].eq(first), self.o_second[bank].eq(second)]
            granted = granted | first | second
        m.d.comb += self.o_left.eq(self.i_want & ~granted)
        return m
