"""An SDRAM chip at its pins."""
