"""What a step does, as a graph of operations; what runs it, and gives it time."""
