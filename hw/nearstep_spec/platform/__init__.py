"""Descriptions of machines, with the origin of each figure, and shapes of models."""
