"""Options of the open tools for designs that fill much of an ECP5."""

__all__ = ["ROUTING", "SYNTHESIS"]

SYNTHESIS = "-nowidelut"
"""Of Yosys. Without multiplexers of slices: those fill whole tiles, and wires run short there."""

ROUTING = "--router router2"
"""Option of nextpnr: the router that negotiates wires, which converges where the default one does
not.
"""
