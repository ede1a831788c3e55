"""Torch's DistributedDataParallel around an offloaded model."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from nearstep.torch.errors import ParameterError, UnsupportedOptionError
from nearstep.torch.offload.averaging import REASON, Averager
from nearstep.torch.offload.errors import WrapperError
from nearstep.torch.offload.parameter import OffloadedParameter


class Wrapper:
    """A wrapper that an engine takes over.

    Parameters
    ----------
    ddp : a DistributedDataParallel.

    Attributes
    ----------
    parameters : whose gradients the wrapper averages, in its order.

    Raises
    ------
    UnsupportedOptionError : an option of the wrapper is not supported by the engine.
    ParameterError : the wrapper has an engine already.
    """

    def __init__(self, ddp: Any) -> None:  # torch has no types for most attributes used here
        self.ddp = ddp
        for option, value, wanted in (
            ("static_graph", self.ddp.static_graph, False),
            ("mixed_precision", self.ddp.mixed_precision, None),
            ("gradient_as_bucket_view", self.ddp.gradient_as_bucket_view, False),
            ("skip_all_reduce_unused_params", self.ddp.skip_all_reduce_unused_params, False),
            ("register_comm_hook", self.ddp._comm_hooks, []),
            ("delay_all_reduce_named_params", self.ddp._delay_all_reduce_params, []),
            ("optimize_ddp", self.ddp._use_python_reducer, False),
        ):
            if value != wanted:
                raise UnsupportedOptionError(option, value, REASON)
        if isinstance(self.ddp.reducer, Averager):
            raise ParameterError("the wrapper", "with no engine yet", "offloaded")
        self.parameters, sparse = self.ddp._build_params_for_reducer()
        if any(sparse):
            raise UnsupportedOptionError("sparse", True, "gradients are averaged dense")

    def take(self) -> None:
        """Free the wrapper's reducer, which holds memory for all gradients."""
        self.ddp.reducer = self.ddp.logger = None

    def use(self, averager: Averager) -> None:
        """Install an averager as the wrapper's reducer and logger."""
        self.ddp.reducer = self.ddp.logger = averager

    def give_back(self) -> None:
        """Install torch's own reducer again, as in a new wrapper."""
        parameters, sparse = self.ddp._build_params_for_reducer()
        names = self.ddp._build_debug_param_to_name_mapping(parameters)
        self.ddp._ddp_init_helper(parameters, sparse, names, False)


def unwrapped(model: nn.Module) -> tuple[nn.Module, Wrapper | None]:
    """Return the plain model, and its wrapper if any.

    Raises
    ------
    UnsupportedOptionError
    WrapperError : a part of the model is wrapped.
    """
    refuse_late_wrappers()
    wrapper = Wrapper(model) if isinstance(model, DistributedDataParallel) else None
    found = model if wrapper is None else wrapper.ddp.module
    if any(isinstance(each, DistributedDataParallel) for each in found.modules()):
        raise WrapperError("a part of the model is wrapped by itself")
    return found, wrapper


def check_wrapper(model: nn.Module, wrapper: Wrapper | None) -> None:
    """Raise `WrapperError` in the forward of a wrapper that the engine does not know."""
    active = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if active is None or (wrapper is not None and active is wrapper.ddp):
        return
    if any(each is model for each in active.module.modules()):
        raise WrapperError("the model inside of the wrapper was given to nearstep.offload")


@cache
def refuse_late_wrappers() -> Any:
    """Register a hook that raises `WrapperError` when offloaded parameters are wrapped."""

    def check(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
        if isinstance(wrapper, DistributedDataParallel) and module is not None:
            if any(isinstance(each, OffloadedParameter) for each in module.parameters()):
                raise WrapperError("the model was offloaded before it was wrapped")

    return register_module_module_registration_hook(check)
