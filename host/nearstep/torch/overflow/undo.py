"""What the host has of an optimizer before a step, to go back to."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.state import Savepoint


class Undo:
    """State and parameters on the host as they are now; parameters from `keep` on.

    Parameters
    ----------
    states : `Optimizer.state`.
    residents : of all parameters.
    """

    def __init__(
        self, states: MutableMapping[Tensor, Any], residents: Iterable[DeviceParameter]
    ) -> None:
        self._states = states
        self._found = [(p, state, Savepoint.of(state)) for p, state in states.items()]
        self._residents = [(each, each.memento()) for each in residents]
        self._parameters: list[tuple[Tensor, Tensor]] = []

    def keep(self, residents: Iterable[DeviceParameter]) -> None:
        """Copy the parameters that the host has, before an update."""
        for each in residents:
            if not each.offloaded:
                self._parameters.append((each.parameter, each.parameter.detach().clone()))

    def restore(self) -> None:
        """Make everything what it was. Nothing is in the memory of the device any more."""
        with torch.no_grad():
            for parameter, copy in self._parameters:
                parameter.copy_(copy)
        for resident, memento in self._residents:
            resident.restore(memento)
        for parameter in list(self._states):
            del self._states[parameter]
        for parameter, state, memento in self._found:
            memento.restore(state)
            self._states[parameter] = state
