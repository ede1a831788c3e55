"""Queue engine of an NVMe controller."""
