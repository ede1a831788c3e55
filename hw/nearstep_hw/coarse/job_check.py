"""Check of a job before it starts."""

from amaranth import Cat, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.coarse.entry import most_members
from nearstep_hw.coarse.wire import MEMBER_BITS, JobLayout, Operation, Wire
from nearstep_spec.coarse.config import (
    BEAT_BYTES,
    BEAT_ELEMENTS,
    ELEMENT_BITS,
    MAX_ADDENDS,
    WIRE_FORMATS,
    CoarseConfig,
)
from nearstep_spec.coarse.registers import ErrorCause, Stream


class JobCheck(wiring.Component):
    """Checks a job before it reads or writes memory.

    In this order: unknown operation, wire format, ring or exact sum; unaligned addresses;
    ranges outside the window; overlapping ranges. A tensor occupies whole beats.

    An exact sum has one array of each device, and a ring of which the lists of a chunk fit into the
    buffers between two cores.

    *Timing*: `o_done` `latency` cycles after `i_start`; the results hold.

    Members
    -------
    i_start : pulse; the other inputs hold from then on.
    i_job : the job.
    i_members, i_position : of the ring.
    i_window_base, i_window_limit : first byte that jobs may access, and first byte after the
        window.
    o_done : pulse.
    o_cause : an `ErrorCause`; NONE for a valid job.
    o_stream, o_address : of the error.
    i_clear : clears all state.
    """

    latency = 3

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        width = config.address_width
        super().__init__(
            {
                "i_start": In(1),
                "i_job": In(JobLayout(address_width=width, exact=bool(config.exact))),
                "i_members": In(MEMBER_BITS),
                "i_position": In(MEMBER_BITS),
                "i_window_base": In(width + 1),
                "i_window_limit": In(width + 1),
                "o_done": Out(1),
                "o_cause": Out(8),
                "o_stream": Out(8),
                "o_address": Out(width),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        job = self.i_job
        shift = exact_log2(BEAT_BYTES)
        wide = max(len(job.source), ELEMENT_BITS + 3) + 1
        starts = [job.source, job.destination]
        streams = [Stream.SOURCE, Stream.DESTINATION]
        nbytes = Signal(wide)
        ends = [Signal(wide, name=f"end{k}") for k in range(2)]
        unsupported = Signal()
        unaligned, outside = Signal(2), Signal(2)
        overlap = Signal()
        turns = Signal(self.latency)

        up = (job.elements + (BEAT_ELEMENTS - 1)) >> exact_log2(BEAT_ELEMENTS)
        formats = [Wire[name.upper()] for name in WIRE_FORMATS if name in self.config.wire_formats]
        known = Cat(job.wire == wire for wire in formats).any()
        operation = Cat(job.operation == each for each in Operation).any()
        unknown = ~known | ~operation
        if self.config.exact:
            most = most_members(self.config, 1)
            exact = Cat(job.wire == Wire[name.upper()] for name in self.config.exact).any()
            unknown |= (job.divisor != 0) & (
                ~exact
                | (job.operation != Operation.SUM)
                | (job.count != 1)
                | (job.divisor > MAX_ADDENDS)
                | (self.i_members > most)
            )
        m.d.sync += [
            turns.eq(Cat(self.i_start, turns)),
            nbytes.eq(up << shift),
            *(end.eq(start + nbytes) for start, end in zip(starts, ends, strict=True)),
            overlap.eq((job.source < ends[1]) & (job.destination < ends[0])),
            unsupported.eq(unknown | (self.i_members < 2) | (self.i_position >= self.i_members)),
            unaligned.eq(Cat(start[:shift].any() for start in starts)),
            outside.eq(
                Cat(
                    (start < self.i_window_base) | (end > self.i_window_limit) | beyond
                    for start, end, beyond in zip(starts, ends, job.beyond, strict=True)
                )
            ),
        ]
        m.d.comb += self.o_done.eq(turns[-1])
        with m.If(unsupported):
            m.d.comb += self.o_cause.eq(ErrorCause.UNSUPPORTED)
        with m.Elif(unaligned.any()):
            which = ~unaligned[0]
            m.d.comb += self._at(ErrorCause.ALIGNMENT, which, streams, starts)
        with m.Elif(outside.any()):
            which = ~outside[0]
            m.d.comb += self._at(ErrorCause.WINDOW, which, streams, starts)
        with m.Elif(overlap):
            m.d.comb += self._at(ErrorCause.OVERLAP, 1, streams, starts)
        return ResetInserter(self.i_clear)(m)

    def _at(self, cause: ErrorCause, which: object, streams: list, starts: list) -> list:
        """Drive a fault of the source (0) or the destination (1)."""
        return [
            self.o_cause.eq(cause),
            self.o_stream.eq(Mux(which, streams[1], streams[0])),
            self.o_address.eq(Mux(which, starts[1], starts[0])),
        ]
