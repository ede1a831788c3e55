"""The queue engine of an NVMe controller in simulation, below firmware in Python."""
