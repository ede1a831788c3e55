"""Training with parameters and optimizer state outside the compute device: who holds what, when."""
