"""Adapter from the 7-series integrated block for PCI Express to the completer streams."""
