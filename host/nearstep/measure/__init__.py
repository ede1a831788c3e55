"""Measurements of this machine: copies, drives, arithmetic."""
