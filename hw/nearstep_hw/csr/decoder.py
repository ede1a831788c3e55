"""One register port for several blocks."""

from amaranth.hdl import Module, Signal
from amaranth.lib.wiring import Component, In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.csr.signature import CsrSignature
from nearstep_spec.csr.model import ADDRESS_WIDTH

__all__ = ["CsrDecoder"]


class CsrDecoder(Component):
    """Forwards accesses to the block that has the address; an address outside all blocks is an
    error.

    *Timing*: that of the blocks, without extra latency.

    Parameters
    ----------
    blocks : number of consecutive blocks.

    Members
    -------
    bus : the port of all blocks.
    block<n> : to their banks.

    Raises
    ------
    ValueError : no block.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"Blocks must be at least 1, not {blocks!r}")
        self.blocks = blocks
        super().__init__(
            {
                "bus": In(CsrSignature(ADDRESS_WIDTH + ceil_log2(blocks))),
                **{f"block{i}": Out(CsrSignature()) for i in range(blocks)},
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        bus = self.bus
        access = bus.read | bus.write
        number = Signal(range(self.blocks + 1))
        mapped = Signal()
        nowhere = Signal()
        m.d.comb += number.eq(bus.address[ADDRESS_WIDTH:])
        m.d.sync += nowhere.eq(access & ~mapped)
        with m.If(nowhere):
            m.d.comb += [bus.ack.eq(1), bus.error.eq(1)]
        for index in range(self.blocks):
            block = getattr(self, f"block{index}")
            chosen = number == index
            m.d.comb += [
                block.address.eq(bus.address[:ADDRESS_WIDTH]),
                block.read.eq(bus.read & chosen),
                block.write.eq(bus.write & chosen),
                block.write_data.eq(bus.write_data),
                block.write_mask.eq(bus.write_mask),
            ]
            with m.If(chosen):
                m.d.comb += mapped.eq(1)
            with m.If(block.ack):
                m.d.comb += [
                    bus.ack.eq(1),
                    bus.error.eq(block.error),
                    bus.read_data.eq(block.read_data),
                ]
        return m
