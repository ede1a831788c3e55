"""Steps one thing after the other: all is sent, all runs, all is fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from nearstep.placement import Extent, Launch
from nearstep.torch.formats import gradient_array
from nearstep.torch.launcher import Launcher
from nearstep.torch.step import Arrays, Key, StepInputs, Steps, Update, starter
from nearstep.torch.transfers import Inbox, Outbox
from nearstep.updater.pairs import Pairs
from nearstep.updater.rounding import Numbering
from nearstep.updater.run import ScanRun


@dataclass(frozen=True, eq=False)
class Load:
    """A launch whose gradients are on the device, with the arguments of each channel's run, and the
    indices of its elements."""

    key: Key
    arrays: Sequence[Arrays]
    numberings: Sequence[Numbering]


class SequentialSteps(Steps):
    """For a device without a clock: its copies take no time that something else could use."""

    def outbox(self) -> Outbox:
        return Outbox()

    def make(self, step: StepInputs) -> Inbox | None:
        updates = step.updates
        step.outbox.flush()
        launcher = Launcher(self._traffic, self._settings.max_cycles)
        loads = [self._load(launch, updates) for launch in self._launches(updates)]
        with self._device.acceleration():
            scans = self._scan(loads, launcher) if self._looks(step.scaling) else []
            factor = self._factor(scans, step.scaling)
            if factor is None:
                return None
            for load in loads:
                starts = [
                    starter(step.start, arrays, load.key, factor, numbering)
                    for arrays, numbering in zip(load.arrays, load.numberings, strict=True)
                ]
                for _ in range(load.key.times):
                    launcher.together(starts, step.started)
                    self._traffic.launches += len(starts)
        residents = (update.resident for update in updates.values())
        fetched = (each for each in residents if each.is_small and step.fetches)
        return Inbox([each.wanted for each in fetched])

    def _load(self, launch: Launch, updates: Mapping[Extent, Update]) -> Load:
        key = cast(Key, launch.key)
        if self._settings.compression is None:
            name = gradient_array(key.gradient_format)
            given = [{**part, "g": part[name]} for part in launch.parts.values()]
            return Load(key, given, [launch.numbering(channel) for channel in launch.parts])
        arrays: list[Arrays] = []
        numberings = []
        cuts = [[range(launch.start, launch.stop)]] * self._device.channel_count
        for each in self._pair_lists(launch, updates, cuts):
            for buffer, data in zip((each.pairs.index, each.pairs.value), each.data, strict=True):
                buffer.write(data)
            arrays.append({**launch.parts[each.channel], "g": each.pairs})
            numberings.append(launch.numbering(each.channel))
        return Load(key, arrays, numberings)

    def _scan(self, loads: Sequence[Load], launcher: Launcher) -> list[ScanRun]:
        """Runs on the gradients of every load, which have ended."""
        found: list[ScanRun] = []
        for load in loads:
            gradients = (arrays["g"] for arrays in load.arrays)
            values = (g.value if isinstance(g, Pairs) else g for g in gradients)
            runs = launcher.together(
                partial(self._device.scan, each, gradient_format=load.key.gradient_format)
                for each in values
                if each.size
            )
            self._traffic.scans += len(runs)
            found += runs
        return found
