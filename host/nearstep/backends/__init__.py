"""Backends: how a device is reached."""
