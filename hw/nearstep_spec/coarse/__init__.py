"""The COARSE family: configuration and registers of a memory device."""
