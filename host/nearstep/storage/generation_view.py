"""A generation of a store, to be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nearstep.backends.base import Completion
from nearstep.storage.generation import Generation

Submit = Callable[[Generation, str, Any, int], Completion]
"""Begins to read a tensor of a generation into an array, from a byte on."""


class GenerationView:
    """A generation of a store, to be read while it is there: until the next commit, for one before
    the last.

    Attributes
    ----------
    tensors : by name.
    """

    def __init__(self, generation: Generation, submit: Submit) -> None:
        self._generation = generation
        self._submit = submit
        self.number = generation.number
        self.meta = generation.meta
        self.tensors = generation.tensors

    def submit_read(self, name: str, out: Any, offset: int = 0) -> Completion:
        """Begin to read a tensor of the generation, as `Store.submit_read`.

        Raises
        ------
        NoGenerationError : there was a commit since.
        UnknownTensorError : it has none of this name.
        OutOfBoundsError : it is shorter.
        ArgumentError : `out` cannot be read into.
        """
        return self._submit(self._generation, name, out, offset)

    def read(self, name: str, out: Any, offset: int = 0) -> None:
        """Read a tensor of the generation: `submit_read`, and its end."""
        self.submit_read(name, out, offset).wait()
