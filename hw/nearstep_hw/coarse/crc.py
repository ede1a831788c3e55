"""The CRC of headers and entries on a link."""

from __future__ import annotations

from typing import Any

from amaranth import Const, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.coarse.wire import CRC_BITS, PHIT_BITS

HEADER_BITS = PHIT_BITS - CRC_BITS
"""Bits of a header below its CRC, which covers them."""

POLYNOMIAL = 0xEDB88320
"""Polynomial of CRC-32 (IEEE 802.3), reflected."""

ONES = (1 << CRC_BITS) - 1
"""Initial value of a CRC, and the mask that inverts the result."""


class Crc(wiring.Component):
    """CRC-32 of words, a word a cycle; equals `zlib.crc32` of their bytes, the lowest byte first.

    The next state is the XOR of one word for each set bit of state and data. This form simulates
    ten times as fast as a chain of XORs for each of the 32 bits.

    *Timing*: `crc` covers a word from the cycle after it on.

    Parameters
    ----------
    width : bits of a word.

    Members
    -------
    start : restarts the CRC, with this cycle's word if there is one.
    valid, data : a word.
    crc : CRC of the words since the last start.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__({"start": In(1), "valid": In(1), "data": In(width), "crc": Out(CRC_BITS)})

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        state = Signal(CRC_BITS, init=ONES)
        before = Signal(CRC_BITS)
        m.d.comb += before.eq(Mux(self.start, ONES, state))
        added = [
            Mux(each, Const(_passed(bit, self.width), CRC_BITS), Const(0, CRC_BITS))
            for bit, each in enumerate((*before, *self.data))
        ]
        with m.If(self.valid):
            m.d.sync += state.eq(_total(added))
        with m.Elif(self.start):
            m.d.sync += state.eq(ONES)
        m.d.comb += self.crc.eq(~state)
        return m


def _total(words: list[Value]) -> Value:
    """XOR the words, as a tree."""
    while len(words) > 1:
        pairs = zip(words[::2], words[1::2], strict=False)
        words = [one ^ two for one, two in pairs] + words[len(words) // 2 * 2 :]
    return words[0]


def _passed(bit: int, width: int) -> int:
    """Return the next state if only `bit` of state (low bits) and word (high bits) is 1."""
    state, word = (1 << bit, 0) if bit < CRC_BITS else (0, 1 << (bit - CRC_BITS))
    for number in range(width):
        low = (state ^ word >> number) & 1
        state = state >> 1 ^ POLYNOMIAL * low
    return state


def header_crc() -> Crc:
    """Return the CRC unit of headers: one word, the low bits; `zlib.crc32` of the first 12
    bytes."""
    return Crc(HEADER_BITS)


def entry_crc() -> Crc:
    """Return the CRC unit of entries: a phit a cycle; `zlib.crc32` of the bytes."""
    return Crc(PHIT_BITS)
