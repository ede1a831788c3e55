"""Lengths of the arrays of a run."""

from amaranth import Const, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.config import (
    CODE_BYTES,
    ELEMENT_BYTES,
    HALF_BYTES,
    INDEX,
    UpdateKernelConfig,
)
from nearstep_spec.updater.operands import element_bytes, operands

WIDE_COUNT = 32
"""Bits of the counts of pairs and elements of a run with pairs, and of elements of a scan."""


def beat_number_width(config: UpdateKernelConfig) -> int:
    """Return the bits of the number of a beat of binary32 of an array of a run.

    As many as memory needs, and one more if a run can read only gradients of 16 bits, or parameters
    of 16 bits with few pairs: memory then holds twice as many elements.
    """
    fits = config.address_width - exact_log2(config.beat_bytes)
    alone = config.scan or bool(config.compression)
    if not (alone and any(operand.has_16_bits for operand in operands(config).values())):
        return fits
    return max(fits, min(fits + 1, WIDE_COUNT - exact_log2(config.lanes)))


class ArrayLengths(wiring.Component):
    """Computes the bytes of every array of a run, in whole beats, as transferred on the bus.

    *Timing*: one cycle.

    Members
    -------
    i_count, i_pairs : elements, and pairs. `i_pairs` only if the kernel takes pairs.
    i_narrow : gradients, or the values of pairs, have 16 bits. If the kernel has several formats.
    i_paired : gradients are pairs. If the kernel takes pairs.
    o_bytes : for each of `operands`; valid if not `o_beyond`.
    o_beyond : a bit for each operand: its elements are at least as many as byte addresses.
    """

    def __init__(self, config: UpdateKernelConfig) -> None:
        self.config = config
        self.count_width = config.address_width  # of elements; of p each has 2 bytes or more
        self.length_width = self.count_width + exact_log2(ELEMENT_BYTES) + 1  # whole beats
        self.operands = operands(config)
        super().__init__(
            {
                "i_count": In(64),
                **({"i_narrow": In(1)} if config.mixed else {}),
                **({"i_paired": In(1), "i_pairs": In(64)} if config.compression else {}),
                "o_bytes": Out(self.length_width).array(len(self.operands)),
                "o_beyond": Out(len(self.operands)),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        config = self.config
        counts = {"count": self.i_count, **({"pairs": self.i_pairs} if config.compression else {})}
        length: dict[tuple[str, int], Signal] = {}
        beyond: dict[str, Signal] = {}
        for name, elements in counts.items():
            beyond[name] = Signal(name=f"{name}_beyond")
            m.d.sync += beyond[name].eq(elements[self.count_width :].any())
            for size in (ELEMENT_BYTES, HALF_BYTES):
                a_beat = config.beat_bytes // size
                whole = (elements[: self.count_width] + (a_beat - 1)) & ~(a_beat - 1)
                length[name, size] = Signal(self.length_width, name=f"{name}_{size}")
                m.d.sync += length[name, size].eq(whole * size)
        if config.blockwise:
            block = config.block_layout
            count = self.i_count[: self.count_width]
            codes = (count + (config.beat_bytes - 1)) & ~(config.beat_bytes - 1)
            blocks = (count + (block.elements - 1)) >> exact_log2(block.elements)
            nbytes = Signal(self.length_width, name="count_quantized")
            length["count", CODE_BYTES] = nbytes
            m.d.sync += nbytes.eq(codes + blocks * block.scale_bytes)
        narrow = self.i_narrow if config.mixed else Const(0, 1)
        paired = self.i_paired if config.compression else Const(0, 1)

        def gradients(name: str) -> Value:
            return Mux(narrow, length[name, HALF_BYTES], length[name, ELEMENT_BYTES])

        for operand, o_bytes, o_beyond in zip(
            self.operands.values(), self.o_bytes, self.o_beyond, strict=True
        ):
            count = "pairs" if operand.name == INDEX else "count"
            value: Value = length[count, element_bytes(operand.format)]
            too_long: Value = beyond[count]
            if operand.name == GRADIENT:
                value = gradients("count")
                if config.compression:
                    value = Mux(paired, gradients("pairs"), value)
                    too_long = Mux(paired, beyond["pairs"], too_long)
            m.d.comb += [o_bytes.eq(value), o_beyond.eq(too_long)]
        return m
