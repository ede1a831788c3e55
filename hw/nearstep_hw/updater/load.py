"""Load path: from memory to the input FIFOs."""

from amaranth import Elaboratable, Module, ResetInserter
from amaranth.hdl import ValueLike
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.stream.slice import StreamSlice
from nearstep_hw.updater.array_lengths import beat_number_width
from nearstep_hw.updater.blockwise.dequantize import Dequantize
from nearstep_hw.updater.blockwise.shape import BlockwiseShape
from nearstep_hw.updater.widen import FORMAT_WIDTH, Widen
from nearstep_hw.updater.windowed import WindowedRead
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.operands import Operand, operands
from nearstep_spec.updater.registers import GradientFormat


class LoadPath(WindowedRead):
    """Loads blocks of the arrays, in turn; each array has a FIFO of two blocks.

    Elements of 16 or 8 bits have the same format in memory and in their FIFO, in fewer beats, and
    are converted to binary32 after the FIFO.

    Members
    -------
    all : as of `WindowedRead`.
    i_beats : beats of binary32 of an array; held while `o_idle` is low.
    i_use : a bit for each array that the run has; held while `o_idle` is low. If not all runs have
        all.
    i_format : format of the gradients; held while `o_idle` is low. If the kernel has several.
    o_<array> : beats.
    i_taken : a beat of every output is taken in this cycle.
    """

    def __init__(self, config: UpdateKernelConfig) -> None:
        table = operands(config)
        arrays = [table[name] for name in config.arrays]
        self.narrow = {i: each for i, each in enumerate(arrays) if each.has_16_bits}
        self.quantized = {i: each for i, each in enumerate(arrays) if each.has_8_bits}
        self.own = (*self.narrow, *self.quantized)
        width = beat_number_width(config)
        super().__init__(
            config,
            [each.read for each in arrays],
            {
                "i_beats": In(width + 1),
                **({"i_use": In(len(arrays))} if config.selective else {}),
                **({"i_format": In(FORMAT_WIDTH)} if config.mixed else {}),
                **{f"o_{name}": Out(stream.Signature(config.data_width)) for name in config.arrays},
                "i_taken": In(1),
            },
            block_beats=config.block_beats,
            optional=config.selective,
            narrow=tuple(self.narrow),
            quantized=tuple(self.quantized),
            number_width=width,
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        config = self.config
        schedule = self.schedule
        mover = self.move(
            m,
            landing_beats=config.fifo_beats,
            bursts_ahead=config.bursts_ahead,
            own=self.own,
        )
        use = {"i_use": self.i_use} if schedule.optional else {}
        begin = use | {"i_start": self.i_launch, "i_beats": self.i_beats}
        self.control(m, begin, {"i_credit": self.i_taken})
        m.d.comb += self.o_idle.eq(mover.o_idle)
        for index, name in enumerate(config.arrays):
            m.submodules[f"fifo_{name}"] = fifo = StreamFifo(
                config.data_width, depth=config.fifo_beats
            )
            beats = wiring.flipped(getattr(self, f"o_{name}"))
            if index in self.narrow:
                number = list(self.narrow).index(index)
                form = self._widen(m, self.narrow[index], fifo, beats)
                m.d.comb += schedule.i_narrow[number].eq(form != GradientFormat.FP32)
            elif index in self.quantized:
                self._dequantize(m, self.quantized[index], fifo, beats)
            else:
                wiring.connect(m, fifo.o, beats)
            if index in self.own:
                gained = mover.i_credit_own[self.own.index(index)]
                m.d.comb += gained.eq(fifo.o.valid & fifo.o.ready)
            m.d.comb += [
                # Space for the data is reserved: ready is high at every beat.
                fifo.i.valid.eq(mover.o_beat[index]),
                fifo.i.payload.eq(self.bus.r.payload.data),
                fifo.i_clear.eq(self.i_clear),
            ]
        m.d.comb += self.o_fault.eq(self.fault(m))
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
