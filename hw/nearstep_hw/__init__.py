"""Synthesizable hardware of nearstep, in Amaranth HDL."""

COVERAGE = "NEARSTEP_COVERAGE"
"""Environment variable that counts coverage (`nearstep_sim.coverage`): the Verilog tells where in
the Python sources each signal, operator and module is from."""
POINTS = "NEARSTEP_POINTS"
"""Environment variable that counts cover points alone; `COVERAGE` counts them as well."""
