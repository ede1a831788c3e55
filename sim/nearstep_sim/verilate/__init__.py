"""Builds, loads and steps Verilated models."""
