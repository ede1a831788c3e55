"""Coverage of Verilated RTL: what Verilator counted, per block, and what is not counted and why."""
