"""Options of the open tools for designs that fill much of an ECP5."""

__all__ = ["ROUTING", "SYNTHESIS"]

SYNTHESIS = "-nowidelut"
"""Of Yosys. Without multiplexers of slices: those fill whole tiles, and wires run short there."""

ROUTING = "--router router2"
"""Of nextpnr: the router that shares out wires, which ends where the default one does not."""
