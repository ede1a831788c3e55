"""Exceptions at any bytecode of the host or of the simulated devices, as Ctrl-C raises them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import nearstep
import nearstep_sim

ROOTS = tuple(f"{Path(each.__file__).parent}/" for each in (nearstep, nearstep_sim))
PACKAGE = "/nearstep"
"""Part of all paths of these."""


class Interrupts:
    """Counts the bytecodes of these packages' frames in this thread, and raises `KeyboardInterrupt`
    before one of them, and if wanted a second one in a call after that.

    Parameters
    ----------
    at : number of that bytecode, from 1 on; 0: of none.
    within : what counts: part of the files' paths and, behind a colon, of the functions' names.
    again : number of the call, after the first exception, in which a second one is raised, at its
        begin or, of a function in C, behind it: where Python looks for signals. 0: none.

    Attributes
    ----------
    count : bytecodes so far.
    where : file, line and offset that it was raised at; None: nowhere.
    twice : the second one was raised.
    """

    def __init__(self, at: int = 0, within: str = PACKAGE, again: int = 0) -> None:
        self._at = at
        self._within, _, self._function = within.partition(":")
        self._again = again
        self.twice = False
        self.count = 0
        self.where: str | None = None
        self._follow = self._step

    @contextmanager
    def armed(self) -> Iterator[None]:
        grad = torch.is_grad_enabled()
        collects = gc.isenabled()
        gc.disable()  # what other tests left would be finalized here, and counted
        # Python 3.12 has no events of bytecodes unless a frame had asked for them before this call.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            sys.setprofile(None)
            if collects:
                gc.enable()
            # Python may raise between the call of a context and the statements that leave it.
            torch.set_grad_enabled(grad)
            torch._C._set_torch_function_state(torch._C._TorchFunctionState.ENABLED)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(ROOTS) or self._within not in code.co_filename:
            return None
        if self._function not in code.co_qualname:
            return None
        frame.f_trace = self._follow  # before the request, which Python 3.13 ignores without it
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._follow

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.count = count = self.count + 1
            if count == self._at:
                file = frame.f_code.co_filename.rpartition("/")[2]
                self.where = f"{file}:{frame.f_lineno} bytecode {frame.f_lasti}"
                sys.settrace(None)  # else raising does it, and Python 3.13 loses the profile
                if self._again:
                    sys.setprofile(self._call)
                raise KeyboardInterrupt(self.where)
        return self._follow

    def _call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(ROOTS):
            self._again -= 1
            if not self._again:
                self.twice = True
                sys.setprofile(None)
                raise KeyboardInterrupt(f"again at {frame.f_code.co_name}:{frame.f_lineno}")
