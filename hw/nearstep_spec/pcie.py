"""What is where in the register BAR. Plain data, for hardware and host."""

REGISTER_BAR = 0
MEMORY_BAR = 2  # 64 bits, prefetchable: takes BAR 3 too
CSR_OFFSET = 0x0000
CSR_BYTES = 0x1000
MSIX_TABLE_OFFSET = 0x1000  # a page of its own, so that a host can map the registers apart
MSIX_PBA_OFFSET = 0x1800
REGISTER_BYTES = 0x2000
MAX_VECTORS = (MSIX_PBA_OFFSET - MSIX_TABLE_OFFSET) // 16
