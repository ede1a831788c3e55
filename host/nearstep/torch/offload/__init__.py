"""Training with parameters away from the compute device: they come when they are used."""

from nearstep.torch.offload.engine import Engine, Report, offload

__all__ = ["Engine", "Report", "offload"]
