"""Boards: descriptions, configuration and registers."""
