"""AXI4 and AXI4-Lite signatures and movers."""
