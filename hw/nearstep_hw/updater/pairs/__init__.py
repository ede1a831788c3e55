"""Top-K: gradients that come as pairs of index and value."""
