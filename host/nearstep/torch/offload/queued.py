"""Steps whose runs are work of a queue, beside what an engine does."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nearstep.torch.exchange import Results
from nearstep.torch.execution import StepExecutor
from nearstep.torch.flat_bucket import FlatBucket
from nearstep.torch.offload.pipeline import Pipeline
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.step import StepInputs


class QueuedSteps(StepExecutor):
    """Adds the runs of updates to a pipeline where all that they need is on the device, and nothing
    of what they leave is fetched: with the parameters and gradients of an engine.

    Others are made as they are without, after all that is in the queue.

    Parameters
    ----------
    steps : that make others.
    names : of parameters.
    """

    def __init__(
        self, steps: StepExecutor, pipeline: Pipeline, names: Mapping[Tensor, str]
    ) -> None:
        super().__init__(
            steps._device, steps._placement, steps._settings, steps._traffic, steps.home
        )
        self.pair_spaces = steps.pair_spaces
        self._names = names
        self._others = steps
        self._pipeline = pipeline

    def make(self, step: StepInputs) -> Results | None:
        looks = self._looks(step.scaling)
        if looks or step.fetches or not step.sends.is_empty:
            return self._made_by_others(step)
        factor = self._factor((), step.scaling)
        assert factor is not None, "nothing was looked at"
        for launch in self._launches(step.items):
            ends = [step.items[launch.extents[each]].resident for each in (0, -1)]
            names = dict.fromkeys(self._name(each) for each in ends)
            self._pipeline.update(" to ".join(names), launch, step.start, factor, step.begun)
        return Results({})

    def _name(self, resident: DeviceParameter | FlatBucket) -> str:
        if isinstance(resident, FlatBucket):
            return "others"
        return self._names.get(resident.parameter, resident.label)

    def _made_by_others(self, step: StepInputs) -> Results | None:
        queue = self._pipeline.queue
        self._pipeline.finish()
        if self._device.cycles is not None:
            self._others.clock = queue.clock
        self._others.timeline = None
        try:
            return self._others.make(step)
        finally:
            self._others.clock = None
            self.timeline = self._others.timeline
            if self.timeline is not None:
                queue.keep(self.timeline)
