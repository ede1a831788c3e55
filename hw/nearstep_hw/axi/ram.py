"""On-chip memory as an AXI4 subordinate."""

from amaranth import Elaboratable, Module, Mux, Signal, Value
from amaranth.hdl import ShapeLike
from amaranth.lib import wiring
from amaranth.lib.memory import Memory, ReadPort, WritePort
from amaranth.lib.wiring import In
from amaranth.utils import exact_log2

from nearstep_hw.axi.signature import (
    PAGE_BYTES,
    AddressLayout,
    Axi4Signature,
    BurstType,
    Response,
)

BYTE_BITS = 8


class AxiRam(wiring.Component):
    """Block RAM behind an AXI4 port: bursts of whole beats (INCR), one after the other.

    A burst that begins beyond the memory is answered with DECERR, one of another type or of
    narrower beats with SLVERR; neither accesses the memory. A reset keeps its contents.

    *Timing*: a beat a cycle in each direction, without a gap between bursts. RVALID follows the
    address of a read by two cycles, and BVALID the last beat of a write by one. No `valid` depends
    on a `ready`. A read concurrent with a write of the same bytes returns the old or the new ones.

    Parameters
    ----------
    memory_bytes : a power of two, at least a page.
    address_width, data_width, id_width : bits.

    Members
    -------
    s_axi : the port.

    Raises
    ------
    ValueError : `memory_bytes` is not a power of two, less than a page or beyond the address width.
    """

    def __init__(
        self, *, memory_bytes: int, address_width: int, data_width: int, id_width: int
    ) -> None:
        least, most = PAGE_BYTES, 1 << address_width
        if memory_bytes & (memory_bytes - 1) or not least <= memory_bytes <= most:
            raise ValueError(
                f"Memory must be a power of two from {least} to {most} bytes, not {memory_bytes!r}"
            )
        self.memory_bytes = memory_bytes
        self.data_width = data_width
        self.id_width = id_width
        super().__init__(
            {
                "s_axi": In(
                    Axi4Signature(
                        address_width=address_width, data_width=data_width, id_width=id_width
                    )
                )
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        depth = self.memory_bytes * BYTE_BITS // self.data_width
        shape: ShapeLike = self.data_width
        m.submodules.memory = memory = Memory(shape=shape, depth=depth, init=[])
        write_port = memory.write_port(granularity=BYTE_BITS)
        read_port = memory.read_port(transparent_for=[write_port])
        self._read(m, read_port)
        self._write(m, write_port)
        return m

    def _read(self, m: Module, port: ReadPort) -> None:
        addresses, beats = self.s_axi.ar, self.s_axi.r
        asked = addresses.payload
        active, word, left = Signal(), Signal(len(port.addr)), Signal(len(asked.len))
        identity, response = Signal(self.id_width), Signal(Response)
        advance, last = Signal(), Signal()

        m.d.comb += [
            advance.eq(~beats.valid | beats.ready),
            last.eq(left == 0),
            addresses.ready.eq(~active | (advance & last)),
            port.addr.eq(word),
            port.en.eq(active & advance),
            beats.payload.data.eq(port.data),
        ]
        with m.If(advance):
            m.d.sync += [
                beats.valid.eq(active),
                beats.payload.id.eq(identity),
                beats.payload.resp.eq(response),
                beats.payload.last.eq(last),
                word.eq(word + 1),
                left.eq(left - 1),
            ]
            with m.If(last):
                m.d.sync += active.eq(0)
        with m.If(addresses.valid & addresses.ready):
            m.d.sync += [
                active.eq(1),
                word.eq(self._word(asked.addr)),
                left.eq(asked.len),
                identity.eq(asked.id),
                response.eq(self._response(asked)),
            ]

    def _write(self, m: Module, port: WritePort) -> None:
        addresses, beats, answers = self.s_axi.aw, self.s_axi.w, self.s_axi.b
        asked = addresses.payload
        active, word = Signal(), Signal(len(port.addr))
        identity, response = Signal(self.id_width), Signal(Response)
        taken, ends = Signal(), Signal()

        m.d.comb += [
            taken.eq(beats.valid & beats.ready),
            ends.eq(taken & beats.payload.last),
            beats.ready.eq(active & (~answers.valid | answers.ready)),
            addresses.ready.eq(~active | ends),
            port.addr.eq(word),
            port.data.eq(beats.payload.data),
        ]
        with m.If(taken & (response == Response.OKAY)):
            m.d.comb += port.en.eq(beats.payload.strb)
        with m.If(answers.ready):
            m.d.sync += answers.valid.eq(0)
        with m.If(taken):
            m.d.sync += word.eq(word + 1)
        with m.If(ends):
            m.d.sync += [
                active.eq(0),
                answers.valid.eq(1),
                answers.payload.id.eq(identity),
                answers.payload.resp.eq(response),
            ]
        with m.If(addresses.valid & addresses.ready):
            m.d.sync += [
                active.eq(1),
                word.eq(self._word(asked.addr)),
                identity.eq(asked.id),
                response.eq(self._response(asked)),
            ]

    def _word(self, address: Value) -> Value:
        """Return the word address of a byte address."""
        return address[exact_log2(self.data_width // BYTE_BITS) : exact_log2(self.memory_bytes)]

    def _response(self, asked: AddressLayout) -> Value:
        """Return the response to a burst."""
        whole = asked.size == exact_log2(self.data_width // BYTE_BITS)
        beyond = asked.addr[exact_log2(self.memory_bytes) :].any()
        taken = whole & (asked.burst == BurstType.INCR)
        return Mux(beyond, Response.DECERR, Mux(taken, Response.OKAY, Response.SLVERR))
