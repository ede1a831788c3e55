"""Typed errors of the offload engine."""

from __future__ import annotations

from nearstep.errors import ArgumentError, NearstepError
from nearstep.torch.budget import share_of


class BudgetError(NearstepError, MemoryError):
    """What is needed at once on the compute device is more than the budget.

    Attributes
    ----------
    expected : bytes of the smallest budget that has room for it.
    actual : bytes of the budget.
    """

    def __init__(
        self, what: str, expected: int, actual: int, hint: str = "", *, parameters: int = 0
    ) -> None:
        self.what = what
        self.expected = expected
        self.actual = actual
        share = f" ({share_of(expected, parameters)} of the parameters)" if parameters else ""
        super().__init__(
            f"{what}: the budget must be at least {expected} bytes{share}, not {actual}{hint}"
        )


class VectorWarning(UserWarning):
    """A plan that was given fetches more parameters than the budget has room for at once: it is
    followed, but each fetch has memory of its own, and some parameters are fetched again.

    Attributes
    ----------
    expected : bytes of the smallest budget with room for all of them, and gradients of one module.
    actual : bytes of the budget.
    """

    def __init__(self, expected: int, actual: int) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"the plan fetches parameters that need a budget of {expected} bytes, with gradients "
            f"of one module, to have a place each; with {actual} each fetch has memory of its own"
        )


class ChangedModelError(ArgumentError):
    """A model or an optimizer that got another parameter after `nearstep.offload`.

    Attributes
    ----------
    parameter : its name.
    """

    def __init__(self, parameter: str, change: str) -> None:
        self.parameter = parameter
        self.change = change
        super().__init__(
            f"{parameter} was {change} after nearstep.offload: close the engine first, and offload "
            "the model again"
        )


class EngineCopyError(NearstepError, TypeError):
    """A copy of an engine, which belongs to one model in one process."""

    def __init__(self) -> None:
        super().__init__(
            "an offload engine cannot be copied or pickled; its model can, and so can its optimizer"
        )


class EarlyUpdateError(NearstepError, RuntimeError):
    """With updates in backward: something happened that only works if updates wait for `step()`.

    Attributes
    ----------
    parameter : its name.
    """

    def __init__(self, parameter: str, reason: str) -> None:
        self.parameter = parameter
        super().__init__(
            f"{parameter} was updated during backward, and {reason}: use updates='at-step'"
        )


class NestedInitError(NearstepError, RuntimeError):
    """`nearstep.offload.init` inside of another one, or entered twice."""

    def __init__(self) -> None:
        super().__init__(
            "nearstep.offload.init can be entered once, and while no other one is open"
        )


class LostEngineError(NearstepError, RuntimeError):
    """A parameter that is used after its model and engine are gone."""

    def __init__(self) -> None:
        super().__init__("the model that this offloaded parameter belonged to is gone")


class CaptureError(NearstepError, RuntimeError):
    """An offloaded model was used while its stream is captured, as by CUDA graphs.

    Nothing has been changed.

    Attributes
    ----------
    actual : the device whose stream it is.
    """

    expected = "a stream that runs what it is given"

    def __init__(self, actual: object) -> None:
        self.actual = actual
        super().__init__(
            f"an offloaded model needs {self.expected}, and the current one of {actual} is being "
            "captured: parameters would come and go when a graph is made, and not when it is "
            "replayed; capture after engine.close(), or train without a graph"
        )


class TransformError(NearstepError, RuntimeError):
    """An offloaded model was used in a transform of torch that differentiates it, or traced.

    Nothing has been changed.

    Attributes
    ----------
    actual : the transform.
    """

    expected = "torch.autograd, and of transforms torch.func.vmap alone"

    def __init__(self, actual: str) -> None:
        self.actual = actual
        super().__init__(
            f"an offloaded model is for {self.expected}, not for {actual}, whose tensors are not "
            "fetched in backward: use loss.backward() or torch.autograd.grad, or engine.close()"
        )


class RecordingError(NearstepError, RuntimeError):
    """A recording that cannot begin.

    Attributes
    ----------
    state : of the engine.
    """

    def __init__(self, state: str) -> None:
        self.state = state
        super().__init__(f"a recording needs an open engine with none going on; it is {state}")


class WrapperError(ArgumentError):
    """A model in a DistributedDataParallel that its engine does not know.

    Attributes
    ----------
    actual : what was done.
    """

    expected = "DistributedDataParallel(model) given to nearstep.offload"

    def __init__(self, actual: str) -> None:
        self.actual = actual
        super().__init__(
            f"{actual}: wrap the plain model, and give nearstep.offload the wrapper; otherwise "
            "gradients would not be averaged"
        )


class AveragingError(NearstepError, RuntimeError):
    """Gradients that are not the average of all workers. No parameter has been updated.

    Attributes
    ----------
    parameter : its name.
    """

    def __init__(self, parameter: str, reason: str) -> None:
        self.parameter = parameter
        super().__init__(f"{parameter} {reason}; go on with optimizer.zero_grad() and a forward")


class LostWorkerError(NearstepError, RuntimeError):
    """A worker that does not take part in averaging gradients.

    Parameters and optimizer state are as before the step, unless `updates="in-backward"`.

    Attributes
    ----------
    cause : torch's message.
    """

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(
            "another worker did not take part in averaging gradients; no step was made with them "
            f"({cause})"
        )
