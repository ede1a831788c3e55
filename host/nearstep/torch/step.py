"""What one step of an optimizer sends to its device and runs there."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor

from nearstep.placement import Extent, Launch, Placement, Segment
from nearstep.run import Run
from nearstep.torch.compression import Compressed
from nearstep.torch.errors import GradientError
from nearstep.torch.factor import gradient_factor, gradient_norm
from nearstep.torch.launcher import Launcher
from nearstep.torch.pairs import PairSpace
from nearstep.torch.resident import Resident, copy_array, gradient_array
from nearstep.torch.settings import Settings
from nearstep.torch.state import ParameterState
from nearstep.torch.traffic import Traffic
from nearstep.updater.device import KernelDevice
from nearstep.updater.pairs import Pairs

Arrays = Mapping[str, Any]
"""Arguments of a run by array: buffers, and pairs in the place of a compressed gradient."""

GradientOptions = Mapping[str, Any]
"""How gradients come, and where a copy of the parameters goes: arguments of every rule."""


class Key(NamedTuple):
    """What neighbours have in common that share a run.

    Attributes
    ----------
    group: int
        Index of the parameter group.
    phase: Hashable
        What else the rule needs to know.
    gradient_format: str
    copy_format: str | None
        Format of the copy of the parameters that the host fetches; None without one.
    times: int
        Runs: how often each is in its group.
    negate: bool
        The kernel is to negate the gradients.
    """

    group: int
    phase: Hashable
    gradient_format: str
    copy_format: str | None
    times: int
    negate: bool


class Given(NamedTuple):
    """A parameter to be updated.

    Attributes
    ----------
    group: int
        Index of the parameter group.
    parameter, gradient: Tensor
    times: int
        How often it is in the group.
    """

    group: int
    parameter: Tensor
    gradient: Tensor
    times: int

    def once_more(self) -> Given:
        """The same, found in the group again."""
        return self._replace(times=self.times + 1)


@dataclass(eq=False, slots=True)
class Update:
    """A parameter that a step updates.

    Attributes
    ----------
    key: Key
    resident: Resident
    state: ParameterState
    arrays: Mapping[str, float]
        Arrays of the rule.
    compressed: Compressed | None
        The gradient, if it is compressed; others have been sent.
    """

    key: Key
    resident: Resident
    state: ParameterState
    arrays: Mapping[str, float]
    compressed: Compressed | None


@dataclass(frozen=True, eq=False)
class Load:
    """A launch whose gradients are on the device, with the arguments of each channel's run."""

    key: Key
    arrays: Sequence[Arrays]


Start = Callable[[Arrays, Key, GradientOptions], Run]
"""Starts the rule of a group."""


class Steps:
    """Makes the steps of one optimizer, whose parameters have been prepared.

    Attributes
    ----------
    pair_spaces: dict[Segment, PairSpace]
        Room for compressed gradients.
    """

    def __init__(
        self, device: KernelDevice, placement: Placement, settings: Settings, traffic: Traffic
    ) -> None:
        self.pair_spaces: dict[Segment, PairSpace] = {}
        self._device = device
        self._placement = placement
        self._settings = settings
        self._traffic = traffic
        self._launcher = Launcher(traffic, settings.max_cycles)

    def loads(self, updates: Mapping[Extent, Update]) -> Sequence[Load]:
        """Group updates into runs; compressed gradients are sent here."""
        keyed = ((extent, update.key) for extent, update in updates.items())
        return [self._load(launch, updates) for launch in self._placement.launches(keyed)]

    def factor(self, loads: Sequence[Load], scale: float, found: Tensor | None) -> float | None:
        """The factor that undoes ``scale`` and bounds the norm; None if the step is to be skipped.

        Parameters
        ----------
        loads: Sequence[Load]
        scale: float
            What the gradients were multiplied by.
        found: Tensor | None
            If given, the device looks for infinities and NaN, and ``found`` is set to 1 if it finds
            one.

        Raises
        ------
        GradientError
            There is a bound, and the norm is not finite.
        """
        bound = self._settings.max_grad_norm
        if bound is None and found is None:
            return gradient_factor(0.0, None, scale)
        not_finite, squares = self._scan(loads)
        if not_finite and found is not None:
            found.fill_(1.0)
            return None
        norm = gradient_norm(squares, scale)
        if bound is not None and not math.isfinite(norm):
            raise GradientError("all parameters together", "of a finite norm", norm)
        return gradient_factor(norm, bound, scale)

    def run(self, load: Load, factor: float, start: Start, started: list[Run]) -> None:
        """Run a launch on all of its channels at once, as often as its parameters are in their
        group; adds each run as it is started."""
        common = {
            "gradient_format": load.key.gradient_format,
            "gradient_scale": -factor if load.key.negate else factor,
        }
        starts = []
        for arrays in load.arrays:
            copy = {}
            if load.key.copy_format is not None:
                copy["copy_out"] = arrays[copy_array(load.key.copy_format)]
                copy["copy_out_format"] = load.key.copy_format
            starts.append(partial(start, arrays, load.key, {**common, **copy}))
        for _ in range(load.key.times):
            self._launcher.together(starts, started)
            self._traffic.launches += len(starts)

    def _load(self, launch: Launch, updates: Mapping[Extent, Update]) -> Load:
        key = cast(Key, launch.key)
        compression = self._settings.compression
        if compression is None:
            name = gradient_array(key.gradient_format)
            return Load(key, [{**part, "g": part[name]} for part in launch.parts.values()])
        compressed = {
            extent: cast(Compressed, updates[extent].compressed) for extent in launch.extents
        }
        written = self.pair_spaces[launch.extents[0].segment].write(launch, compressed)
        arrays: list[Arrays] = []
        for part, (index, value) in zip(launch.parts.values(), written, strict=True):
            arrays.append({**part, "g": Pairs(index, value, compression.form)})
            self._traffic.gradients_down += index.nbytes + value.nbytes
            self._traffic.pairs += index.size
        return Load(key, arrays)

    def _scan(self, loads: Sequence[Load]) -> tuple[bool, float]:
        """Whether a gradient on the device is infinite or NaN, and the sum of their squares.

        Sums are added in the order of the launches, and those of one launch in the order of the
        channels.
        """
        found, squares = False, 0.0
        for load in loads:
            gradients = (arrays["g"] for arrays in load.arrays)
            values = (g.value if isinstance(g, Pairs) else g for g in gradients)
            runs = self._launcher.together(
                partial(self._device.scan, each, gradient_format=load.key.gradient_format)
                for each in values
                if each.size
            )
            self._traffic.scans += len(runs)
            for run in runs:
                found |= run.found_inf
                squares += run.sum_of_squares
        return found, squares
