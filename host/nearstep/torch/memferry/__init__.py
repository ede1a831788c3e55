"""MemFerry for models of torch: profiles of any module."""

from nearstep.torch.memferry.layers import model_fingerprint
from nearstep.torch.memferry.profiler import profile
from nearstep.torch.memferry.tracer import Profiling

__all__ = ["Profiling", "model_fingerprint", "profile"]
