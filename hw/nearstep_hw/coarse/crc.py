"""The CRC of headers and entries on a link."""

from functools import cache

from amaranth import Cat, Elaboratable, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.crc import Algorithm
from amaranth.lib.crc.catalog import CRC32_ETHERNET
from amaranth.lib.wiring import In, Out

from nearstep_hw.coarse.wire import CRC_BITS, PHIT_BITS

HEADER_BITS = PHIT_BITS - CRC_BITS
"""What the CRC of a header covers: the bits below it."""


class Crc32(wiring.Component):
    """CRC-32 of Ethernet over words, the low byte of each first: that of `zlib.crc32`.

    Each bit of the next CRC is the parity of some bits of the word and of the last CRC, found by
    asking `amaranth.lib.crc` for the CRC of each bit alone. Its own processor writes every
    exclusive or by itself, which is fifty times as much text for tools to read.

    *Timing*: `crc` is that of all words up to the cycle before.

    Parameters
    ----------
    width : bits of a word, whole bytes.

    Members
    -------
    start : begins anew; with `valid`, this word is the first.
    valid, data : a word.
    crc : of the words since `start`.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__({"start": In(1), "valid": In(1), "data": In(width), "crc": Out(CRC_BITS)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        state = Signal(CRC_BITS, init=(1 << CRC_BITS) - 1)
        source = Signal(CRC_BITS)
        word = Signal(self.width)
        m.d.comb += [
            source.eq(Mux(self.start, state.init, state)),
            word.eq(self.data),
            self.crc.eq(state ^ CRC32_ETHERNET.xor_output),
        ]
        with m.If(self.valid):
            m.d.sync += state.eq(
                Cat(
                    (word & of_word).xor() ^ (source & of_state).xor()
                    for of_word, of_state in _masks(self.width)
                )
            )
        with m.Elif(self.start):
            m.d.sync += state.eq(state.init)
        return m


@cache
def _masks(width: int) -> list[tuple[int, int]]:
    """For each bit of the next state, the bits of the word and of the state that it is made of."""

    def crc(word: int, initial: int) -> int:
        algorithm = Algorithm(
            crc_width=CRC_BITS,
            polynomial=CRC32_ETHERNET.polynomial,
            initial_crc=initial,
            reflect_input=True,
            reflect_output=True,
            xor_output=0,
        )
        return int(algorithm(data_width=width).compute([word]))

    words = [crc(1 << bit, 0) for bit in range(width)]
    states = [crc(0, 1 << (CRC_BITS - 1 - bit)) for bit in range(CRC_BITS)]  # it is reflected

    def row(columns: list[int], bit: int) -> int:
        return sum((column >> bit & 1) << index for index, column in enumerate(columns))

    return [(row(words, bit), row(states, bit)) for bit in range(CRC_BITS)]


def header_crc() -> Crc32:
    """CRC-32 of the low bits of a header, one word; equals `zlib.crc32` of its first 12 bytes."""
    return Crc32(HEADER_BITS)


def entry_crc() -> Crc32:
    """CRC-32 of an entry, a phit a cycle; equals `zlib.crc32` of its bytes."""
    return Crc32(PHIT_BITS)
