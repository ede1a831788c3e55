"""DDR4: timing, geometry, commands and address mapping."""
