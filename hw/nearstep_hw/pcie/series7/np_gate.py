"""Holds back requests that are not posted."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

EXTRA = 2
"""Requests that the block may still show while it is told to hold them back."""

RESERVED = 6
"""Requests for which there is space when the block is told to hold them back: it may show `EXTRA`
more, one may wait to be taken, and the block hears of it two cycles late."""


class NonPostedGate(wiring.Component):
    """Turns credits of the endpoint into `rx_np_ok`, and counts what comes.

    While the block holds requests back, posted ones pass them. After reset the first credit comes
    late where it crosses clocks, and `EXTRA` requests may come before it: the endpoint has space
    for them, and the count goes below zero.

    *Timing*: one cycle.

    Parameters
    ----------
    requests : most credits that the endpoint gives, more than `RESERVED`.

    Members
    -------
    i_credit : a credit.
    i_take : a request that is not posted has come.
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
