"""What can be wrong with profiles and plans."""

from __future__ import annotations

from nearstep.errors import ArgumentError, NearstepError


class ProfileError(ArgumentError):
    """A profile that says nothing usable; nothing was planned.

    Attributes
    ----------
    layer : name of the layer, or its place where it has no name; empty if it is no layer's field.
    field
    expected : what it must be.
    actual : what was found.
    """

    def __init__(self, layer: str, field: str, expected: str, actual: object) -> None:
        self.layer = layer
        self.field = field
        self.expected = expected
        self.actual = actual
        where = f"layer {layer}: " if layer else ""
        super().__init__(f"{where}{field} must be {expected}, not {actual!r}")


class PlanError(ArgumentError):
    """A plan that cannot be carried out, such as one edited by hand; the first fault is named.

    Attributes
    ----------
    layer, field, expected, actual : as `ProfileError` has them.
    """

    def __init__(self, layer: str, field: str, expected: str, actual: object) -> None:
        self.layer = layer
        self.field = field
        self.expected = expected
        self.actual = actual
        where = f"layer {layer}: " if layer else ""
        super().__init__(f"{where}{field} must be {expected}, not {actual!r}")


class FingerprintError(PlanError):
    """A plan of one model beside a profile of another."""

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__("", "fingerprint", f"that of the profile, {expected}", actual)


class PlanBudgetError(NearstepError, MemoryError):
    """No plan fits into the budget of GPU memory.

    Attributes
    ----------
    budget : bytes that were given.
    smallest : bytes with which there is a plan; with one less there is none.
    layer : the first one whose own least bytes are above the budget, or that does not fit beside
        those before it.
    """

    def __init__(self, budget: int, smallest: int, layer: str, needed: int) -> None:
        self.budget = budget
        self.smallest = smallest
        self.layer = layer
        super().__init__(
            f"layer {layer} does not fit: it and the layers before it need at least {needed} bytes "
            f"of GPU memory, the budget is {budget}; the smallest budget that works is {smallest}"
        )
