"""A generation of a store, for reading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nearstep.backends.base import Completion
from nearstep.storage.generation import Generation

Submit = Callable[[Generation, str, Any, int], Completion]
"""Begins to read a tensor of a generation into an array, from a byte offset on."""


class GenerationView:
    """A generation of a store, for reading: one before the last until the next commit.

    Parameters
    ----------
    submit : begins a read of the store.

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
        NoGenerationError : a commit has replaced the generation.
        """
        return self._submit(self._generation, name, out, offset)

    def read(self, name: str, out: Any, offset: int = 0) -> None:
        """Read a tensor of the generation: `submit_read`, then wait."""
        self.submit_read(name, out, offset).wait()
