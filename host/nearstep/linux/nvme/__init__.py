"""An NVMe controller with the command sets for computational storage, as firmware would be."""
