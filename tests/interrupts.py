"""Exceptions at any bytecode of the package, as Ctrl-C raises them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

PACKAGE = "/nearstep/"


class Interrupts:
    """Counts the bytecodes of the package's frames in this thread, and raises `KeyboardInterrupt`
    before one of them.

    Parameters
    ----------
    at : number of that bytecode, from 1 on; 0: of none.
    within : part of the paths of the files that count.

    Attributes
    ----------
    count : bytecodes so far.
    where : file, line and offset that it was raised at; None: nowhere.
    """

    def __init__(self, at: int = 0, within: str = PACKAGE) -> None:
        self._at = at
        self._within = within
        self.count = 0
        self.where: str | None = None
        self._follow = self._step

    @contextmanager
    def armed(self) -> Iterator[None]:
        grad = torch.is_grad_enabled()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            # Python may raise between the call of a context and the statements that leave it.
            torch.set_grad_enabled(grad)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._within not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._follow

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.count = count = self.count + 1
            if count == self._at:
                file = frame.f_code.co_filename.rpartition("/")[2]
                self.where = f"{file}:{frame.f_lineno} bytecode {frame.f_lasti}"
                raise KeyboardInterrupt(self.where)
        return self._follow
