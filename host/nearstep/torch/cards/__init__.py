"""Optimizer state on the drives of cards, which their own kernels update."""
