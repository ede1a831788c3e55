"""DDR4: DFI signatures and the controller."""
