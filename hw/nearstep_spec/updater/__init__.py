"""The update kernel: configuration and registers."""
