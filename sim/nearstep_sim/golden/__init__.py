"""Bit-exact numpy golden models."""
