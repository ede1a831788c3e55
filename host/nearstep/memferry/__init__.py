"""MemFerry: where each layer's parameters and gradients live, and how the layer is computed."""
