"""Load path of compressed gradients: memory to pairs to dense beats."""

from amaranth import Array, DomainRenamer, Elaboratable, Module, Mux, Signal
from amaranth.lib import stream
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.updater.fault import FaultLayout
from nearstep_hw.updater.pairs.isolated import IsolatedDecompressor
from nearstep_hw.updater.pairs.layout import COUNT_WIDTH
from nearstep_hw.updater.widen import FORMAT_WIDTH
from nearstep_hw.updater.windowed import WindowedRead
from nearstep_spec.updater.compression import PairCause
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import ErrorCause, GradientFormat, Stream

INDEX_STREAM, VALUE_STREAM = range(2)
INDEX_BYTES = 4

CAUSES = {
    PairCause.RANGE: ErrorCause.PAIR_RANGE,
    PairCause.ORDER: ErrorCause.PAIR_ORDER,
}


class PairLoad(WindowedRead):
    """Loads indices and values, burst by burst, and decompresses them.

    Not part of the loader of the arrays: the rate at which pairs are consumed depends on their
    indices, so bursts of pairs in one order with those of arrays could deadlock. Indices and values
    each have a FIFO of two bursts. The decompressor is in the clock domain `pairs`: the clock of
    `sync`, gated or not outside of runs with pairs. A dry run loads only indices and has no output:
    `o_verified` or a fault is the outcome.

    Members
    -------
    all : as of `WindowedRead`; array 0 is indices, array 1 values.
    i_pairs, i_count : pairs, and elements. These and the inputs up to `i_dry` are held while
        `o_idle` is low or beats are outstanding.
    i_format : `GradientFormat` of the values. If the kernel has several.
    i_scatter : pairs are grouped by block; else sorted. If the kernel has both forms.
    i_dry : the run is dry.
    o : dense beats of binary32, as many as the elements need.
    o_verified : in a dry run, all indices are valid, and nothing is outstanding.
    o_duplicates, o_counted : pairs overridden by a later pair, final while `o_counted`.
    o_fault : a fault in this cycle, of the bus or of the pairs; cause 0 is none.
    """

    def __init__(self, config: UpdateKernelConfig) -> None:
        self.decompressor = IsolatedDecompressor(
            forms=config.compression,
            lanes=config.lanes,
            pairs=config.lanes,
            chunk=config.block_elements,
            cut=config.cut,
            user=config.decompressor,
        )
        super().__init__(
            config,
            [Stream.INDEX_READ, Stream.G_READ],
            {
                "i_pairs": In(COUNT_WIDTH),
                "i_count": In(COUNT_WIDTH),
                **({"i_format": In(FORMAT_WIDTH)} if config.mixed else {}),
                **({"i_scatter": In(1)} if self.decompressor.choice else {}),
                "i_dry": In(1),
                "o": Out(stream.Signature(config.data_width)),
                "o_verified": Out(1),
                "o_duplicates": Out(COUNT_WIDTH),
                "o_counted": Out(1),
            },
            block_beats=config.burst_beats,
            optional=True,
            narrow=(VALUE_STREAM,) if config.mixed else (),
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        config = self.config
        schedule = self.schedule
        mover = self.move(
            m,
            landing_beats=2 * config.burst_beats,
            bursts_ahead=config.bursts_ahead,
            own=(VALUE_STREAM,),
        )
        decompressor = self.decompressor
        m.submodules.decompressor = DomainRenamer("pairs")(decompressor)
        credits = (mover.i_credit, mover.i_credit_own)
        for index, (name, words, credit) in enumerate(
            zip(
                ("index", "value"),
                (decompressor.i_index, decompressor.i_value),
                credits,
                strict=True,
            )
        ):
            m.submodules[f"fifo_{name}"] = fifo = StreamFifo(
                config.data_width, depth=2 * config.burst_beats
            )
            m.d.comb += [
                # Space for the data is reserved: ready is high at every beat.
                fifo.i.valid.eq(mover.o_beat[index]),
                fifo.i.payload.eq(self.bus.r.payload.data),
                fifo.i_clear.eq(self.i_clear),
                words.valid.eq(fifo.o.valid),
                words.payload.words.eq(fifo.o.payload),
                fifo.o.ready.eq(words.ready),
                credit.eq(fifo.o.valid & fifo.o.ready),
            ]
        lanes = config.lanes
        self.control(
            m,
            {
                "i_start": self.i_launch & (self.i_pairs != 0),
                "i_beats": (self.i_pairs + (lanes - 1)) >> exact_log2(lanes),
                "i_use": Mux(
                    self.i_dry, 1 << INDEX_STREAM, (1 << INDEX_STREAM) | (1 << VALUE_STREAM)
                ),
            },
        )
        m.d.comb += [
            decompressor.i_start.eq(self.i_launch),
            decompressor.i_pairs.eq(self.i_pairs),
            decompressor.i_count.eq(self.i_count),
            decompressor.i_dry.eq(self.i_dry),
            self.o.valid.eq(decompressor.o.valid),
            self.o.payload.eq(decompressor.o.payload),
            decompressor.o.ready.eq(self.o.ready),
            self.o_verified.eq(self.i_dry & decompressor.o_done & mover.o_idle),
            self.o_duplicates.eq(decompressor.o_duplicates),
            self.o_counted.eq(~self.i_dry & decompressor.o_done),
            self.o_idle.eq(mover.o_idle),
        ]
        if config.mixed:
            m.d.comb += [
                schedule.i_narrow.eq(self.i_format != GradientFormat.FP32),
                decompressor.i_format.eq(self.i_format),
            ]
        if decompressor.choice:
            m.d.comb += decompressor.i_scatter.eq(self.i_scatter)
        self._connect_fault(m)
        return m

    def _connect_fault(self, m: Module) -> None:
        """Drive `o_fault`: of the bus first, then of the pairs, with the address of the wrong
        index.
        """
        decompressor = self.decompressor
        bus = self.fault(m)
        found = Signal(FaultLayout())
        causes = Array(CAUSES.get(cause, ErrorCause.NONE) for cause in PairCause)
        with m.If(decompressor.o_cause != PairCause.NONE):
            m.d.comb += [
                found.cause.eq(causes[decompressor.o_cause]),
                found.stream.eq(Stream.INDEX_READ),
                found.address.eq(self.i_base[INDEX_STREAM] + decompressor.o_position * INDEX_BYTES),
            ]
        m.d.comb += self.o_fault.eq(Mux(bus.cause != 0, bus, found))
