"""Feeds functional units that never stall."""

from amaranth import Cat, Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import data

from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.updater.sequencer import UnitSequencer, in_flight_range, units_latency
from nearstep_spec.updater.config import UpdateKernelConfig

AROUND = 8
"""Most beats in registers and FIFOs around the units at full rate."""


def results_depth(config: UpdateKernelConfig) -> int:
    """Return the depth of the FIFO of results in beats: those in the pipelines at full rate, and
    `AROUND`.
    """
    beats = -(-units_latency(config) // config.cycles_per_beat) + AROUND
    return 1 << (beats - 1).bit_length()


class FreeSequencer(UnitSequencer):
    """A `UnitSequencer` that always enables the functional units.

    A common enable of all pipeline registers is a long net at the end of a long path. Instead a
    beat is fed only when the FIFO after the units has room for its results; missing beats are
    bubbles in the pipelines.

    *Timing*: no combinational path from the FIFOs through the units; a part every cycle, and four
    cycles more than with `UnitSequencer` from a beat to its results.

    Parameters
    ----------
    config, unit, inputs, outputs, beats_width, optional : as of `UnitSequencer`.

    Members
    -------
    all : as of `UnitSequencer`; `o_beat_ready` when a beat of every output leaves the FIFO.
    """

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        unit = self.unit
        parts = self.config.cycles_per_beat
        width = self.config.data_width
        depth = results_depth(self.config)
        ins, use_in = self._arrays("i", self.inputs)
        outs, use_out = self._arrays("o", self.outputs)
        m.submodules.results = results = StreamFifo(data.ArrayLayout(width, len(outs)), depth=depth)
        to_feed = Signal.like(self.i_beats)
        more = Signal()  # `to_feed` is not 0
        reserved = Signal(range(depth + 1))  # beats fed, wholly or in part, not output yet
        in_flight = Signal(in_flight_range(self.config))  # parts in the pipelines
        part_in = Signal(range(parts))
        part_out = Signal(range(parts))
        have = Signal()
        space = Signal()
        feed = Signal()
        last_in = Signal()
        last_out = Signal()
        out = Signal()

        m.d.comb += [
            last_in.eq(part_in == parts - 1),
            last_out.eq(part_out == parts - 1),
            have.eq((Cat(beats.valid for beats in ins) | ~use_in).all()),
            space.eq(~reserved[-1] | (part_in != 0)),
            feed.eq(have & more & space & ~self.i_stop & ~self.i_clear),
            unit.i_en.eq(1),
            out.eq(unit.o_valid),
            self.o_taken.eq(feed & last_in),
            self.o_starved.eq(more & ~have),
            self.o_blocked.eq(more & have & ~space),
            self.o_empty.eq((in_flight == 0) & ((reserved == 0) | self.i_stop)),
        ]
        m.d.sync += [
            unit.i_valid.eq(feed),
            in_flight.eq(in_flight + feed - out),
            reserved.eq(reserved + (feed & (part_in == 0)) - self.o_beat_ready),
        ]
        with m.If(self.i_launch):
            m.d.sync += [to_feed.eq(self.i_beats), more.eq(self.i_beats != 0)]
        with m.Elif(self.o_taken):
            m.d.sync += [to_feed.eq(to_feed - 1), more.eq(to_feed != 1)]
        if parts > 1:
            with m.If(feed):
                m.d.sync += part_in.eq(part_in + 1)
            with m.If(out):
                m.d.sync += part_out.eq(part_out + 1)

        slot = width // parts
        for name, beats, used in zip(self.inputs, ins, use_in, strict=True):
            m.d.sync += getattr(unit, f"i_{name}").eq(beats.payload.word_select(part_in, slot))
            m.d.comb += beats.ready.eq(self.o_taken & used)
        # Results are registered before the FIFO.
        whole = Signal(data.ArrayLayout(width, len(outs)), reset_less=True)
        is_whole = Signal()
        m.d.sync += is_whole.eq(out & last_out & ~self.i_stop)
        for index, name in enumerate(self.outputs):
            with m.If(out):
                result = getattr(unit, f"o_{name}")
                m.d.sync += whole[index].eq(Cat(whole[index], result)[slot:])
        # Room is reserved: `results.i.ready` is high whenever a beat is whole.
        m.d.comb += [
            results.i.valid.eq(is_whole),
            results.i.payload.eq(whole),
            self.o_beat_ready.eq(
                results.o.valid
                & (Cat(beats.ready for beats in outs) | ~use_out).all()
                & ~self.i_stop
            ),
            results.o.ready.eq(self.o_beat_ready),
        ]
        for index, (beats, used) in enumerate(zip(outs, use_out, strict=True)):
            m.d.comb += [
                beats.payload.eq(results.o.payload[index]),
                beats.valid.eq(self.o_beat_ready & used),
            ]
        return ResetInserter(self.i_clear)(m)
