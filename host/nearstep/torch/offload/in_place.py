"""What the compute device gets at where it is, in the memory of the host (direct access)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class InPlace:
    """Of a parameter.

    What is in place is not fetched, takes nothing of the budget, and in a recording goes over the
    link while it is computed with. Torch makes gradients in memory of the accelerator, if layers
    compute on one: there, one counts until a kernel has been launched that writes it.

    Attributes
    ----------
    forward, backward : the parameter is read in place in this part of an iteration; not in
        backward alone.
    gradient : backward writes the gradient to the host.
    is_apart : the compute device has memory of its own, where the gradient is made.
    """

    forward: bool = False
    backward: bool = False
    gradient: bool = False
    is_apart: bool = False

    @property
    def spares_gradient(self) -> bool:
        """Whether the compute device has no memory for the gradient, not even while it is made."""
        return self.gradient and not self.is_apart


NOTHING = InPlace()
