"""Backends: access to devices."""
