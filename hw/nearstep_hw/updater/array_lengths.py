"""Arrays that a run may have, and how long each is."""

from amaranth import Const, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.config import ELEMENT_BYTES, HALF_BYTES, AdamKernelConfig

END_WIDTH = 67  # a 64-bit base plus a 64-bit count of 4-byte elements
INDEX = "index"
COPY_OUT = "copy_out"


def checked_arrays(config: AdamKernelConfig) -> tuple[str, ...]:
    """Arrays that a run may have, in the order in which they are checked.

    The rule's, then `index` and `copy_out` where the kernel has them; the register of each is
    `<array>_address`.
    """
    index = (INDEX,) if config.compression else ()
    copy_out = (COPY_OUT,) if config.copy_out_formats else ()
    return (*config.arrays, *index, *copy_out)


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
    o_bytes : for each of `checked_arrays`.
    """

    def __init__(self, config: AdamKernelConfig) -> None:
        self.config = config
        self.arrays = checked_arrays(config)
        super().__init__(
            {
                "i_count": In(64),
                **({"i_narrow": In(1)} if config.mixed else {}),
                **({"i_paired": In(1), "i_pairs": In(64)} if config.compression else {}),
                "o_bytes": Out(END_WIDTH).array(len(self.arrays)),
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

        for name, length_of_it in zip(self.arrays, self.o_bytes, strict=True):
            value: Value = length["count", ELEMENT_BYTES]
            if name == GRADIENT:
                value = gradients("count")
                if config.compression:
                    value = Mux(paired, gradients("pairs"), value)
            elif name == INDEX:
                value = length["pairs", ELEMENT_BYTES]
            elif name == COPY_OUT:
                value = length["count", HALF_BYTES]
            m.d.comb += length_of_it.eq(value)
        return m
