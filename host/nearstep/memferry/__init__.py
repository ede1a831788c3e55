"""MemFerry: plans of the memory of each layer's parameters and gradients, and its computation."""
