"""States in 8 bits on their way from and to memory."""
