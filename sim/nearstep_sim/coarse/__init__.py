"""The COARSE family, emulated: pools of memory devices, benches."""
