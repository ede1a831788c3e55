"""What the parts of an optimizer on a device have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import Optimizer

from nearstep.placement import Placement
from nearstep.run import Run
from nearstep.torch import options
from nearstep.torch.checks import label
from nearstep.torch.errors import InterruptedStepError
from nearstep.torch.formats import Formats
from nearstep.torch.layout import Layout
from nearstep.torch.overflow.drive_tier import DriveTier
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.saved import count
from nearstep.torch.settings import Settings
from nearstep.torch.shared_device import SharedDevice
from nearstep.torch.state import ParameterState
from nearstep.torch.step import Arrays, GradientOptions
from nearstep.torch.traffic import Traffic
from nearstep.updater.device import KernelDevice
from nearstep_spec.rule import optimizer as rules


class AttachedOptimizer(Optimizer):
    """An optimizer of torch with a device, and what it asks the class of one rule.

    Attributes
    ----------
    layout : state of a parameter.
    definition : the optimizer as data, which the device takes.
    """

    _rules_name: str = ""
    """What `rules=` in a device's name calls its rule, if that is one of a file."""

    layout: ClassVar[Layout]
    definition: rules.Optimizer
    _lease: SharedDevice
    _settings: Settings
    _formats: Formats
    _placement: Placement
    _residents: dict[Tensor, DeviceParameter]
    _traffic: Traffic
    _tier: DriveTier[Any] | None
    _interrupted: str | None

    @abstractmethod
    def _check_options(self, group: Mapping[str, Any]) -> None:
        """Raise `HyperparameterError` for a group that no step can be made with."""

    @abstractmethod
    def _rule(self, group: Mapping[str, Any]) -> str:
        """Name of the update rule that the kernel runs for a group."""

    @abstractmethod
    def _arrays(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        """Arrays of that rule, each with what its elements are before the first step."""

    @abstractmethod
    def _arguments(self, group: Mapping[str, Any], phase: Hashable) -> dict[str, Any]:
        """`step`, `first` and hyper-parameters for the device, of parameters in one phase."""

    @abstractmethod
    def _start(
        self, arrays: Arrays, group: Mapping[str, Any], phase: Hashable, gradient: GradientOptions
    ) -> Run:
        """Start the rule on the arrays of a launch, whose parameters are in one phase.

        `gradient` goes to the device as it is.
        """

    def _phase(
        self, group: Mapping[str, Any], resident: DeviceParameter, state: ParameterState, times: int
    ) -> Hashable:
        """What a run needs to know of a parameter besides its group; here t, from 1.

        Neighbours in one phase share a run. A parameter that is in its group several `times` has
        as many runs, each with the t of the last, as in torch's fused step.

        Raises
        ------
        StateError
        """
        return count(resident.label, state.step) + times

    @property
    def device(self) -> KernelDevice:
        """The device that the steps run on."""
        return self._lease.device

    def _labels(self) -> dict[Tensor, str]:
        """What parameters are called in errors."""
        return labels_of(self.param_groups)

    def _complete(self, group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
        """Make a loaded group one of this optimizer's, which has these defaults."""
        options.normalise(group, defaults)

    def _check_group(self, group: Mapping[str, Any], defaults: Iterable[str]) -> None:
        """Raise unless the device can make steps with the options of a group, of these names."""
        options.reject_unsupported(group)
        options.check_complete(group, defaults)
        self._settings.check_maximize(group["maximize"], self.device.config)
        self._check_options(group)
        self.device.check_rule(self._rule(group), self._rules_name)

    def _check_whole(self, action: str) -> None:
        if self._interrupted is not None:
            raise InterruptedStepError(action, self._interrupted)


def labels_of(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, str]:
    """What the parameters of these groups are called in errors."""
    return {
        parameter: label(group, index, position)
        for index, group in enumerate(groups)
        for position, parameter in enumerate(group["params"])
    }
