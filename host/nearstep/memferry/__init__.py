"""MemFerry: plans of where each layer's parameters and gradients are, and how it is computed."""
