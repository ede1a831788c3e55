"""Updates during backward: of each module, as soon as all of its gradients are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nearstep.torch.errors import EarlyUpdateError, UnsupportedOptionError
from nearstep.torch.in_backward import WHOLE_STEPS, have_changed, options_of
from nearstep.torch.offload.compute_copy import ComputeCopy
from nearstep.torch.optimizer import DeviceOptimizer


class EarlyUpdates:
    """Updates the parameters of a module once their owner has all gradients of the module.

    Parameters
    ----------
    optimizer : without clipping, which needs all gradients first, and without drives of cards.

    Raises
    ------
    UnsupportedOptionError
    """

    def __init__(self, model: nn.Module, optimizer: DeviceOptimizer) -> None:
        bound = optimizer.settings.max_grad_norm
        if bound is not None:
            raise UnsupportedOptionError(
                "max_grad_norm", bound, "it needs all gradients first, use updates='at-step'"
            )
        self._rolls_back = optimizer.store is not None
        if self._rolls_back and optimizer.device.drive_places:
            raise UnsupportedOptionError("updates", "in-backward", WHOLE_STEPS)
        self._optimizer = optimizer
        self._modules: dict[Tensor, Sequence[Tensor]] = {}
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            for parameter in own:
                self._modules.setdefault(parameter, own)
        self._waiting: dict[Tensor, ComputeCopy] = {}
        self._updated: list[ComputeCopy] = []
        self._options: list[dict[str, Any]] = []

    def arrived(self, copy: ComputeCopy, update: Callable[[Sequence[ComputeCopy]], None]) -> None:
        """Record that the owner has a parameter's gradient; call `update` with the module's
        parameters if it was the last of the module."""
        self._waiting[copy.parameter] = copy
        own = self._modules.get(copy.parameter, (copy.parameter,))
        wanted = [each for each in own if each.requires_grad]
        if not all(map(self._is_waiting, wanted)):
            return
        if not self._updated:
            self._options = options_of(self._optimizer.param_groups)
        found = [self._waiting.pop(each) for each in wanted]
        self._updated += found  # Ctrl-C may come when they are updated
        try:
            update(found)
        except Exception:
            del self._updated[-len(found) :]
            raise
        for each in found:
            held = each.resident.held
            each.updated = True
            if held is not None:
                held.applied = True

    def _is_waiting(self, parameter: Tensor) -> bool:
        found = self._waiting.get(parameter)
        return found is not None and (
            found.resident.held is not None or found.raw_gradient() is not None
        )

    def before_step(self) -> None:
        """Raise `EarlyUpdateError` if options or scaling have changed since the early updates."""
        if not self._updated:
            return
        name = self._updated[0].name
        if self._optimizer.scales:
            self.give_up()
            raise EarlyUpdateError(name, "its gradient is scaled (GradScaler)")
        if any(map(have_changed, self._optimizer.param_groups, self._options)):
            self.give_up()
            raise EarlyUpdateError(name, "options of the optimizer were changed before step()")

    def before_checkpoint(self, optimizer: Optimizer) -> None:
        """Raise `EarlyUpdateError` between the first update and the end of the step."""
        if self._updated and self._optimizer.keeps_updates:
            reason = "state_dict() is called before step(), which ends what backward began"
            raise EarlyUpdateError(self._updated[0].name, reason)

    def after_step(self) -> None:
        """Reset the marks of early updates after a complete step."""
        self._forget(release=False)

    def give_up(self) -> bool:
        """Invalidate the early updates; return whether there were any.

        With drives they are rolled back, otherwise the optimizer refuses steps until a checkpoint
        is loaded.
        """
        found = self._optimizer.keeps_updates and (bool(self._updated) or self._rolls_back)
        if found:
            self._optimizer.interrupt(EarlyUpdateError.__name__)
        self._forget(release=not self._rolls_back)
        return found

    def _forget(self, *, release: bool) -> None:
        for copy in self._updated:
            copy.updated = False
            held = copy.resident.held
            if release:
                copy.given_up += 1
                copy.resident.release_gradient()
            elif held is not None:
                held.applied = False
        self._updated.clear()
        self._waiting.clear()
