"""Scan of a gradient stream for infinities and NaNs, and its sum of squares."""

from amaranth import Array, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.fp import add, convert, mul
from nearstep_hw.fp.pipeline import Pipeline, Staged
from nearstep_hw.updater.pairs.layout import COUNT_WIDTH
from nearstep_spec.fp import FP32, FpFormat

__all__ = ["FP64", "PARTIALS", "GradientScan"]

FP64 = FpFormat(11, 52)
PARTIALS = 8
"""Partial sums: as many as the adder has stages."""


class PartialSums(wiring.Component):
    """Adds binary64 numbers to the partial sums in turn, and at the end the partial sums.

    *Timing*: a number a cycle. `o_done` follows PARTIALS + 2 + (PARTIALS - 1) (PARTIALS + 1)
    cycles after `i_end`. `rst` restarts.

    Members
    -------
    i_valid, i_value : a number; not below zero, and +0 if zero.
    i_end : no number follows.
    o_done, o_sum : the sum of the partial sums, in their order.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "i_valid": In(1),
                "i_value": In(FP64.width),
                "i_end": In(1),
                "o_done": Out(1),
                "o_sum": Out(FP64.width),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        advance, full = Signal(), Signal()  # full: every partial sum has a number
        turn = Signal(range(PARTIALS))  # partial sum that enters the adder, and the one leaving it
        a, b = Signal(FP64.width), Signal(FP64.width)
        pipe = Pipeline(m, en=advance, name="adder")
        z = add.add(pipe, FP64, pipe.source(a), pipe.source(b), depth=PARTIALS, flags=False).z
        leaving = Signal(FP64.width)
        parts = Array(Signal(FP64.width, name=f"part{k}") for k in range(PARTIALS))
        place = Signal(range(PARTIALS))

        m.d.comb += [
            # The adder's contents before the first number count as +0.
            leaving.eq(Mux(full, pipe.at(z, PARTIALS), 0)),
            a.eq(leaving),
            b.eq(self.i_value),
            advance.eq(self.i_valid),
        ]
        with m.If(advance):
            m.d.sync += turn.eq(turn + 1)
            with m.If(turn == PARTIALS - 1):
                m.d.sync += full.eq(1)
        with m.FSM():
            with m.State("ADD"), m.If(self.i_end):
                m.next = "COLLECT"
            with m.State("COLLECT"):
                m.d.comb += advance.eq(1)
                m.d.sync += [parts[turn].eq(leaving), place.eq(place + 1)]
                with m.If(place == PARTIALS - 1):
                    m.d.sync += place.eq(1)
                    m.next = "FIRST"
            with m.State("FIRST"):
                m.d.sync += [self.o_sum.eq(parts[0]), turn.eq(0)]
                m.next = "REDUCE"
            with m.State("REDUCE"):
                m.d.comb += [advance.eq(1), a.eq(self.o_sum), b.eq(parts[place])]
                with m.If(turn == PARTIALS - 1):
                    m.next = "TAKE"
            with m.State("TAKE"):
                m.d.sync += [self.o_sum.eq(pipe.at(z, PARTIALS)), turn.eq(0), place.eq(place + 1)]
                m.next = "REDUCE"
                with m.If(place == PARTIALS - 1):
                    m.next = "DONE"
            with m.State("DONE"):
                m.d.comb += self.o_done.eq(1)
        return m


class GradientScan(wiring.Component):
    """Scans gradients: whether any is infinite or NaN, and the sum of their squares.

    *Timing*: one beat a cycle, without stalls. `o_done` is high `latency` + 1 cycles after the last
    beat is taken.

    *Numerics*: the order is fixed and does not depend on stalls. The squares of a beat are rounded
    to binary32 and added in binary32 by a tree of neighbours. The sum of beat n is added, in
    binary64, to partial sum n mod `PARTIALS`; at the end the partial sums are added in their order.
    No term is negative, so the relative error is at most that of the binary32 part: (1 +
    log2(lanes)) 2**-24, as long as all squares are in the normal range of binary32: for gradients
    above 1.8e19 the sum is infinite; below 1.1e-19 the absolute error of a beat is at most lanes
    2**-150. Equal, bit for bit, to `nearstep_sim.golden.scan.scan`.

    Parameters
    ----------
    lanes : elements of a beat, a power of two.

    Members
    -------
    i : In(stream), lane k in bits 32 k to 32 k + 31; lanes behind the last element are ignored.
    i_start : begins a run in any state.
    i_count : elements; stable during a run.
    o_done : the results below are final.
    o_found_inf : an element is infinite or NaN.
    o_sum : Out(64), binary64; a NaN is 0x7FF8000000000000.

    Attributes
    ----------
    latency : cycles from the cycle after the last beat to `o_done`.

    Ref: Smart-Infinity, IV-C: NaN and Inf must be checked, and the norm known, before an
    update.
    """

    def __init__(self, *, lanes: int = 16) -> None:
        self.lanes = lanes
        levels = exact_log2(lanes)
        self._depth = mul.DEPTH + levels * add.DEPTH + convert.DEPTH
        self.latency = self._depth + PARTIALS + 2 + (PARTIALS - 1) * (PARTIALS + 1)
        super().__init__(
            {
                "i": In(stream.Signature(data.ArrayLayout(FP32.width, lanes))),
                "i_start": In(1),
                "i_count": In(COUNT_WIDTH),
                "o_done": Out(1),
                "o_found_inf": Out(1),
                "o_sum": Out(FP64.width),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        lanes, low = self.lanes, exact_log2(self.lanes)
        launch = Signal()
        beats = Signal(COUNT_WIDTH - low + 1)  # to be taken
        left = Signal.like(beats)  # to be added to a partial sum
        begun = Signal()
        used = self.i_count[:low]  # lanes of the last beat, 0 for all
        taken = Signal()
        words = Signal(data.ArrayLayout(FP32.width, lanes))
        odd = Signal(lanes)

        m.d.comb += [
            self.i.ready.eq((beats != 0) & ~self.i_start),
            taken.eq(self.i.valid & self.i.ready),
        ]
        for lane in range(lanes):
            inside = (beats != 1) | (lane < used) | (used == 0)
            exponent = words[lane][FP32.mantissa : FP32.width - 1]
            m.d.comb += [
                words[lane].eq(Mux(inside, self.i.payload[lane], 0)),
                odd[lane].eq(exponent == FP32.exponent_ones),
            ]
        with m.If(taken):
            m.d.sync += [beats.eq(beats - 1), self.o_found_inf.eq(self.o_found_inf | odd.any())]

        front = Pipeline(m, name="front")
        total = self._sum_of_beat(front, [front.source(words[lane]) for lane in range(lanes)])
        added = front.valid(taken, self._depth)
        m.submodules.sums = sums = PartialSums()
        with m.If(added):
            m.d.sync += left.eq(left - 1)
        m.d.comb += [
            sums.i_valid.eq(added),
            sums.i_value.eq(front.at(total, self._depth)),
            sums.i_end.eq(begun & (left == 0)),
            self.o_done.eq(sums.o_done),
            self.o_sum.eq(sums.o_sum),
        ]
        with m.If(launch):
            number = (self.i_count + (lanes - 1)) >> low
            m.d.sync += [begun.eq(1), beats.eq(number), left.eq(number)]

        top = Module()
        top.submodules.scan = ResetInserter(self.i_start)(m)
        top.d.sync += launch.eq(self.i_start)
        return top

    def _sum_of_beat(self, pipe: Pipeline, lanes: list[Staged]) -> Staged:
        terms = [mul.mul(pipe, FP32, lane, lane, flags=False).z for lane in lanes]
        while len(terms) > 1:
            pairs = zip(terms[0::2], terms[1::2], strict=True)
            terms = [add.add(pipe, FP32, a, b, flags=False).z for a, b in pairs]
        return convert.convert(pipe, FP32, FP64, terms[0], flags=False).z
