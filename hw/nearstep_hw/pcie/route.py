"""Routing of a request: to memory, to registers, to a refusal, or dropped."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal, unsigned
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from nearstep_hw.axi.signature import PAGE_BYTES
from nearstep_hw.pcie.descriptor import RequestType, Status
from nearstep_hw.pcie.request import RequestChunk
from nearstep_hw.pcie.stream import DWORD_BYTES
from nearstep_spec.pcie import MEMORY_BAR, REGISTER_BAR, REGISTER_BYTES

PAGE_DWORDS = PAGE_BYTES // DWORD_BYTES
OFFSET_BITS = 62  # of a dword within 64-bit addresses
REGISTER_BITS = bits_for(REGISTER_BYTES // DWORD_BYTES - 1)  # of a word of the register BAR


class Route(enum.Enum, shape=3):
    """Destination of a request."""

    MEMORY_WRITE = 0
    REGISTER_WRITE = 1
    DROP = 2  # posted and refused
    MEMORY_READ = 3
    REGISTER_READ = 4
    REFUSE = 5  # non-posted: completed with `status`


class RoutedChunk(data.StructLayout):
    """A chunk and the route of its request.

    Members
    -------
    status : completion status, with `REFUSE`.
    dword : number of the first dword within the BAR.
    empty : a write of no byte, or a read of none.
    """

    def __init__(self, width: int, address_width: int) -> None:
        super().__init__(
            {
                "chunk": RequestChunk(width),
                "route": Route,
                "status": Status,
                "dword": unsigned(address_width - 2),
                "empty": unsigned(1),
            }
        )


class RequestRouter(wiring.Component):
    """Decides the route of a request.

    Reads and writes of the memory BAR are executed if they are within the memory, those of the
    register BAR if they are one or two whole dwords, or one dword without an enabled byte. Other
    requests are refused, with

    - Unsupported Request: another type of request, another BAR, an address beyond its contents;
    - Completer Abort: a request that violates a rule of the BAR: a register access of
      another size, a request across a multiple of 4 KiB, one with byte enables that the PCIe
      specification forbids. A receiver may discard the last two as malformed, but
      need not check: the hard block may deliver them.

    A posted request that is refused is dropped. Messages are dropped.

    *Timing*: two cycles; a chunk a cycle.

    Parameters
    ----------
    width : bits of the CQ stream.
    address_width : bits of a byte address of memory, at least those of the register BAR.
    memory_bytes : size of the memory, a multiple of 4.

    Members
    -------
    i, o : chunks.

    Ref: PCIe Base Specification, 2.2.5 (byte enables), 2.3.1 (request handling) and its note on
    restricted programming models.
    """

    def __init__(self, *, width: int, address_width: int, memory_bytes: int) -> None:
        if memory_bytes % DWORD_BYTES or not 0 < memory_bytes <= 1 << address_width:
            raise ValueError(
                f"Memory must be a multiple of {DWORD_BYTES} bytes and fit {address_width} bits "
                f"of address, not {memory_bytes!r} bytes"
            )
        if 1 << address_width < REGISTER_BYTES:
            raise ValueError(
                f"An address of memory must have at least {bits_for(REGISTER_BYTES - 1)} bits, "
                f"not {address_width!r}"
            )
        self.memory_bytes = memory_bytes
        super().__init__(
            {
                "i": In(stream.Signature(RequestChunk(width))),
                "o": Out(stream.Signature(RoutedChunk(width, address_width))),
            }
        )
        self.width = width

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        placed = Signal(self.i.payload.shape())
        placed_valid = Signal()
        offset = Signal(OFFSET_BITS)  # dwords from the start of the BAR
        advance = Signal()
        m.d.comb += [
            advance.eq(~self.o.valid | self.o.ready),
            self.i.ready.eq(~placed_valid | advance),
        ]

        descriptor = self.i.payload.head.descriptor
        inside = Signal(OFFSET_BITS)  # address bits within the BAR
        m.d.comb += inside.eq(
            Cat(*(index + 2 < descriptor.aperture for index in range(OFFSET_BITS)))
        )
        with m.If(self.i.ready):
            m.d.sync += placed_valid.eq(self.i.valid)
        with m.If(self.i.ready & self.i.valid):
            m.d.sync += [placed.eq(self.i.payload), offset.eq(descriptor.address & inside)]

        out = self.o.payload
        route, status = self._decide(m, placed.head, offset)
        with m.If(advance):
            m.d.sync += self.o.valid.eq(placed_valid)
        with m.If(advance & placed_valid):
            m.d.sync += [
                out.chunk.eq(placed),
                out.route.eq(route),
                out.status.eq(status),
                out.dword.eq(offset),
                out.empty.eq(~placed.head.sideband.first_be.any()),
            ]
        return m

    def _decide(self, m: Module, head: data.View, offset: Signal) -> tuple[Signal, Signal]:
        descriptor, sideband = head.descriptor, head.sideband
        first, last, dwords = sideband.first_be, sideband.last_be, descriptor.dwords
        end = Signal(OFFSET_BITS + 1)
        crosses = Signal()
        word = Signal()
        within = Signal()
        is_memory = Signal()
        is_register = Signal()
        is_write = Signal()
        unsupported = Signal()
        forbidden = self._forbidden_enables(m, head)
        aborted = Signal()
        route = Signal(Route)
        status = Signal(Status)
        kind = descriptor.request_type
        m.d.comb += [
            end.eq(offset + dwords),
            crosses.eq((descriptor.address[: bits_for(PAGE_DWORDS - 1)] + dwords) > PAGE_DWORDS),
            is_memory.eq(descriptor.bar == MEMORY_BAR),
            is_register.eq(descriptor.bar == REGISTER_BAR),
            is_write.eq(kind == RequestType.MEMORY_WRITE),
            within.eq(
                (is_memory & (end <= self.memory_bytes // DWORD_BYTES))
                | (is_register & (end <= REGISTER_BYTES // DWORD_BYTES))
            ),
            word.eq(
                ((dwords == 1) & (first.all() | ~first.any()) & ~last.any())
                | ((dwords == 2) & first.all() & last.all())
            ),
            unsupported.eq(~within | ((kind != RequestType.MEMORY_READ) & ~is_write)),
            aborted.eq(crosses | forbidden | (is_register & ~word)),
            status.eq(Mux(unsupported, Status.UNSUPPORTED_REQUEST, Status.COMPLETER_ABORT)),
        ]
        posted = is_write | (kind >= RequestType.MESSAGE)
        with m.If(unsupported | aborted):
            m.d.comb += route.eq(Mux(posted, Route.DROP, Route.REFUSE))
        with m.Elif(is_memory):
            m.d.comb += route.eq(Mux(is_write, Route.MEMORY_WRITE, Route.MEMORY_READ))
        with m.Else():
            m.d.comb += route.eq(Mux(is_write, Route.REGISTER_WRITE, Route.REGISTER_READ))
        return route, status

    def _forbidden_enables(self, m: Module, head: data.View) -> Signal:
        """Return whether the byte enables of a memory request are illegal.

        Legal are: for one dword no last enable; for more some enable of the first and of the last;
        no gap between enabled bytes, but within one dword or 8 aligned bytes.
        """
        first, last = head.sideband.first_be, head.sideband.last_be
        dwords, odd = head.descriptor.dwords, head.descriptor.address[0]
        gap = Signal()
        forbidden = Signal()
        m.d.comb += gap.eq((first[:-1] & ~first[1:]).any() | (last[1:] & ~last[:-1]).any())
        with m.If(dwords == 1):
            m.d.comb += forbidden.eq(last.any())
        with m.Else():
            may_have_gap = (dwords == 2) & ~odd
            m.d.comb += forbidden.eq(~first.any() | ~last.any() | (gap & ~may_have_gap))
        return forbidden
