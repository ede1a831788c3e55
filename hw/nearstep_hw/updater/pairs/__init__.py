"""Top-K: gradients as pairs of index and value."""
