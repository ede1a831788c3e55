"""A PCIe endpoint: its configuration, and the layout of its register BAR."""

from dataclasses import dataclass
from typing import Annotated

from nearstep_spec.codec import Option

REGISTER_BAR = 0
MEMORY_BAR = 2  # 64 bits, prefetchable: occupies BAR 3, too
CSR_OFFSET = 0x0000
CSR_BYTES = 0x1000
MSIX_TABLE_OFFSET = 0x1000  # a page of its own, so that a host can map the registers apart
MSIX_PBA_OFFSET = 0x1800
REGISTER_BYTES = 0x2000
MAX_VECTORS = (MSIX_PBA_OFFSET - MSIX_TABLE_OFFSET) // 16


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Shape of an endpoint behind the hard block of an UltraScale+ device."""

    width: Annotated[
        int, Option(meaning="bits of the hard block's streams", choices=(64, 128, 256, 512))
    ] = 128
    data_width: Annotated[
        int, Option(meaning="bits of a memory beat", allowed="a power of two, at least width")
    ] = 512
    address_width: Annotated[int, Option(meaning="bits of a memory address", low=16, high=64)] = 32
    vectors: Annotated[int, Option(meaning="interrupts (MSI-X)", low=1, high=MAX_VECTORS)] = 1
