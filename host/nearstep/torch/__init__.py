"""PyTorch integration."""
