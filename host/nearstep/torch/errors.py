"""Typed errors of the optimizers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nearstep.errors import ArgumentError, Fielded, NearstepError

LOWEST = (2, 11)
"""The first release of torch whose fused steps are known to have the bits of a device's."""


class TorchVersionError(Fielded, NearstepError, ImportError):
    """A release of torch that is too old."""

    template = "torch must be {expected} or newer, not {actual}: pip install 'nearstep[torch]'"
    expected: str
    actual: str


def check_torch(version: str) -> None:
    """Check that nearstep works with a release of torch.

    Raises
    ------
    TorchVersionError
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < LOWEST:
        raise TorchVersionError(".".join(map(str, LOWEST)), version)


class UnsupportedOptionError(Fielded, ArgumentError):
    """An option of torch's optimizer that the device does not have."""

    template = "{option}={value!r} is not supported: {reason}"
    option: str
    value: object
    reason: str


class ConflictingOptionsError(Fielded, ArgumentError, RuntimeError):
    """Two options of torch's optimizer that exclude each other, as in torch."""

    template = "`{first}` and `{second}` cannot be `True` together."
    first: str
    second: str


class HyperparameterError(Fielded, ArgumentError):
    """A learning rate, momentum, epsilon or the like that a step cannot be computed with."""

    template = "{name} must be {expected}, not {actual!r}"
    name: str
    expected: str
    actual: object


class MissingOptionError(HyperparameterError):
    """A parameter group without an option that steps need."""

    template = "a parameter group must have {name}, not only {given}"

    def __init__(self, name: str, group: Iterable[str]) -> None:
        self.given = ", ".join(sorted(group))
        super().__init__(name, "given", sorted(group))


class ParameterError(Fielded, ArgumentError, TypeError):
    """A parameter that cannot be kept on the device."""

    template = "{parameter} must be {expected}, not {actual}"
    parameter: str
    expected: str
    actual: object


class GradientError(Fielded, ArgumentError, RuntimeError):
    """A gradient that cannot be sent to the device. Nothing has been sent, no step counted."""

    template = "the gradient of {parameter} must be {expected}, not {actual}"
    parameter: str
    expected: str
    actual: object


class StateError(Fielded, ArgumentError):
    """Optimizer state that does not belong to its parameter."""

    template = "the state of {parameter} must {expected}, not {actual}"
    parameter: str
    expected: str
    actual: object


class InterruptedStepError(Fielded, NearstepError, RuntimeError):
    """The optimizer was used after a step that failed half way.

    The device holds old and new values then. Load a checkpoint of the model, then of the
    optimizer: `load_state_dict` sends everything anew and clears the error.

    Attributes
    ----------
    cause : name of the class of the step's error. Not the error: its traceback refers to the
        optimizer, whose memory on the device would outlive it.
    """

    template = (
        "cannot {action}: the last step failed half way ({cause}); load the model and then the "
        "optimizer from a checkpoint"
    )
    action: str
    cause: str


class EarlyUpdateError(Fielded, NearstepError, RuntimeError):
    """With updates in backward: an operation needs updates to wait for `step()`."""

    template = "{parameter} was updated during backward, and {reason}: use updates='at-step'"
    parameter: str
    reason: str


class BudgetFormatError(Fielded, ArgumentError):
    """A budget that is no number of bytes and no share; `name` is the argument."""

    template = "{name} must be {expected}, not {actual!r}"
    name: str
    expected: str
    actual: object
