"""What an engine did, in the time of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nearstep.torch.offload.pipeline import Pipeline
from nearstep.work.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Part of a timeline, in its cycles.

    Attributes
    ----------
    busy : time in which each resource was held, between the two.
    """

    start: int
    end: int
    busy: Mapping[str, int]

    @property
    def duration(self) -> int:
        return self.end - self.start

    @property
    def longest(self) -> int:
        """Of what is busy."""
        return max(self.busy.values(), default=0)


def backward_and_update(timeline: Timeline) -> Phase:
    """From the end of the last forward computation to the last end.

    Parameters
    ----------
    timeline : of one iteration.
    """
    forward = [e.end for e in timeline.entries if e.operation.name.startswith("forward ")]
    start = max(forward, default=0)
    busy: dict[str, int] = {}
    for entry in timeline.entries:
        for resource in entry.operation.holds:
            inside = max(0, entry.end - max(entry.start, start))
            busy[resource] = busy.get(resource, 0) + inside
    end = max((entry.end for entry in timeline.entries), default=start)
    return Phase(start=start, end=end, busy=busy)


class Recording:
    """Made by `nearstep.torch.offload.engine.Engine.record`, which see."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @property
    def timeline(self) -> Timeline:
        """When each computation, transfer and update was under way, up to the last step or the end
        of the recording.

        `nearstep.work.trace` draws it, and writes it as a Chrome trace.
        """
        return self._pipeline.queue.timeline
