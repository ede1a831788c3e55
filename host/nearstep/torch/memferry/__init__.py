"""MemFerry for models of torch: profiles of any module."""

from nearstep.torch.memferry.layers import model_fingerprint
from nearstep.torch.memferry.profiler import profile

__all__ = ["model_fingerprint", "profile"]
