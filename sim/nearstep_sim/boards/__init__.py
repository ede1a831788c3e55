"""Boards simulated cycle by cycle, at the pins of the chip."""
