"""Options of the open tools for designs that fill much of an ECP5."""

__all__ = ["ROUTING", "SYNTHESIS"]

SYNTHESIS = "-nowidelut"
"""Option of Yosys: no wide multiplexers, which fill whole tiles and exhaust their wires."""

ROUTING = "--router router2"
"""Option of nextpnr: the negotiating router, which converges where the default one does not."""
