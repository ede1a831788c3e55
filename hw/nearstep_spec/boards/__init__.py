"""Boards: what they are, their configuration and their own registers."""
