"""The SmartSSD family: the accelerator of a computational SSD."""
