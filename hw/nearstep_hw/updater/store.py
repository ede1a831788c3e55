"""Store path: from the output FIFOs to memory."""

from amaranth import Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.stream.slice import StreamSlice
from nearstep_hw.updater.array_lengths import beat_number_width
from nearstep_hw.updater.blockwise.quantize import Quantize
from nearstep_hw.updater.blockwise.shape import BlockwiseShape
from nearstep_hw.updater.narrow import COPY_FORMAT_WIDTH, Narrow
from nearstep_hw.updater.random_bits import STREAM_WIDTH, RandomBits, calls_of
from nearstep_hw.updater.windowed import WindowedWrite
from nearstep_spec.rounding import INDEX_BITS, SKIP_BITS, WORD_BITS
from nearstep_spec.rule.rules import ARRAYS
from nearstep_spec.updater.config import COPY_OUT, ELEMENT_BYTES, UpdateKernelConfig
from nearstep_spec.updater.operands import Operand, operands
from nearstep_spec.updater.registers import CopyOutFormat

PARAMETERS = ARRAYS[0]


class StorePath(WindowedWrite):
    """Stores blocks of the arrays, in turn; each array has a FIFO of two blocks.

    A copy of the parameters in 16 bits is stored after the arrays. Elements of 16 or 8 bits take
    fewer beats, and are converted before their FIFO.

    Members
    -------
    all : as of `WindowedWrite`; the copy's base is the last.
    i_beats : beats of binary32 of an array; held while `o_idle` is low.
    i_tail : byte strobes of the last beat of arrays of binary32.
    i_use : a bit for each array that the run has; held while `o_idle` is low. If not all runs
        have all.
    i_narrow_tail, i_quantized_tail : byte strobes of the last beat of arrays of 16 bits, and of
        codes of 8 bits. If there are such arrays.
    i_copy_format : `CopyOutFormat` of the copy. If the kernel can make one.
    i_seed, i_step, i_index, i_within, i_skip, i_stream_<array> : of random bits, see `RandomBits`;
        held while `i_clear` is low. If arrays can be rounded stochastically, an `i_stream` for
        each.
    i_<array> : beats.
    i_beat_ready : a beat of every input is written in this cycle.
    o_block_done : a bit for each array: a block is written and acknowledged.
    """

    def __init__(self, config: UpdateKernelConfig) -> None:
        self.copies = bool(config.copy_out_formats)
        self.bursts_ahead = 1 << ceil_log2(config.bursts_ahead)
        self.streams = (*config.states, *([COPY_OUT] if self.copies else []))
        table = operands(config)
        self.operands = [table[name] for name in self.streams]
        self.narrow = tuple(i for i, each in enumerate(self.operands) if each.has_16_bits)
        self.quantized = tuple(i for i, each in enumerate(self.operands) if each.has_8_bits)
        self.own = (*self.narrow, *self.quantized)
        self.stochastic = config.stochastic if config.stochastic_rounding else ()
        random = {
            "i_seed": In(WORD_BITS),
            "i_step": In(WORD_BITS),
            "i_index": In(INDEX_BITS),
            "i_within": In(SKIP_BITS),
            "i_skip": In(SKIP_BITS),
            **{f"i_stream_{name}": In(STREAM_WIDTH) for name in self.stochastic},
        }
        width, optional = beat_number_width(config), config.selective or self.copies
        super().__init__(
            config,
            [each.write for each in self.operands],
            {
                "i_beats": In(width + 1),
                "i_tail": In(config.beat_bytes),
                **({"i_use": In(len(self.streams))} if optional else {}),
                **({"i_narrow_tail": In(config.beat_bytes)} if self.narrow else {}),
                **({"i_quantized_tail": In(config.beat_bytes)} if self.quantized else {}),
                **({"i_copy_format": In(COPY_FORMAT_WIDTH)} if self.copies else {}),
                **(random if self.stochastic else {}),
                **{f"i_{name}": In(stream.Signature(config.data_width)) for name in config.states},
                "i_beat_ready": In(1),
                "o_block_done": Out(len(self.streams)),
            },
            block_beats=config.block_beats,
            optional=optional,
            narrow=self.narrow,
            quantized=self.quantized,
            number_width=width,
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        config = self.config
        schedule = self.schedule
        mover = self.move(
            m,
            buffer_beats=config.fifo_beats + 1,  # the FIFO's memory and its output register
            bursts_ahead=self.bursts_ahead,
            own=self.own,
            quantized=self.quantized,
        )
        use = {"i_use": self.i_use} if schedule.optional else {}
        begin = use | {"i_start": self.i_launch, "i_beats": self.i_beats}
        self.control(m, begin, {"i_credit": self.i_beat_ready, "i_tail": self.i_tail})
        m.d.comb += [self.o_block_done.eq(mover.o_block_done), self.o_idle.eq(mover.o_idle)]
        if self.narrow:
            m.d.comb += schedule.i_narrow.eq(~0)
            m.d.comb += mover.i_tail_own.eq(self.i_narrow_tail)
        if self.quantized:
            m.d.comb += mover.i_tail_quantized.eq(self.i_quantized_tail)
        entries = {}
        for index, (operand, sink) in enumerate(zip(self.operands, mover.data, strict=True)):
            name = operand.name
            m.submodules[f"fifo_{name}"] = fifo = StreamFifo(
                config.data_width, depth=config.fifo_beats
            )
            wiring.connect(m, fifo.o, sink)
            m.d.comb += fifo.i_clear.eq(self.i_clear)
            entries[name] = fifo.i
            if index in self.own:
                made = self._narrow if index in self.narrow else self._quantize
                entries[name] = made(m, operand, fifo)
                own = self.own.index(index)
                m.d.comb += mover.i_credit_own[own].eq(fifo.i.valid & fifo.i.ready)
            if name in config.states and not (self.copies and name == PARAMETERS):
                wiring.connect(m, wiring.flipped(getattr(self, f"i_{name}")), entries[name])
        if self.copies:
            self._copy(m, entries[PARAMETERS], entries[COPY_OUT])
        m.d.comb += self.o_fault.eq(self.fault(m))
        return m

    def _narrow(self, m: Module, operand: Operand, fifo: StreamFifo) -> object:
        """Add a narrower before a FIFO; return its input."""
        stochastic = operand.name in self.stochastic
        narrow = Narrow(
            lanes=self.config.lanes,
            formats=operand.formats,
            beats_width=len(self.i_beats),
            stochastic=stochastic,
        )
        cut = StreamSlice(self.config.data_width)
        m.submodules[f"narrow_{operand.name}"] = narrow
        m.submodules[f"cut_{operand.name}"] = ResetInserter(self.i_clear)(cut)
        wiring.connect(m, cut.o, narrow.i)
        wiring.connect(m, narrow.o, fifo.i)
        copies = operand.name == COPY_OUT
        m.d.comb += [
            narrow.i_beats.eq(self.i_beats),
            narrow.i_format.eq(
                self.i_copy_format if copies else CopyOutFormat[operand.format.upper()]
            ),
            narrow.i_clear.eq(self.i_clear),
        ]
        if stochastic:
            self._round(m, operand.name, narrow)
        return cut.i

    def _quantize(self, m: Module, operand: Operand, fifo: StreamFifo) -> object:
        """Add a quantizer before a FIFO; return its input."""
        quantize = Quantize(BlockwiseShape.of(self.config, operand), beats_width=len(self.i_beats))
        m.submodules[f"quantize_{operand.name}"] = quantize
        wiring.connect(m, quantize.o, fifo.i)
        m.d.comb += [
            quantize.i_beats.eq(self.i_beats),
            quantize.i_tail.eq(self.i_tail[::ELEMENT_BYTES]),
            quantize.i_clear.eq(self.i_clear),
        ]
        return quantize.i

    def _round(self, m: Module, name: str, narrow: Narrow) -> None:
        """Connect random bits to the narrower of an array, for runs that round stochastically."""
        config = self.config
        random = RandomBits(
            lanes=config.lanes,
            calls=calls_of(config.units),
            block_elements=config.block_elements,
        )
        m.submodules[f"random_{name}"] = random
        stream_number = getattr(self, f"i_stream_{name}")
        wiring.connect(m, random.o, narrow.i_random)
        m.d.comb += [
            random.i_stream.eq(stream_number),
            random.i_seed.eq(self.i_seed),
            random.i_step.eq(self.i_step),
            random.i_index.eq(self.i_index),
            random.i_within.eq(self.i_within),
            random.i_skip.eq(self.i_skip),
            random.i_clear.eq(self.i_clear),
            narrow.i_stochastic.eq(stream_number != 0),
        ]

    def _copy(self, m: Module, parameters: object, copies: object) -> None:
        """Feed the parameters also to the copy, if the run writes a copy."""
        given = getattr(self, f"i_{PARAMETERS}")
        wanted = Signal()
        m.d.comb += [
            wanted.eq(self.i_use[len(self.config.states)]),
            # A beat is output when every sink has room: both accept it in the same cycle.
            given.ready.eq(parameters.ready & (copies.ready | ~wanted)),
            parameters.valid.eq(given.valid),
            parameters.payload.eq(given.payload),
            copies.valid.eq(given.valid & wanted),
            copies.payload.eq(given.payload),
        ]
