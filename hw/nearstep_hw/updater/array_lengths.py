"""Arrays that a run may have, and how long each is."""

from amaranth import Const, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.config import ELEMENT_BYTES, HALF_BYTES, INDEX, AdamKernelConfig
from nearstep_spec.updater.operands import element_bytes, operands

END_WIDTH = 67  # a 64-bit base plus a 64-bit count of 4-byte elements


class ArrayLengths(wiring.Component):
    """Bytes of every array of a run, in whole beats: what the bus moves.

    *Timing*: one cycle.

    Parameters
    ----------
    config : of the kernel.

    Members
    -------
    i_count, i_pairs : elements; and pairs, if the kernel takes them.
    i_narrow : gradients, or the values of pairs, have 16 bits. If they have a choice.
    i_paired : gradients come as pairs. If the kernel takes them.
    o_bytes : for each of `operands`.
    """

    def __init__(self, config: AdamKernelConfig) -> None:
        self.config = config
        self.operands = operands(config)
        super().__init__(
            {
                "i_count": In(64),
                **({"i_narrow": In(1)} if config.mixed else {}),
                **({"i_paired": In(1), "i_pairs": In(64)} if config.compression else {}),
                "o_bytes": Out(END_WIDTH).array(len(self.operands)),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        config = self.config
        counts = {"count": self.i_count, **({"pairs": self.i_pairs} if config.compression else {})}
        length: dict[tuple[str, int], Signal] = {}
        for name, elements in counts.items():
            for size in (ELEMENT_BYTES, HALF_BYTES):
                a_beat = config.beat_bytes // size
                whole = (elements + (a_beat - 1)) & ~(a_beat - 1)
                length[name, size] = Signal(END_WIDTH, name=f"{name}_{size}")
                m.d.sync += length[name, size].eq(whole * size)
        narrow = self.i_narrow if config.mixed else Const(0, 1)
        paired = self.i_paired if config.compression else Const(0, 1)

        def gradients(name: str) -> Value:
            return Mux(narrow, length[name, HALF_BYTES], length[name, ELEMENT_BYTES])

        for operand, length_of_it in zip(self.operands.values(), self.o_bytes, strict=True):
            value: Value = length[
                "pairs" if operand.name == INDEX else "count", element_bytes(operand.format)
            ]
            if operand.name == GRADIENT:
                value = gradients("count")
                if config.compression:
                    value = Mux(paired, gradients("pairs"), value)
            m.d.comb += length_of_it.eq(value)
        return m
