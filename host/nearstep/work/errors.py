"""Errors of a graph that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nearstep.errors import NearstepError


class WorkError(NearstepError):
    """An operation failed; no further one was started, and those in flight were waited for.

    The error of the operation is the `__cause__`.

    Attributes
    ----------
    operation : the failed one, with its number.
    done : completed operations, in the order of their ends.
    failed : all failed operations, in order: others can fail during the wait.
    not_run : operations that were not started, in program order.
    """

    def __init__(
        self, failed: Mapping[str, Exception], done: Sequence[str], not_run: Sequence[str]
    ) -> None:
        self.operation, error = next(iter(failed.items()))
        self.done = tuple(done)
        self.failed = dict(failed)
        self.not_run = tuple(not_run)
        others = "".join(
            f"; {name} failed, too: {_line(each)}" for name, each in [*failed.items()][1:]
        )
        super().__init__(
            f"{self.operation} failed: {_line(error)}{others}; {len(done)} "
            f"operations are done, {len(not_run)} were not run: {some(not_run)}"
        )


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def some(names: Sequence[str], most: int = 8) -> str:
    """Names as text, the first ones of many."""
    text = ", ".join(names[:most]) or "none"
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
