"""Configuration of a board design: a card behind a serial link."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from nearstep_spec.boards.board import BOARDS
from nearstep_spec.boards.design import BoardDesign
from nearstep_spec.codec import Nested, Option
from nearstep_spec.csr.model import RegisterMap
from nearstep_spec.smartssd.config import SmartssdConfig
from nearstep_spec.updater.config import UpdateKernelConfig

UPDATER_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "lanes": 2,
        "functional_units": 1,
        "chunk_bytes": 1024,
        "address_width": 32,
        "rules": ("adam",),
        "gradient_formats": ("fp32",),
        "gradient_scale": False,
        "scan": False,
        "windows": None,
        "copy_out_formats": ("bf16",),
        "compression": ("fused",),
    }
)
"""Default update kernel of a board: fits an ECP5-85F."""

FIXED = ("memory_bytes", "subgroup_elements", "address_width", "technology")
"""Options of a card that follow from the board and its memory."""

BLOCK_RAM_BYTES = 64 << 10


def _card() -> SmartssdConfig:
    options = {"block_bytes" if k == "chunk_bytes" else k: v for k, v in UPDATER_OPTIONS.items()}
    return SmartssdConfig(kernel=UpdateKernelConfig(**options))


@dataclass(frozen=True, kw_only=True)
class BoardConfig(BoardDesign):
    """Contents of a bitstream: the card of `nearstep_spec.smartssd`, a link, and a memory.

    Parameters
    ----------
    board : name.
    memory : the DRAM of the board behind LiteDRAM, or block RAM alone.
    clock_mhz : of the design; None: the first of the board's clocks.
    baud : of the link; None: that of the board.
    card : the card. Its `FIXED` options are replaced by those of the memory.

    Raises
    ------
    ConfigError : with the value and what is allowed.
    """

    board: Annotated[str, Option(meaning="board that the design is for", choices=tuple(BOARDS))] = (
        "ulx3s_85f"
    )
    memory: Annotated[
        Literal["dram", "blockram"], Option(meaning="DRAM of the board, or block RAM of the FPGA")
    ] = "dram"
    clock_mhz: Annotated[
        int | None,
        Option(
            meaning="clock of the design, MHz",
            allowed="one of the board's",
            unset="the first of the board's",
        ),
    ] = None
    baud: Annotated[
        int | None,
        Option(
            meaning="bits a second of the link",
            allowed="from 9600 to a quarter of the clock",
            unset="that of the board",
        ),
    ] = None
    card: Annotated[SmartssdConfig, Nested(omit=FIXED, defaults=UPDATER_OPTIONS)] = field(
        default_factory=_card
    )

    def __post_init__(self) -> None:
        self.check_board()
        memory_bytes = self.memory_bytes
        kernel = replace(
            self.card.kernel,
            address_width=memory_bytes.bit_length() - 1,
            technology=self.described.technology,
        )
        card = replace(self.card, kernel=kernel, memory_bytes=memory_bytes, subgroup_elements=None)
        object.__setattr__(self, "card", card)

    @property
    def family(self) -> str:
        """Family of the device, which selects the host's driver."""
        return "smartssd"

    @property
    def inner(self) -> SmartssdConfig:
        """Configuration of the device."""
        return self.card

    def maps(self) -> Mapping[str, tuple[int, RegisterMap]]:
        """Register blocks of the card, see `SmartssdConfig.maps`."""
        return self.card.maps()

    @property
    def memory_bytes(self) -> int:
        """Size of the memory, a power of two."""
        return self.described.memory_bytes if self.memory == "dram" else BLOCK_RAM_BYTES
