"""Feeds the functional units from the input FIFOs, and the output FIFOs from the units."""

from amaranth import Cat, Const, Elaboratable, Module, ResetInserter, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out, PureInterface

from nearstep_hw.rule.schedule import Schedule
from nearstep_hw.rule.technology import TECHNOLOGIES
from nearstep_hw.updater.unit_bank import UnitBankSignature
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import update_rule

MIN_IN_FLIGHT = 1 << 10  # so that a counter has the same bits for all rules but very long ones


def units_latency(config: UpdateKernelConfig) -> int:
    """Return the latency of the functional units of a kernel, in cycles."""
    depths = TECHNOLOGIES[config.technology].depths
    return Schedule.of(update_rule(config).program, depths, 0).latency


def in_flight_range(config: UpdateKernelConfig) -> range:
    """Return the range of a count of parts in the pipelines, and in a register before them."""
    return range(max(MIN_IN_FLIGHT, units_latency(config) + 2))


class UnitSequencer(wiring.Component):
    """Feeds the functional units and collects their results.

    With fewer units than lanes a beat is processed in `config.cycles_per_beat` parts, lowest lanes
    first. The pipelines advance only with a part to feed and room for the results, and so have no
    bubbles before the last beat of the run. After the last beat, or with `i_stop`, the pipelines
    advance until they are empty.

    *Timing*: combinational from the FIFOs to the units and back; a part every cycle.

    Parameters
    ----------
    unit : signature of the functional units' port.
    inputs, outputs : names of the arrays, as in `unit`.
    beats_width : bits of `i_beats`.
    optional : a run may omit arrays.

    Members
    -------
    i_<array>, o_<array> : input and output beats.
    unit : the functional units.
    i_use_in, i_use_out : a bit for each array that the run has; the others transfer no beats.
        If `optional`.
    i_launch : a run of `i_beats` beats begins.
    i_stop : feeds no more parts, and discards the results.
    o_taken : a beat of every input was taken.
    o_beat_ready : a beat of every output is written.
    o_starved : an input beat is missing.
    o_blocked : an output FIFO is full.
    o_empty : nothing is in the pipelines.
    i_clear : clears the state of the run; only when `o_empty`. No part is fed in this cycle.
    """

    def __init__(
        self,
        config: UpdateKernelConfig,
        *,
        unit: UnitBankSignature,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        beats_width: int,
        optional: bool = False,
    ) -> None:
        self.config = config
        self.inputs = inputs
        self.outputs = outputs
        self.optional = optional
        beat = stream.Signature(config.data_width)
        super().__init__(
            {
                **{f"i_{name}": In(beat) for name in inputs},
                **{f"o_{name}": Out(beat) for name in outputs},
                "unit": Out(unit),
                **(
                    {"i_use_in": In(len(inputs)), "i_use_out": In(len(outputs))} if optional else {}
                ),
                "i_launch": In(1),
                "i_beats": In(beats_width),
                "i_stop": In(1),
                "o_taken": Out(1),
                "o_beat_ready": Out(1),
                "o_starved": Out(1),
                "o_blocked": Out(1),
                "o_empty": Out(1),
                "i_clear": In(1),
            }
        )

    def _arrays(self, side: str, names: tuple[str, ...]) -> tuple[list[PureInterface], Value]:
        """Return the streams of one side, `i` or `o`, and a bit for each that the run has."""
        streams = [getattr(self, f"{side}_{name}") for name in names]
        if self.optional:
            return streams, self.i_use_in if side == "i" else self.i_use_out
        return streams, Const((1 << len(names)) - 1, len(names))

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        unit = self.unit
        parts = self.config.cycles_per_beat
        ins, use_in = self._arrays("i", self.inputs)
        outs, use_out = self._arrays("o", self.outputs)
        to_feed = Signal.like(self.i_beats)
        in_flight = Signal(in_flight_range(self.config))
        part_in = Signal(range(parts))
        part_out = Signal(range(parts))
        have = Signal()
        room = Signal()
        feed = Signal()
        drain = Signal()
        fed = Signal()
        got = Signal()
        last_in = Signal()
        last_out = Signal()

        m.d.comb += [
            last_in.eq(part_in == parts - 1),
            last_out.eq(part_out == parts - 1),
            have.eq((Cat(beats.valid for beats in ins) | ~use_in).all()),
            feed.eq(have & (to_feed != 0) & ~self.i_stop & ~self.i_clear),
            drain.eq(((to_feed == 0) | self.i_stop) & (in_flight != 0)),
            room.eq(
                ~unit.o_valid | ~last_out | (Cat(beats.ready for beats in outs) | ~use_out).all()
            ),
            unit.i_en.eq((feed | drain) & (room | self.i_stop)),
            unit.i_valid.eq(feed),
            fed.eq(unit.i_en & feed),
            got.eq(unit.i_en & unit.o_valid),
            self.o_taken.eq(fed & last_in),
            self.o_beat_ready.eq(got & last_out & ~self.i_stop),
            self.o_starved.eq((to_feed != 0) & ~have),
            self.o_blocked.eq((feed | drain) & ~room),
            self.o_empty.eq(in_flight == 0),
        ]
        m.d.sync += in_flight.eq(in_flight + fed - got)
        with m.If(self.i_launch):
            m.d.sync += to_feed.eq(self.i_beats)
        with m.Elif(self.o_taken):
            m.d.sync += to_feed.eq(to_feed - 1)
        if parts > 1:
            with m.If(fed):
                m.d.sync += part_in.eq(part_in + 1)
            with m.If(got):
                m.d.sync += part_out.eq(part_out + 1)

        width = self.config.data_width // parts
        for name, beats, used in zip(self.inputs, ins, use_in, strict=True):
            m.d.comb += [
                getattr(unit, f"i_{name}").eq(beats.payload.word_select(part_in, width)),
                beats.ready.eq(self.o_taken & used),
            ]
        for name, beats, used in zip(self.outputs, outs, use_out, strict=True):
            result = getattr(unit, f"o_{name}")
            earlier = Signal(self.config.data_width - width, name=f"earlier_{name}")
            if parts > 1:
                with m.If(got):
                    m.d.sync += earlier.eq(Cat(earlier, result)[width:])
            m.d.comb += [
                beats.payload.eq(Cat(earlier, result)),
                beats.valid.eq(self.o_beat_ready & used),
            ]
        return ResetInserter(self.i_clear)(m)
