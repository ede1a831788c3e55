"""Links between memory devices: a model of one direction, and what can go wrong on it."""
