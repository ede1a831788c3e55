"""A parameter whose master lies on the drives of cards."""

from __future__ import annotations

import torch

from nearstep.torch import convert
from nearstep.torch.cards.host_changes import Expected
from nearstep.torch.exchange import Sends, send_now
from nearstep.torch.parameter import DeviceParameter


class CardParameter(DeviceParameter):
    """A parameter on the host, and its range of the flat array on the drives."""

    _looked = False

    def lose_master(self) -> None:
        """Drives keep the master, whatever becomes of the memory of a card."""

    def settle_on_drives(self) -> None:
        """Write the parameter, if the host has changed it; the step that follows need not look.

        Raises
        ------
        ParameterError, StorageError
        """
        if not self.offloaded:
            self.check_size()
            send_now(super().send_master_if_changed)
        self._looked = True

    def begin_look(self) -> Expected | None:
        """What there is to look at before it is known whether the host has changed the parameter.

        The step that follows need not look. None: `settle_on_drives` knows it at once.

        Raises
        ------
        ParameterError
        """
        if self.offloaded or not isinstance(self.last_seen, int) or not self.parameter.is_cpu:
            return None
        self.check_size()
        self._looked = True
        return Expected(self.label, convert.part_sums(self.parameter), self.last_seen)

    def send_master_if_changed(self, sends: Sends) -> None:
        looked, self._looked = self._looked, False
        if not looked:
            super().send_master_if_changed(sends)

    def read_again(self) -> None:
        """Have the host's parameter as the drives have it."""
        self._looked = False
        if not self.offloaded:
            with torch.no_grad():
                self._read_into(self.parameter)
