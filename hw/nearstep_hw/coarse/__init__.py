"""COARSE: memory devices that sum gradients near memory, in counter-rotating rings."""
