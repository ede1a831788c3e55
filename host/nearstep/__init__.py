"""Near-data optimizer steps, from RTL to ``optimizer.step()``."""

from nearstep.device import Device
from nearstep.device import open_device as open

__all__ = ["Device", "open"]
