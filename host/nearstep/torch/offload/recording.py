"""What an engine did, in the time of a machine."""

from __future__ import annotations

from nearstep.torch.offload.pipeline import Pipeline
from nearstep.work.timeline import Timeline


class Recording:
    """Made by `nearstep.torch.offload.engine.Engine.record`, which see.

    Parameters
    ----------
    pipeline
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @property
    def timeline(self) -> Timeline:
        """When each computation, transfer and update was under way, up to the last step or the end
        of the recording.

        `nearstep.work.trace` draws it, and writes it as a Chrome trace.
        """
        return self._pipeline.queue.timeline
