"""Memory to input FIFOs."""

from amaranth import Elaboratable, Module, ResetInserter
from amaranth.hdl import ValueLike
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.burst import id_width
from nearstep_hw.axi.reader import ReadMover
from nearstep_hw.axi.schedule import BlockSchedule
from nearstep_hw.axi.signature import Axi4ReadSignature
from nearstep_hw.axi.window import WindowChecker, window_port
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.stream.slice import StreamSlice
from nearstep_hw.updater.array_lengths import beat_number_width
from nearstep_hw.updater.blockwise.dequantize import Dequantize
from nearstep_hw.updater.blockwise.shape import BlockwiseShape
from nearstep_hw.updater.fault import FaultLayout, mover_fault
from nearstep_hw.updater.widen import FORMAT_WIDTH, Widen
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.operands import Operand, operands
from nearstep_spec.updater.registers import ErrorCause, GradientFormat


class LoadPath(wiring.Component):
    """Loads blocks of the arrays, in turn, into a FIFO each of two blocks.

    Elements of 16 or 8 bits have the same format in memory and in their FIFO, in fewer beats,
    and are converted to binary32 behind the FIFO.

    Parameters
    ----------
    config : of the kernel.

    Members
    -------
    bus : AR and R.
    window : the windows, see `window_port`.
    i_base, i_beats : of the arrays; held while `o_idle` is low.
    i_use : a bit for each array that the run has; held while `o_idle` is low. If not all runs
        have all.
    i_format : of the gradients; held while `o_idle` is low. If the kernel has several.
    i_launch : starts loading.
    o_<array> : beats.
    i_taken : a beat of every output is taken in this cycle.
    o_fault : a fault in this cycle; cause 0 is none.
    i_stop : issues nothing more.
    o_idle : nothing is outstanding.
    i_clear : clears all state; only when `o_idle`.
    """

    def __init__(self, config: UpdateKernelConfig) -> None:
        self.config = config
        table = operands(config)
        arrays = [table[name] for name in config.arrays]
        self.narrow = {i: each for i, each in enumerate(arrays) if each.has_16_bits}
        self.coded = {i: each for i, each in enumerate(arrays) if each.has_8_bits}
        self.own = (*self.narrow, *self.coded)
        self.schedule = BlockSchedule(
            streams=len(config.arrays),
            address_width=config.address_width,
            beat_bytes=config.beat_bytes,
            block_beats=config.block_beats,
            burst_beats=config.burst_beats,
            optional=config.selective,
            narrow=tuple(self.narrow),
            coded=tuple(self.coded),
            number_width=beat_number_width(config),
        )
        super().__init__(
            {
                "bus": Out(
                    Axi4ReadSignature(
                        address_width=config.address_width,
                        data_width=config.data_width,
                        id_width=id_width(len(config.arrays)),
                    )
                ),
                "window": window_port(
                    address_width=config.address_width,
                    windows=config.window_count,
                    cut=config.cut,
                ),
                "i_base": In(config.address_width).array(len(config.arrays)),
                "i_beats": In(self.schedule.i_beats.shape()),
                **({"i_use": In(len(config.arrays))} if self.schedule.optional else {}),
                **({"i_format": In(FORMAT_WIDTH)} if config.mixed else {}),
                "i_launch": In(1),
                **{f"o_{name}": Out(stream.Signature(config.data_width)) for name in config.arrays},
                "i_taken": In(1),
                "o_fault": Out(FaultLayout()),
                "i_stop": In(1),
                "o_idle": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        config = self.config
        m.submodules.schedule = schedule = self.schedule
        m.submodules.checker = checker = WindowChecker(
            schedule.o.payload.shape(),
            beat_bytes=config.beat_bytes,
            windows=config.window_count,
            write=False,
            cut=config.cut,
        )
        m.submodules.mover = mover = ReadMover(
            streams=len(config.arrays),
            address_width=config.address_width,
            beat_bytes=config.beat_bytes,
            burst_beats=config.burst_beats,
            landing_beats=config.fifo_beats,
            bursts_ahead=config.bursts_ahead,
            own=self.own,
            cut=config.cut,
        )

        wiring.connect(m, schedule.o, checker.i)
        wiring.connect(m, checker.o, mover.i)
        wiring.connect(m, wiring.flipped(self.bus), mover.bus)
        for mine, its in zip(self.window, checker.window, strict=True):
            wiring.connect(m, wiring.flipped(mine), its)
        for base, scheduled, moved in zip(self.i_base, schedule.i_base, mover.i_base, strict=True):
            m.d.comb += [scheduled.eq(base), moved.eq(base)]
        if schedule.optional:
            m.d.comb += schedule.i_use.eq(self.i_use)
        m.d.comb += [
            schedule.i_start.eq(self.i_launch),
            schedule.i_beats.eq(self.i_beats),
            schedule.i_clear.eq(self.i_stop | self.i_clear),
            checker.i_clear.eq(self.i_stop | self.i_clear),
            mover.i_stop.eq(self.i_stop),
            mover.i_gain.eq(self.i_taken),
            mover.i_clear.eq(self.i_clear),
            self.o_idle.eq(mover.o_idle),
        ]
        for index, name in enumerate(config.arrays):
            m.submodules[f"fifo_{name}"] = fifo = StreamFifo(
                config.data_width, depth=config.fifo_beats
            )
            beats = wiring.flipped(getattr(self, f"o_{name}"))
            if index in self.narrow:
                number = list(self.narrow).index(index)
                form = self._widen(m, self.narrow[index], fifo, beats)
                m.d.comb += schedule.i_narrow[number].eq(form != GradientFormat.FP32)
            elif index in self.coded:
                self._dequantize(m, self.coded[index], fifo, beats)
            else:
                wiring.connect(m, fifo.o, beats)
            if index in self.own:
                gained = mover.i_gain_own[self.own.index(index)]
                m.d.comb += gained.eq(fifo.o.valid & fifo.o.ready)
            m.d.comb += [
                # Space for the data is reserved: ready is high at every beat.
                fifo.i.valid.eq(mover.o_landed[index]),
                fifo.i.payload.eq(self.bus.r.payload.data),
                fifo.i_clear.eq(self.i_clear),
            ]
        m.d.comb += self.o_fault.eq(
            mover_fault(
                m,
                bus=mover.fault,
                refused=checker.o_refused,
                burst=checker.o_burst,
                response=ErrorCause.READ_RESPONSE,
                streams=[operands(config)[name].read for name in config.arrays],
            )
        )
        return m

    def _widen(self, m: Module, operand: Operand, fifo: StreamFifo, beats: object) -> ValueLike:
        """Connect the FIFO, through a widener, to the output; return the `GradientFormat`."""
        several = len(operand.formats) > 1
        form = self.i_format if several else GradientFormat[operand.format.upper()]
        widen = Widen(lanes=self.config.lanes, formats=operand.formats)
        # Widening does not depend on the functional units in the same cycle.
        cut = StreamSlice(self.config.data_width)
        m.submodules[f"widen_{operand.name}"] = widen
        m.submodules[f"widened_{operand.name}"] = ResetInserter(self.i_clear)(cut)
        wiring.connect(m, fifo.o, widen.i)
        wiring.connect(m, widen.o, cut.i)
        wiring.connect(m, cut.o, beats)
        m.d.comb += [widen.i_format.eq(form), widen.i_clear.eq(self.i_clear)]
        return form

    def _dequantize(self, m: Module, operand: Operand, fifo: StreamFifo, beats: object) -> None:
        """Connect the FIFO, through a converter to binary32, to the output."""
        dequantize = Dequantize(BlockwiseShape.of(self.config, operand))
        m.submodules[f"dequantize_{operand.name}"] = dequantize
        wiring.connect(m, fifo.o, dequantize.i)
        wiring.connect(m, dequantize.o, beats)
        m.d.comb += dequantize.i_clear.eq(self.i_clear)
