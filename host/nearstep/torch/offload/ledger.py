"""Accounting of bytes on the compute device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from nearstep.torch.offload.errors import BudgetError


@dataclass(kw_only=True)
class Ledger:
    """Bytes in use on the compute device, never more than the budget.

    Attributes
    ----------
    budget : maximum of `used`.
    parameters : bytes of present parameters, those prefetched included.
    gradients : bytes of gradients, charged before the backward of the operation that makes one.
    peak, parameters_peak, gradients_peak : maximum of `used`, `parameters` and `gradients`.
    grown : called with `used` whenever it has increased.
    """

    budget: int = sys.maxsize
    parameters: int = 0
    gradients: int = 0
    peak: int = 0
    parameters_peak: int = 0
    gradients_peak: int = 0
    grown: Callable[[int], None] | None = None

    @property
    def used(self) -> int:
        return self.parameters + self.gradients

    @property
    def free(self) -> int:
        """Bytes left of the budget."""
        return self.budget - self.used

    def limit(self, budget: int) -> None:
        """Set the budget and restart the peaks.

        Raises
        ------
        BudgetError : more than the budget is in use.
        """
        if self.used > budget:
            raise BudgetError("memory that cannot be freed", self.used, budget)
        self.budget = budget
        self.peak = self.parameters_peak = self.gradients_peak = 0
        self._look()

    def add_parameter(self, nbytes: int) -> None:
        """Charge the bytes of a parameter; negative `nbytes` are released.

        Raises
        ------
        BudgetError : there is no room; nothing is counted.
        """
        self._add("a parameter", parameters=nbytes)

    def add_gradient(self, nbytes: int) -> None:
        """Charge the bytes of a gradient; negative `nbytes` are released.

        Raises
        ------
        BudgetError : there is no room; nothing is counted.
        """
        self._add("a gradient", gradients=nbytes)

    def _add(self, what: str, *, parameters: int = 0, gradients: int = 0) -> None:
        nbytes = parameters + gradients
        if nbytes > max(self.free, 0):
            raise BudgetError(what, self.used + nbytes, self.budget)
        self.parameters += parameters
        self.gradients += gradients
        self._look()
        if nbytes > 0 and self.grown is not None:
            self.grown(self.used)

    def _look(self) -> None:
        self.peak = max(self.peak, self.used)
        self.parameters_peak = max(self.parameters_peak, self.parameters)
        self.gradients_peak = max(self.gradients_peak, self.gradients)
