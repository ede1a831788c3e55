"""Flow control of non-posted requests."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

EXTRA = 2
"""Requests that the block may still deliver while `rx_np_ok` is low."""

RESERVED = 6
"""Credits left when `rx_np_ok` falls: the block may deliver `EXTRA` more requests, one may wait to
be taken, and the block sees `rx_np_ok` two cycles late.
"""


class NonPostedGate(wiring.Component):
    """Drives `rx_np_ok` from the endpoint's credits less the requests received.

    While the block holds back non-posted requests, posted ones pass them. After reset, `EXTRA`
    requests may arrive before the first credit, if credits cross clocks: the endpoint has space for
    the requests, and the count is negative.

    *Timing*: two cycles.

    Parameters
    ----------
    requests : most credits that the endpoint gives, more than `RESERVED`.

    Members
    -------
    i_credit : a credit.
    i_take : a non-posted request was received.
    o_ok : `rx_np_ok`.

    Ref: PG054, "Receive Interface", rx_np_ok.
    """

    def __init__(self, requests: int) -> None:
        if requests <= RESERVED:
            raise ValueError(f"Requests must be more than {RESERVED}, not {requests!r}")
        self.requests = requests
        super().__init__({"i_credit": In(1), "i_take": In(1), "o_ok": Out(1)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        credits = Signal(range(-EXTRA, self.requests + 1))
        m.d.sync += [
            credits.eq(credits + self.i_credit - self.i_take),
            self.o_ok.eq(credits > RESERVED),
        ]
        return m
