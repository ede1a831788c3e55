"""Observers of a flow."""

__all__ = ["Watch"]


class Watch:
    """Observer of the steps of a flow; the base class prints no text."""

    def begin(self, step: str) -> None:
        """A step begins."""

    def line(self, step: str, text: str) -> None:
        """Receive a line of the step's program."""

    def end(self, step: str) -> None:
        """A step has ended, well or not."""
