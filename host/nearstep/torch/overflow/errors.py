"""What can go wrong with state on drives, besides the drives."""

from __future__ import annotations

from nearstep.storage.drive_errors import StorageError
from nearstep.torch.errors import HyperparameterError


class MemoryTooSmallError(HyperparameterError):
    """The parameters that are updated at once do not fit into `memory`.

    Attributes
    ----------
    expected, actual : bytes: the least that does, and what was given.
    """

    def __init__(self, label: str, expected: int, actual: int) -> None:
        super().__init__("memory", "", actual)
        self.expected: int = expected  # type: ignore[assignment]
        self.args = (
            f"memory must be at least {expected} bytes, not {actual}: {label} is updated at once",
        )


class ResumeError(StorageError):
    """The drives hold no step to go on from, or one that a new optimizer would write over.

    Attributes
    ----------
    expected, actual : what the drives should hold, and do.
    """

    def __init__(self, expected: str, actual: str) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(f"the drives must hold {expected}, not {actual}")
