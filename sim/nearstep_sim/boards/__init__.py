"""Boards whose every cycle is simulated, at the pins of their chip."""
