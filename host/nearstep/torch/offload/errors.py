"""Typed errors of the offload engine."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

from nearstep.errors import ArgumentError, Fielded, NearstepError
from nearstep.torch.budget import share_of


class BudgetError(Fielded, NearstepError, MemoryError):
    """An operation needs more memory on the compute device than the budget.

    Attributes
    ----------
    expected : bytes of the smallest budget that suffices.
    actual : bytes of the budget.
    """

    template = "{what}: the budget must be at least {expected} bytes{share}, not {actual}{hint}"
    what: str
    expected: int
    actual: int
    hint: str = ""
    _: KW_ONLY
    parameters: int = 0

    @property
    def share(self) -> str:
        if not self.parameters:
            return ""
        return f" ({share_of(self.expected, self.parameters)} of the parameters)"


class VectorWarning(Fielded, UserWarning):
    """The parameters that a given plan fetches do not fit in the budget at once: the plan is
    followed, but each fetch allocates memory, and some parameters are fetched again.

    Attributes
    ----------
    expected : bytes of the smallest budget for all fetched parameters and the gradients of one
        module.
    actual : bytes of the budget.
    """

    template = (
        "the plan fetches parameters that need a budget of {expected} bytes, with gradients of one "
        "module, to have a place each; with {actual} each fetch has memory of its own"
    )
    expected: int
    actual: int


class ChangedModelError(Fielded, ArgumentError):
    """A parameter of the model or the optimizer was added, replaced or removed after
    `nearstep.offload`."""

    template = (
        "{parameter} was {change} after nearstep.offload: close the engine first, and offload the "
        "model again"
    )
    parameter: str
    change: str


class EngineCopyError(Fielded, NearstepError, TypeError):
    """An engine was copied or pickled; an engine belongs to one model in one process."""

    template = (
        "an offload engine cannot be copied or pickled; its model can, and so can its optimizer"
    )


class NestedInitError(Fielded, NearstepError, RuntimeError):
    """`nearstep.offload.init` was nested or entered twice."""

    template = "nearstep.offload.init can be entered once, and while no other one is open"


class LostEngineError(Fielded, NearstepError, RuntimeError):
    """A parameter was used after its model and engine were garbage-collected."""

    template = "the model that this offloaded parameter belonged to is gone"


class CaptureError(Fielded, NearstepError, RuntimeError):
    """An offloaded model was used while its stream was captured, as by CUDA graphs.

    Nothing has been changed. `actual` is the device of the stream.
    """

    expected: ClassVar[str] = "a stream that runs what it is given"
    template = (
        "an offloaded model needs {expected}, and the current one of {actual} is being captured: "
        "parameters would come and go when a graph is made, and not when it is replayed; capture "
        "after engine.close(), or train without a graph"
    )
    actual: object


class TransformError(Fielded, NearstepError, RuntimeError):
    """An offloaded model was traced, or differentiated by a transform of torch.

    Nothing has been changed. `actual` is the transform.
    """

    expected: ClassVar[str] = "torch.autograd, and of transforms torch.func.vmap alone"
    template = (
        "an offloaded model is for {expected}, not for {actual}, whose tensors are not fetched in "
        "backward: use loss.backward() or torch.autograd.grad, or engine.close()"
    )
    actual: str


class RecordingError(Fielded, NearstepError, RuntimeError):
    """A recording cannot begin in this state of the engine."""

    template = "a recording needs an open engine with none going on; it is {state}"
    state: str


class WrapperError(Fielded, ArgumentError):
    """A model is in a DistributedDataParallel unknown to the engine; `actual` says how."""

    expected: ClassVar[str] = "DistributedDataParallel(model) given to nearstep.offload"
    template = (
        "{actual}: wrap the plain model, and give nearstep.offload the wrapper; otherwise "
        "gradients would not be averaged"
    )
    actual: str


class AveragingError(Fielded, NearstepError, RuntimeError):
    """Gradients are not the average of all workers. No parameter has been updated."""

    template = "{parameter} {reason}; go on with optimizer.zero_grad() and a forward"
    parameter: str
    reason: str


class LostWorkerError(Fielded, NearstepError, RuntimeError):
    """A worker did not take part in averaging gradients.

    Parameters and optimizer state are as before the step, unless `updates="in-backward"`. `cause`
    is torch's message.
    """

    template = (
        "another worker did not take part in averaging gradients; no step was made with them "
        "({cause})"
    )
    cause: str
