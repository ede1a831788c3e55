"""Links between memory devices: a model of one direction, and its faults."""
