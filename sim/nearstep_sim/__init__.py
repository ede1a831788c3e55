"""Golden models, simulated devices and test benches of the RTL."""
