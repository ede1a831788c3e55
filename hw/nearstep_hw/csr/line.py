"""The line port of a register bank: a whole 64-byte line at a time, as the host of a DIMM accesses
it.
"""

from amaranth.hdl import Cat, Const, Module, Signal, Value
from amaranth.lib.wiring import Component, In, Out, Signature
from amaranth.utils import ceil_log2

from nearstep_spec.csr.model import BLOCK_BYTES, LINE_BYTES

__all__ = ["BLOCK_LINES", "LINE_BITS", "CsrLineSignature", "LineDecoder"]

LINE_BITS = 8 * LINE_BYTES
BLOCK_LINES = BLOCK_BYTES // LINE_BYTES


class CsrLineSignature(Signature):
    """A port for one line at a time, without wait states.

    A host behind a DDR4 bus reads and writes bursts of 64 bytes, at most one in two cycles, and
    cannot be stalled. A line is therefore read, and written, as a whole in one cycle: all words of
    a read are sampled in one cycle, and a read returns all earlier writes. Reads have no side
    effects and need no strobe.

    *Timing*: `read_data` is the line at `read_address` in the cycle before. A write in
    cycle n is visible to a read addressed in cycle n + 1.

    Parameters
    ----------
    blocks : register blocks behind the port, each of `BLOCK_LINES` lines.

    Members
    -------
    read_address, write_address : numbers of lines.
    read_data : word 0 in the low bits; 0 where there is no register.
    write : write strobe.
    write_data, write_mask : the line, and a bit for each of its bytes, 1 to write it. The bank
        writes whole words: a word without all four bits is unchanged, as are words that are
        read-only, unmapped, or refused because the block is busy, which sets its flag.
    """

    def __init__(self, blocks: int = 1) -> None:
        self.blocks = blocks
        address = ceil_log2(blocks * BLOCK_LINES)
        super().__init__(
            {
                "read_address": Out(address),
                "read_data": In(LINE_BITS),
                "write": Out(1),
                "write_address": Out(address),
                "write_data": Out(LINE_BITS),
                "write_mask": Out(LINE_BYTES),
            }
        )


class LineDecoder(Component):
    """Connects one line port to several consecutive blocks.

    *Timing*: that of the blocks, without extra latency.

    Parameters
    ----------
    blocks : number of blocks.

    Members
    -------
    line : the port of all blocks; lines behind the last block read as 0.
    block<n> : ports of the blocks.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"Blocks must be at least 1, not {blocks!r}")
        self.blocks = blocks
        super().__init__(
            {
                "line": In(CsrLineSignature(blocks)),
                **{f"block{i}": Out(CsrLineSignature()) for i in range(blocks)},
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        inside = ceil_log2(BLOCK_LINES)
        read: Value = Cat(self.line.read_address[inside:], Const(0, 1))
        write: Value = Cat(self.line.write_address[inside:], Const(0, 1))
        before = Signal.like(read)
        m.d.sync += before.eq(read)
        for index in range(self.blocks):
            block = getattr(self, f"block{index}")
            m.d.comb += [
                block.read_address.eq(self.line.read_address),
                block.write.eq(self.line.write & (write == index)),
                block.write_address.eq(self.line.write_address),
                block.write_data.eq(self.line.write_data),
                block.write_mask.eq(self.line.write_mask),
            ]
            with m.If(before == index):
                m.d.comb += self.line.read_data.eq(block.read_data)
        return m
