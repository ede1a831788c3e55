"""Packs runs of dwords into beats."""

from amaranth import Array, Cat, Elaboratable, Module, Mux, Signal, Value, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for, ceil_log2

from nearstep_hw.pcie.stream import DWORD_BITS


class DwordRun(data.StructLayout):
    """Consecutive elements, from element 0 on.

    Parameters
    ----------
    elements : most elements.
    element_width : bits of an element: a dword and its sideband.
    lanes : elements of an output beat.

    Members
    -------
    elements : an array.
    count : number of valid elements, at least one.
    lane : output lane of the first element; valid only in the first run of a packet.
    last : the packet ends.
    discontinue : only with `last`; forwarded to the output.
    """

    def __init__(self, *, elements: int, element_width: int, lanes: int) -> None:
        super().__init__(
            {
                "elements": data.ArrayLayout(element_width, elements),
                "count": unsigned(bits_for(elements)),
                "lane": unsigned(ceil_log2(lanes)),
                "last": unsigned(1),
                "discontinue": unsigned(1),
            }
        )


class PackedBeat(data.StructLayout):
    """A beat of elements; lanes that no run filled are all zero."""

    def __init__(self, *, lanes: int, element_width: int) -> None:
        super().__init__(
            {
                "elements": data.ArrayLayout(element_width, lanes),
                "last": unsigned(1),
                "discontinue": unsigned(1),
            }
        )


class DwordPacker(wiring.Component):
    """Packs the runs of a packet into beats without gaps, from a given lane on.

    *Timing*: one cycle; a run a cycle. A packet whose last run spills into another beat takes one
    cycle more; in this cycle a run of the next packet is accepted if it neither fills a beat nor
    ends the packet.

    Parameters
    ----------
    elements : most elements of a run.
    lanes : elements of a beat, a power of two, at least `elements`.
    element_width : bits of an element.

    Members
    -------
    i : runs.
    o : beats.
    """

    def __init__(self, *, elements: int, lanes: int, element_width: int) -> None:
        if lanes < elements or lanes & (lanes - 1):
            raise ValueError(f"Lanes must be a power of two and at least {elements}, not {lanes!r}")
        self.elements = elements
        self.lanes = lanes
        self.element_width = element_width
        run = DwordRun(elements=elements, element_width=element_width, lanes=lanes)
        beat = PackedBeat(lanes=lanes, element_width=element_width)
        super().__init__({"i": In(stream.Signature(run)), "o": Out(stream.Signature(beat))})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        lanes, run, beat = self.lanes, self.i.payload, self.o.payload
        held = Signal(data.ArrayLayout(self.element_width, lanes))
        position = Signal(range(lanes))
        inside = Signal()
        spilled = Signal()  # `held` has the rest of an ended packet
        spilled_discontinue = Signal()
        start = Signal(range(lanes))
        end = Signal(range(2 * lanes))
        room = Signal()  # for another beat
        full = Signal()
        spills = Signal()
        take = Signal()
        m.d.comb += [
            start.eq(Mux(inside, position, run.lane)),
            end.eq(start + run.count),
            room.eq(~self.o.valid | self.o.ready),
            full.eq(end >= lanes),
            spills.eq(end > lanes),
            self.i.ready.eq(room & ~(spilled & (full | run.last))),
            take.eq(self.i.valid & self.i.ready),
        ]

        masked = [Mux(index < run.count, run.elements[index], 0) for index in range(self.elements)]
        masked += [0] * (lanes - self.elements)
        near = Signal(data.ArrayLayout(self.element_width, lanes))  # belongs to the held beat
        far = Signal(data.ArrayLayout(self.element_width, lanes))  # belongs to the next beat
        sources = Array(masked)
        for lane in range(lanes):
            source = Signal(range(lanes), name=f"source{lane}")
            element = Signal(self.element_width, name=f"element{lane}")
            m.d.comb += [source.eq(lane - start), element.eq(sources[source])]
            with m.If(lane >= start):
                m.d.comb += near[lane].eq(element)
            with m.Else():
                m.d.comb += far[lane].eq(element)

        whole = Signal(data.ArrayLayout(self.element_width, lanes))
        m.d.comb += whole.eq(
            near.as_value() | (held.as_value() & inside.replicate(len(held.as_value())))
        )
        with m.If(room):
            m.d.sync += self.o.valid.eq((take & (full | run.last)) | spilled)
            with m.If(spilled):
                m.d.sync += [
                    beat.elements.eq(held),
                    beat.last.eq(1),
                    beat.discontinue.eq(spilled_discontinue),
                    spilled.eq(0),
                ]
            with m.Elif(take):
                m.d.sync += [
                    beat.elements.eq(whole),
                    beat.last.eq(run.last & ~spills),
                    beat.discontinue.eq(run.discontinue & run.last & ~spills),
                ]
        with m.If(take):
            m.d.sync += [
                held.eq(Mux(full, far.as_value(), whole.as_value())),
                position.eq(end),
                inside.eq(~run.last),
                spilled.eq(run.last & spills),
                spilled_discontinue.eq(run.discontinue),
            ]
        return m


def interleave(words: Value, extras: Value, count: int) -> Value:
    """Join each of `count` dwords with its share of the bits of `extras`, above the dword."""
    extra = len(extras) // count
    return Cat(
        *(
            part
            for index in range(count)
            for part in (words.word_select(index, DWORD_BITS), extras.word_select(index, extra))
        )
    )
