"""IEEE 754 floating point units."""
