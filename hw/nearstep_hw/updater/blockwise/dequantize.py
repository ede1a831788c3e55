"""States in 8 bits on their way from memory."""

from amaranth import Cat, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.hdl import Value
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.fp.mul import mul
from nearstep_hw.fp.pipeline import Pipeline
from nearstep_hw.rule.technology import TECHNOLOGIES
from nearstep_spec.blockwise import CODES, GROUP, dynamic_map
from nearstep_spec.fp import FP32
from nearstep_spec.technology import TECHNOLOGIES as NAMES

CODE_WIDTH = exact_log2(CODES)
CODES_OF_A_WORD = FP32.width // CODE_WIDTH


class Dequantize(wiring.Component):
    """Makes beats of binary32 of blocks of scales and codes, see `nearstep_spec.blockwise`.

    The first beat of each block has its scales, the lowest bits the first. What is left of the last
    beat waits at the output for `i_clear`.

    *Timing*: `ways` elements a cycle; a beat out `latency` cycles after its codes came. Nothing
    moves while one beat waits at the output and another one would follow it.

    *Numerics*: the entry of the map times the scale, rounded once.

    Parameters
    ----------
    lanes : binary32 elements of a beat.
    ways : elements a cycle, a divisor of `lanes`.
    block_elements : of a block: `GROUP` to `GROUP * lanes`, a power of two.
    signed : which map.
    technology : FPGA that the multipliers are divided into stages for.

    Members
    -------
    i : beats as they lie in memory.
    o : beats of binary32.
    i_clear : forgets everything.

    Attributes
    ----------
    latency : of the last elements of a beat.
    """

    def __init__(
        self,
        *,
        lanes: int,
        ways: int,
        block_elements: int,
        signed: bool,
        technology: str = NAMES[0],
    ) -> None:
        self.lanes = lanes
        self.ways = ways
        self.block_elements = block_elements
        self.signed = signed
        self.technology = TECHNOLOGIES[technology]
        self.depth = 1 + self.technology.depths["mul"]  # the map is a memory, read in a cycle
        self.latency = self.depth + 1
        beat = stream.Signature(FP32.width * lanes)
        super().__init__({"i": In(beat), "o": Out(beat), "i_clear": In(1)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        width = FP32.width * self.ways
        parts = CODES_OF_A_WORD * self.lanes // self.ways  # of a beat of codes
        advance, takes, ends, found = Signal(), Signal(), Signal(), Signal()
        number = Signal(range(self.lanes // self.ways))  # part of the beat that is made
        whole = Signal()
        earlier = Signal(FP32.width * self.lanes - width, reset_less=True)
        made = Signal(width)
        scales = Signal(FP32.width * self.lanes, reset_less=True)
        scaled = Signal()  # `scales` are those of the block
        place = Signal(range(self.block_elements // self.ways))  # part of the block
        scale, codes = Signal(FP32.width), Signal(CODE_WIDTH * self.ways)
        pipe = Pipeline(
            m, en=advance, delay=self.technology.delay, multiplier=self.technology.multiplier
        )

        groups = place[exact_log2(GROUP // self.ways) :]
        m.d.comb += [
            found.eq(pipe.valid(takes, self.depth)),
            whole.eq(number == self.lanes // self.ways - 1),
            # Parts of the next beat are gathered while one waits at the output.
            advance.eq(~(found & whole) | ~self.o.valid | self.o.ready),
            made.eq(self._numbers(m, pipe, scale, codes)),
            takes.eq(advance & self.i.valid & scaled),
            ends.eq((place % parts) == parts - 1),
            scale.eq(scales.word_select(groups, FP32.width)),
            codes.eq(self.i.payload.word_select(place % parts, len(codes))),
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
            with m.If(place == self.block_elements // self.ways - 1):
                m.d.sync += [place.eq(0), scaled.eq(0)]
        return ResetInserter(self.i_clear)(m)

    def _numbers(self, m: Module, pipe: Pipeline, scale: Value, codes: Value) -> Value:
        """The elements of a part, at the end of the pipeline."""
        depth = self.depth
        given = pipe.wrap(scale, 0, "scale_of_part")
        factor = pipe.delayed(given, 1)
        found = []
        for way in range(self.ways):
            m.submodules[f"map{way}"] = memory = Memory(
                shape=FP32.width, depth=CODES, init=dynamic_map(signed=self.signed)
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
