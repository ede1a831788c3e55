"""Conversion of states in 8 bits to binary32."""

from amaranth import Cat, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.hdl import Value
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.fp.mul import mul
from nearstep_hw.fp.pipeline import Pipeline
from nearstep_hw.updater.blockwise.shape import CODE_WIDTH, BlockwiseShape
from nearstep_spec.blockwise import CODES, dynamic_map
from nearstep_spec.fp import FP32


class Dequantize(wiring.Component):
    """Converts blocks of scales and codes to beats of binary32, see `nearstep_spec.blockwise`.

    The first beat of each block holds its scales, the first in the lowest bits. Elements beyond the
    end of the run wait at the output until `i_clear`.

    *Timing*: `ways` elements a cycle; a beat out `latency` cycles after its codes. The pipeline
    stalls while one beat waits at the output and the next is complete.

    *Numerics*: the entry of the map times the scale, rounded once.

    Members
    -------
    i : beats as in memory.
    o : beats of binary32.
    i_clear : clears all state.

    Attributes
    ----------
    latency : cycles from the last codes of a beat of binary32 to the beat.
    """

    def __init__(self, shape: BlockwiseShape) -> None:
        self.shape = shape
        self.depth = 1 + shape.fpga.depths["mul"]  # the map is a memory, read in a cycle
        self.latency = self.depth + 1
        beat = stream.Signature(shape.width)
        super().__init__({"i": In(beat), "o": Out(beat), "i_clear": In(1)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        shape = self.shape
        width = FP32.width * shape.ways
        advance, takes, ends, found = Signal(), Signal(), Signal(), Signal()
        number = Signal(range(shape.parts))  # part of the output beat
        whole = Signal()
        earlier = Signal(shape.width - width, reset_less=True)
        made = Signal(width)
        scales = Signal(shape.width, reset_less=True)
        scaled = Signal()  # `scales` are those of the block
        place = Signal(range(shape.block_parts))  # part of the block
        scale, codes = Signal(FP32.width), Signal(CODE_WIDTH * shape.ways)
        fpga = shape.fpga
        pipe = Pipeline(m, en=advance, delay=fpga.delay, multiplier=fpga.multiplier)

        group = place[exact_log2(shape.group_parts) :]
        of_beat = place % shape.code_parts
        m.d.comb += [
            found.eq(pipe.valid(takes, self.depth)),
            whole.eq(number == shape.parts - 1),
            # Parts of the next beat are collected while a beat waits at the output.
            advance.eq(~(found & whole) | ~self.o.valid | self.o.ready),
            made.eq(self._numbers(m, pipe, scale, codes)),
            takes.eq(advance & self.i.valid & scaled),
            ends.eq(of_beat == shape.code_parts - 1),
            scale.eq(scales.word_select(group, FP32.width)),
            codes.eq(self.i.payload.word_select(of_beat, len(codes))),
            self.i.ready.eq(~scaled | (takes & ends)),
        ]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(found & advance):
            m.d.sync += [
                number.eq(Mux(whole, 0, number + 1)),
                earlier.eq(Cat(earlier, made)[width:]),
            ]
            with m.If(whole):
                m.d.sync += [self.o.valid.eq(1), self.o.payload.eq(Cat(earlier, made))]
        with m.If(~scaled):
            m.d.sync += [scales.eq(self.i.payload), scaled.eq(self.i.valid)]
        with m.Elif(takes):
            m.d.sync += place.eq(place + 1)
            with m.If(place == shape.block_parts - 1):
                m.d.sync += [place.eq(0), scaled.eq(0)]
        return ResetInserter(self.i_clear)(m)

    def _numbers(self, m: Module, pipe: Pipeline, scale: Value, codes: Value) -> Value:
        """Return the elements of a part, at the end of the pipeline."""
        depth = self.depth
        given = pipe.wrap(scale, 0, "scale_of_part")
        factor = pipe.delayed(given, 1)
        found = []
        for way in range(self.shape.ways):
            m.submodules[f"map{way}"] = memory = Memory(
                shape=FP32.width, depth=CODES, init=dynamic_map(signed=self.shape.signed)
            )
            entry = memory.read_port()
            m.d.comb += [
                entry.en.eq(pipe.en),
                entry.addr.eq(codes.word_select(way, CODE_WIDTH)),
            ]
            value = pipe.source(entry.data, 1, f"entry{way}")
            z = mul(pipe, FP32, value, factor, depth=depth - 1, flags=False).z
            found.append(pipe.at(z, depth))
        return Cat(found)
