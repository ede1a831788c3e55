"""Errors of profiles and plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nearstep.errors import ArgumentError, Fielded, NearstepError


class FieldError(Fielded, ArgumentError):
    """Base: a field of a profile or of a plan has an invalid value.

    Attributes
    ----------
    layer : name of the layer, or its index if unnamed; empty if the field is no layer's.
    """

    template = "{where}{field} must be {expected}, not {actual!r}"
    layer: str
    field: str
    expected: str
    actual: object

    @property
    def where(self) -> str:
        return f"layer {self.layer}: " if self.layer else ""

    @classmethod
    def check_keys(
        cls,
        layer: str,
        table: Mapping[str, object],
        known: Sequence[str],
        listed: Sequence[str] = (),
    ) -> None:
        """Raise the error unless a table has all of the known fields, and no other.

        Parameters
        ----------
        listed : the known fields as the message lists them, if in another order.
        """
        for name in known:
            if name not in table:
                raise cls(layer, name, "given", "missing")
        for name in table:
            if name not in known:
                raise cls(layer, name, f"one of {', '.join(listed or known)}", "unknown")


class ProfileError(FieldError):
    """An invalid profile; nothing was planned."""


class PlanError(FieldError):
    """An invalid plan, such as one edited by hand; the first fault is named."""


class FingerprintError(PlanError):
    """A plan of one model beside a profile of another."""

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__("", "fingerprint", f"that of the profile, {expected}", actual)


class PlanBudgetError(Fielded, NearstepError, MemoryError):
    """No plan fits into the budget of GPU memory, in bytes.

    Attributes
    ----------
    smallest : smallest budget with a plan.
    layer : the first one whose least bytes exceed the budget, alone or together with earlier
        layers.
    """

    template = (
        "layer {layer} does not fit: it and the layers before it need at least {needed} bytes "
        "of GPU memory, the budget is {budget}; the smallest budget that works is {smallest}"
    )
    budget: int
    smallest: int
    layer: str
    needed: int
