"""What the optimizers are made of: everything between a torch tensor and a device buffer."""
