"""Width converters of streams, by powers of two."""

from amaranth import Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out


class PieceLayout(data.StructLayout):
    """A word of a stream; `last` ends a packet.

    Parameters
    ----------
    width : bits of a word.
    """

    def __init__(self, width: int) -> None:
        super().__init__({"data": width, "last": 1})


class _Gearbox(wiring.Component):
    """Base of both converters: `factor` pieces to a word, or half of them."""

    def __init__(self, *, piece_width: int, factor: int, pack: bool) -> None:
        if factor < 1 or factor & (factor - 1):
            raise ValueError(f"Factor must be a power of two, not {factor!r}")
        self.piece_width = piece_width
        self.factor = factor
        piece, word = PieceLayout(piece_width), PieceLayout(piece_width * factor)
        super().__init__(
            {
                "i": In(stream.Signature(piece if pack else word)),
                "o": Out(stream.Signature(word if pack else piece)),
                "i_half": In(1),
                "i_clear": In(1),
            }
        )

    def _final(self, m: Module) -> Signal:
        """Return the number of the last piece of a word."""
        final = Signal(range(self.factor))
        m.d.comb += final.eq(Mux(self.i_half, self.factor // 2 - 1, self.factor - 1))
        return final


class StreamPack(_Gearbox):
    """Gathers pieces into words, the first in the lowest bits.

    *Timing*: a word is at the output one cycle after its last piece was taken; a piece a cycle.

    Parameters
    ----------
    piece_width : bits of a piece.
    factor : pieces of a word, a power of two.

    Members
    -------
    i : pieces.
    o : words, with `last` of their last piece.
    i_half : half as many pieces make a word, with an undefined upper half; needs a factor of at
        least 2, and changes only between words.
    i_clear : clears all state.

    Raises
    ------
    ValueError : `factor` is no power of two.
    """

    def __init__(self, *, piece_width: int, factor: int) -> None:
        super().__init__(piece_width=piece_width, factor=factor, pack=True)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        number = Signal(range(self.factor))
        final = self._final(m) if self.factor > 1 else number
        taken = self.i.valid & self.i.ready

        m.d.comb += self.i.ready.eq(~self.o.valid | self.o.ready)
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(taken):
            m.d.sync += [
                number.eq(Mux(number == final, 0, number + 1)),
                self.o.valid.eq(number == final),
                self.o.payload.last.eq(self.i.payload.last),
            ]
            with m.Switch(number):
                for k in range(self.factor):
                    with m.Case(k):
                        place = self.o.payload.data.word_select(k, self.piece_width)
                        m.d.sync += place.eq(self.i.payload.data)
        return ResetInserter(self.i_clear)(m)


class StreamSplit(_Gearbox):
    """Splits words into pieces, the lowest bits first.

    *Timing*: the first piece is at the output one cycle after its word was taken; a piece a cycle,
    without a gap between words. `o` is registered.

    Parameters
    ----------
    piece_width : bits of a piece.
    factor : pieces of a word, a power of two.

    Members
    -------
    i : words.
    o : pieces, with `last` of the word on its last piece.
    i_half : only the lower half of each word is output; needs a factor of at least 2, and changes
        only while no word is stored.
    i_clear : clears all state.

    Raises
    ------
    ValueError : `factor` is no power of two.
    """

    def __init__(self, *, piece_width: int, factor: int) -> None:
        super().__init__(piece_width=piece_width, factor=factor, pack=False)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        word = Signal.like(self.i.payload, reset_less=True)
        number = Signal(range(self.factor))
        final = self._final(m) if self.factor > 1 else number
        ends = number == final

        m.d.comb += [
            self.i.ready.eq(~self.o.valid | (self.o.ready & ends)),
            self.o.payload.data.eq(word.data.word_select(number, self.piece_width)),
            self.o.payload.last.eq(word.last & ends),
        ]
        with m.If(self.i.ready):
            m.d.sync += [self.o.valid.eq(self.i.valid), number.eq(0)]
            with m.If(self.i.valid):
                m.d.sync += word.eq(self.i.payload)
        with m.Elif(self.o.ready):
            m.d.sync += number.eq(number + 1)
        return ResetInserter(self.i_clear)(m)
