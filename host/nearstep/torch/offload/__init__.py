"""Training with parameters away from the compute device: they come when they are used."""

from nearstep.torch.offload.construction import Init, InitReport
from nearstep.torch.offload.engine import Engine
from nearstep.torch.offload.entry import offload
from nearstep.torch.offload.report import Report

__all__ = ["Engine", "Init", "InitReport", "Report", "offload"]
