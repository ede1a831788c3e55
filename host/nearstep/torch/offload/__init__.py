"""Training with offloaded parameters, which are fetched to the compute device before use."""

from nearstep.torch.offload.construction import Init, InitReport
from nearstep.torch.offload.engine import Engine
from nearstep.torch.offload.entry import offload
from nearstep.torch.offload.report import Report

__all__ = ["Engine", "Init", "InitReport", "Report", "offload"]
