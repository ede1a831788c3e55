"""Devices the host can open: functional (golden) and Verilated (sim)."""
