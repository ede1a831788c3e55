"""Credits for non-posted requests."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

REQUEST_BITS = 2  # of pcie_cq_np_req


class NonPostedCredits(wiring.Component):
    """Gives the hard block a credit for each non-posted request that fits in the queue.

    The hard block holds back non-posted requests without a credit, and posted ones pass them.

    *Timing*: a credit a cycle.

    Parameters
    ----------
    requests : depth of the queue.

    Members
    -------
    i_credit : a request has left the queue.
    o_request : `pcie_cq_np_req`.

    Ref: PG213, "Selective Flow Control for Non-Posted Requests".
    """

    def __init__(self, requests: int) -> None:
        self.requests = requests
        super().__init__({"i_credit": In(1), "o_request": Out(REQUEST_BITS)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        owed = Signal(range(self.requests + 1), init=self.requests)
        give = Signal()
        m.d.comb += give.eq(owed != 0)
        m.d.sync += [owed.eq(owed + self.i_credit - give), self.o_request.eq(give)]
        return m
