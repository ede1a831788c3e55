"""Optimizer state that does not fit into the memory of the device, and lies on drives."""
