"""DDR4: timing, geometry and address mapping as plain data; DFI signatures and the controller."""
