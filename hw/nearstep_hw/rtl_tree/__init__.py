"""Verilog of every top with what other tools need beside it, in one folder."""
