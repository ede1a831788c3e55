"""Credits: beats that a stream may still request."""

from collections.abc import Sequence

from amaranth import Array, Elaboratable, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from nearstep_hw.axi.burst import id_width


class BeatCredits(wiring.Component):
    """Counts the beats that each stream may take; streams gain beats together.

    A read mover reserves landing space before it issues a burst, and gains space when beats are
    consumed (`initial` is the capacity); a write mover reserves buffered data before it issues a
    burst, and gains beats when data are produced (`initial` is 0).

    *Timing*: `o_enough` is combinational in `i_stream` and `i_beats`; a beat gained counts from the
    next cycle.

    Parameters
    ----------
    streams : number of streams.
    capacity : most beats of a stream.
    burst_beats : beats of the longest burst.
    initial : beats of each stream after `i_clear`.
    own : streams with a credit of their own.

    Members
    -------
    i_credit : one beat more for every stream but those of `own`.
    i_credit_own : a bit for each of `own`, in order: one beat more for the stream. If `own` is not
        empty.
    i_stream, i_beats : stream and beats of a burst.
    o_enough : the stream has `i_beats` beats.
    i_take : take the beats; only with `o_enough`.
    i_clear : resets all counts to `initial`.
    """

    def __init__(
        self,
        *,
        streams: int,
        capacity: int,
        burst_beats: int,
        initial: int,
        own: Sequence[int] = (),
    ) -> None:
        if not 0 <= initial <= capacity:
            raise ValueError(f"Initial credits must be 0 to {capacity}, not {initial!r}")
        self.streams = streams
        self.capacity = capacity
        self.initial = initial
        self.own = tuple(own)
        super().__init__(
            {
                "i_credit": In(1),
                **({"i_credit_own": In(len(self.own))} if self.own else {}),
                "i_stream": In(id_width(streams)),
                "i_beats": In(bits_for(burst_beats)),
                "o_enough": Out(1),
                "i_take": In(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        # Both count modulo 2**width: their difference is exact, since it never exceeds capacity.
        width = bits_for(self.capacity)
        gained = Signal(width, init=self.initial)
        taken = Array(Signal(width, name=f"taken{i}") for i in range(self.streams))
        held = Signal(width)
        total: Value = gained
        for index, stream in enumerate(self.own):
            gained_own = Signal(width, init=self.initial, name=f"gained{stream}")
            total = Mux(self.i_stream == stream, gained_own, total)
            with m.If(self.i_credit_own[index]):
                m.d.sync += gained_own.eq(gained_own + 1)

        m.d.comb += [
            held.eq(total - taken[self.i_stream]),
            self.o_enough.eq(held >= self.i_beats),
        ]
        with m.If(self.i_credit):
            m.d.sync += gained.eq(gained + 1)
        with m.If(self.i_take):
            m.d.sync += taken[self.i_stream].eq(taken[self.i_stream] + self.i_beats)
        return ResetInserter(self.i_clear)(m)
