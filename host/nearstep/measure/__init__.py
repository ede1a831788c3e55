"""Measurements of this machine: arithmetic, copies, drives, overlap, and other optimizers."""
