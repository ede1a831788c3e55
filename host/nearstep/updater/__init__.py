"""What the drivers of devices with update kernels have in common."""
