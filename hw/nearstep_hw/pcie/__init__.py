"""PCIe endpoint behind the UltraScale+ hard block: registers, memory, MSI-X."""
