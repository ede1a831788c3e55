"""Typed errors of the optimizers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nearstep.errors import ArgumentError, NearstepError

LOWEST = (2, 11)
"""The first release of torch whose fused steps are known to have the bits of a device's."""


class TorchVersionError(NearstepError, ImportError):
    """A release of torch that is too old."""

    def __init__(self, version: str) -> None:
        self.expected = ".".join(map(str, LOWEST))
        self.actual = version
        super().__init__(
            f"torch must be {self.expected} or newer, not {version}: pip install 'nearstep[torch]'"
        )


def check_torch(version: str) -> None:
    """Check that nearstep works with a release of torch.

    Raises
    ------
    TorchVersionError
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < LOWEST:
        raise TorchVersionError(version)


class UnsupportedOptionError(ArgumentError):
    """An option of torch's optimizer that the device does not have.

    Attributes
    ----------
    option
    value
    """

    def __init__(self, option: str, value: object, reason: str) -> None:
        self.option = option
        self.value = value
        super().__init__(f"{option}={value!r} is not supported: {reason}")


class HyperparameterError(ArgumentError):
    """A learning rate, momentum, epsilon or the like that a step cannot be computed with."""

    def __init__(self, name: str, expected: str, actual: object) -> None:
        self.name = name
        self.expected = expected
        self.actual = actual
        super().__init__(f"{name} must be {expected}, not {actual!r}")


class MissingOptionError(HyperparameterError):
    """A parameter group without an option that steps need."""

    def __init__(self, name: str, group: Iterable[str]) -> None:
        self.name = name
        self.expected = "given"
        self.actual = sorted(group)
        ArgumentError.__init__(
            self, f"a parameter group must have {name}, not only {', '.join(self.actual)}"
        )


class ParameterError(ArgumentError, TypeError):
    """A parameter that cannot be kept on the device."""

    def __init__(self, parameter: str, expected: str, actual: object) -> None:
        self.parameter = parameter
        self.expected = expected
        self.actual = actual
        super().__init__(f"{parameter} must be {expected}, not {actual}")


class GradientError(ArgumentError, RuntimeError):
    """A gradient that cannot be sent to the device. Nothing has been sent, no step counted."""

    def __init__(self, parameter: str, expected: str, actual: object) -> None:
        self.parameter = parameter
        self.expected = expected
        self.actual = actual
        super().__init__(f"the gradient of {parameter} must be {expected}, not {actual}")


class StateError(ArgumentError):
    """Optimizer state that does not belong to its parameter."""

    def __init__(self, parameter: str, expected: str, actual: object) -> None:
        self.parameter = parameter
        self.expected = expected
        self.actual = actual
        super().__init__(f"the state of {parameter} must {expected}, not {actual}")


class InterruptedStepError(NearstepError, RuntimeError):
    """The optimizer was used after a step that failed half way.

    What is on the device is then part old and part new. Load a checkpoint of the model, then of the
    optimizer: `load_state_dict` sends everything anew and clears this.

    Attributes
    ----------
    cause : name of the class of what the step failed with. Not the error: its traceback refers to
        the optimizer, whose memory on the device would outlive it.
    """

    def __init__(self, action: str, cause: str) -> None:
        self.cause = cause
        super().__init__(
            f"cannot {action}: the last step failed half way ({cause}); load the model and "
            "then the optimizer from a checkpoint"
        )


class BudgetFormatError(ArgumentError):
    """A budget that is no number of bytes and no share.

    Attributes
    ----------
    name : of the argument.
    expected, actual
    """

    def __init__(self, name: str, expected: str, actual: object) -> None:
        self.name = name
        self.expected = expected
        self.actual = actual
        super().__init__(f"{name} must be {expected}, not {actual!r}")
