"""Plans of training with parameters and optimizer state outside the compute device."""
