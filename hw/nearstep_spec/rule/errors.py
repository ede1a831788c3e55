"""Errors in the definition or the use of an update rule; each names the file and the line."""

from collections.abc import Iterable
from dataclasses import dataclass

from nearstep_spec.errors import NearstepError

__all__ = [
    "Location",
    "MissingParameterError",
    "MissingScalarError",
    "RuleCycleError",
    "RuleError",
    "RuleTypeError",
    "UnassignedOutputError",
    "UnknownNameError",
    "UnusedNameError",
]


@dataclass(frozen=True)
class Location:
    """A line in the source of a rule."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class RuleError(NearstepError):
    """A rule cannot be understood.

    Attributes
    ----------
    location : the line of the rule's source at fault.
    """

    def __init__(self, message: str, location: Location) -> None:
        super().__init__(f"{location}: {message}")
        self.location = location


class RuleTypeError(RuleError):
    """An operand is neither a symbolic value nor a number that binary32 can hold."""


class UnknownNameError(RuleError):
    """A name that the rule does not declare."""

    def __init__(self, what: str, name: str, known: Iterable[str], location: Location) -> None:
        self.name = name
        self.known = tuple(known)
        listed = ", ".join(self.known) or "none"
        super().__init__(f"Unknown {what} {name!r}; declared: {listed}", location)


class UnusedNameError(RuleError):
    """A declared name that the definition does not use."""

    def __init__(self, what: str, name: str, location: Location) -> None:
        self.name = name
        super().__init__(f"{what} {name!r} is declared but not used", location)


class MissingParameterError(RuleError):
    """A declared name that is no parameter of the definition."""

    def __init__(self, name: str, taken: Iterable[str], location: Location) -> None:
        self.name = name
        self.taken = tuple(taken)
        super().__init__(
            f"{name!r} is declared but is no parameter of the definition, "
            f"which takes {', '.join(self.taken) or 'none'}",
            location,
        )


class UnassignedOutputError(RuleError):
    """A state or an output that the definition does not return."""

    def __init__(self, names: Iterable[str], assigned: Iterable[str], location: Location) -> None:
        self.names = tuple(names)
        self.assigned = tuple(assigned)
        super().__init__(
            f"Nothing is assigned to {', '.join(self.names)}; "
            f"the definition returns {', '.join(self.assigned) or 'nothing'}",
            location,
        )


class MissingScalarError(RuleError):
    """A run of the rule lacks the value of a scalar or a switch."""

    def __init__(self, names: Iterable[str], given: Iterable[str], location: Location) -> None:
        self.names = tuple(names)
        self.given = tuple(given)
        super().__init__(
            f"No value for {', '.join(self.names)}; given: {', '.join(self.given) or 'none'}",
            location,
        )


class RuleCycleError(RuleError):
    """A value depends on itself through `next_value`."""

    def __init__(self, path: Iterable[str], location: Location) -> None:
        self.path = tuple(path)
        super().__init__(f"A value depends on itself: {' -> '.join(self.path)}", location)
