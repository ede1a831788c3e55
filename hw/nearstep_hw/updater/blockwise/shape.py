"""Dimensions of the converters of a state to and from 8 bits."""

from dataclasses import dataclass

from amaranth.utils import exact_log2

from nearstep_hw.rule.technology import TECHNOLOGIES, Technology
from nearstep_spec.blockwise import CODES, GROUP, SIGNED
from nearstep_spec.fp import FP32
from nearstep_spec.technology import TECHNOLOGIES as NAMES
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.operands import Operand

CODE_WIDTH = exact_log2(CODES)


@dataclass(frozen=True, kw_only=True)
class BlockwiseShape:
    """Shape of a `Dequantize` or `Quantize`.

    Parameters
    ----------
    lanes : binary32 elements of a beat.
    ways : elements a cycle, a divisor of `lanes`.
    block_elements : elements of a block: `GROUP` to `GROUP * lanes`, a power of two.
    signed : whether the map is signed.
    technology : FPGA for which the arithmetic is pipelined.
    """

    lanes: int
    ways: int
    block_elements: int
    signed: bool
    technology: str = NAMES[0]

    @classmethod
    def of(cls, config: UpdateKernelConfig, operand: Operand) -> "BlockwiseShape":
        """Return the shape of a kernel's state."""
        return cls(
            lanes=config.lanes,
            ways=config.units,
            block_elements=config.block_elements,
            signed=SIGNED[operand.format],
            technology=config.technology,
        )

    @property
    def fpga(self) -> Technology:
        return TECHNOLOGIES[self.technology]

    @property
    def width(self) -> int:
        """Bits of a beat."""
        return FP32.width * self.lanes

    @property
    def parts(self) -> int:
        """Parts of `ways` elements in a beat of binary32."""
        return self.lanes // self.ways

    @property
    def code_parts(self) -> int:
        """Parts of `ways` codes in a beat."""
        return self.width // (CODE_WIDTH * self.ways)

    @property
    def group_parts(self) -> int:
        """Parts of the elements that share a scale."""
        return GROUP // self.ways

    @property
    def block_parts(self) -> int:
        """Parts of a block."""
        return self.block_elements // self.ways

    @property
    def code_beats(self) -> int:
        """Beats of the codes of a block."""
        return self.block_elements * CODE_WIDTH // self.width
