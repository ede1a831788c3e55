"""Near-data optimizer steps, from RTL to ``optimizer.step()``."""
