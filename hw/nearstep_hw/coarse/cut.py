"""Number of chunks of a tensor, and division of the last chunk."""

from amaranth import Cat, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for, exact_log2

from nearstep_hw.coarse.entry import BEAT_BITS, max_entry_beats
from nearstep_hw.coarse.wire import MEMBER_BITS, Wire
from nearstep_spec.coarse.config import BEAT_ELEMENTS, ELEMENT_BITS, CoarseConfig


class TensorCut(wiring.Component):
    """Divides the beats of a tensor by the members of the ring, a bit a cycle.

    With beats = q * members + rest and S beats in a full entry, a power of two, there are q / S
    full chunks; the partial last chunk has q modulo S beats a part, one more if there is a rest.

    *Timing*: `o_done` `latency` cycles after `i_start`; the results hold until the next `o_done`.

    Members
    -------
    i_start : pulse; the other inputs hold until `o_done`.
    i_elements, i_members, i_wire : of the job; at least one member.
    o_done : pulse.
    o_chunks : chunks, at least 1.
    o_entry_beats : memory beats of a full entry.
    o_chunk_beats : memory beats of a full chunk.
    o_tail_beats : memory beats of an entry of the last chunk.
    o_tail_exist : memory beats of the last chunk within the tensor.
    i_clear : clears all state.
    """

    latency = BEAT_BITS + 2

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        self.entry_width = bits_for(max_entry_beats(config))
        chunk_width = self.entry_width + MEMBER_BITS
        super().__init__(
            {
                "i_start": In(1),
                "i_elements": In(ELEMENT_BITS),
                "i_members": In(MEMBER_BITS),
                "i_wire": In(Wire),
                "o_done": Out(1),
                "o_chunks": Out(BEAT_BITS),
                "o_entry_beats": Out(self.entry_width),
                "o_chunk_beats": Out(chunk_width),
                "o_tail_beats": Out(self.entry_width),
                "o_tail_exist": Out(chunk_width),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        beats = Signal(BEAT_BITS)  # dividend, replaced from below by the quotient
        rest = Signal(MEMBER_BITS + 1)
        left = Signal(range(BEAT_BITS + 1))
        grown = Signal(MEMBER_BITS + 1)
        fits = Signal()
        none = Signal()
        dividing = Signal()

        m.d.comb += [
            none.eq(self.i_elements == 0),
            grown.eq(Cat(beats[-1], rest)),
            fits.eq(grown >= self.i_members),
        ]
        m.d.sync += self.o_done.eq(0)
        with m.If(self.i_start):
            up = (self.i_elements + (BEAT_ELEMENTS - 1)) >> exact_log2(BEAT_ELEMENTS)
            m.d.sync += [
                beats.eq(Mux(none, 1, up)),
                rest.eq(0),
                left.eq(BEAT_BITS),
                dividing.eq(1),
            ]
        with m.Elif(left != 0):
            m.d.sync += [
                beats.eq(Cat(fits, beats)),
                rest.eq(Mux(fits, grown - self.i_members, grown)),
                left.eq(left - 1),
            ]
        with m.Elif(dividing):
            m.d.sync += [self.o_done.eq(1), dividing.eq(0)]
            with m.Switch(self.i_wire):
                for wire in Wire:
                    if wire.name.lower() in self.config.wire_formats:
                        with m.Case(wire):
                            self._share(m, self._shift(wire), beats, rest, none)
        return ResetInserter(self.i_clear)(m)

    def _shift(self, wire: Wire) -> int:
        return exact_log2(self.config.entry_beats(wire.name.lower()))

    def _share(self, m: Module, shift: int, quotient: Signal, rest: Signal, none: Signal) -> None:
        """Drive the results for entries of 2**shift beats."""
        part = quotient[:shift]
        exist = part * self.i_members + rest
        whole = exist == 0
        m.d.sync += [
            self.o_chunks.eq((quotient >> shift) + ~whole),
            self.o_entry_beats.eq(1 << shift),
            self.o_chunk_beats.eq(self.i_members << shift),
            self.o_tail_beats.eq(Mux(whole, 1 << shift, part + rest.any())),
            self.o_tail_exist.eq(Mux(none, 0, Mux(whole, self.i_members << shift, exist))),
        ]
