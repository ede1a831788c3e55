"""Drivers of devices with update kernels: the parts that families share."""
