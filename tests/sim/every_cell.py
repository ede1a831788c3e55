"""A component whose netlist has every kind of ECP5 cell that has a model."""

from amaranth.hdl import Module, Signal
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

WIDTHS = {"bits": 1, "pairs": 2, "nibbles": 4, "bytes": 9, "halves": 18, "words": 36}
"""Memories by the width of a port of DP16KD."""


class EveryCell(wiring.Component):
    """Products, signed and not; a small memory; and block memories of every width, with contents,
    enables of parts, and both kinds of ports.

    Parameters
    ----------
    widths : names of `WIDTHS`.
    """

    def __init__(self, widths: tuple[str, ...] = tuple(WIDTHS)) -> None:
        self.widths = widths
        ports = {
            "i_a": In(18),
            "i_b": In(18),
            "i_en": In(1),
            "i_write": In(4),
            "i_read": In(1),
            "i_address": In(14),
            "i_other": In(14),
            "o_unsigned": Out(36),
            "o_signed": Out(36),
            "o_mixed": Out(30),
            "o_small": Out(8),
        }
        for name in widths:
            ports[f"o_{name}"] = Out(WIDTHS[name])
        super().__init__(ports)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        a = Signal.like(self.i_a)
        product = Signal(36)
        m.d.sync += [a.eq(self.i_a), product.eq(a * self.i_b)]
        m.d.sync += self.o_unsigned.eq(product)
        m.d.comb += self.o_signed.eq(a.as_signed() * self.i_b.as_signed())
        m.d.comb += self.o_mixed.eq(a[:14].as_signed() * self.i_b[:15])

        m.submodules.small = small = memory.Memory(shape=8, depth=16, init=range(3, 19))
        write, read = small.write_port(), small.read_port(domain="comb")
        m.d.comb += [
            write.addr.eq(self.i_address),
            write.data.eq(self.i_b),
            write.en.eq(self.i_write[0]),
            read.addr.eq(self.i_other),
            self.o_small.eq(read.data),
        ]
        for number, name in enumerate(self.widths):
            width = WIDTHS[name]
            depth = min(
                1 << 14, 18 * 1024 // width if width >= 9 else 1 << 14 >> width.bit_length() - 1
            )
            init = [(index * 2654435761 >> 7) % (1 << width) for index in range(depth)]
            m.submodules[name] = block = memory.Memory(
                shape=width, depth=depth, init=init, attrs={"ram_style": "block"}
            )
            granularity = 9 if width > 9 else width
            write = block.write_port(granularity=granularity)
            read = block.read_port(transparent_for=(write,) if number % 2 else ())
            m.d.comb += [
                write.addr.eq(self.i_address[: len(write.addr)]),
                write.data.eq((self.i_a << 18) | self.i_b),
                write.en.eq(self.i_write[: len(write.en)]),
                read.addr.eq(self.i_other[: len(read.addr)]),
                read.en.eq(self.i_read),
                getattr(self, f"o_{name}").eq(read.data),
            ]
        return m
