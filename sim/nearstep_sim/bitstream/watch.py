"""Whoever follows a flow."""

__all__ = ["Watch"]


class Watch:
    """Is told about the steps of a flow; this one says nothing."""

    def begin(self, step: str) -> None:
        """A step begins."""

    def line(self, step: str, text: str) -> None:
        """What the program of a step prints."""

    def end(self, step: str) -> None:
        """A step has ended, well or not."""
