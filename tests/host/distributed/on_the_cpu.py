"""torch's tests that want GPUs, on the CPU: what they move to a device stays where it is."""

from __future__ import annotations

import contextlib
import functools
import os
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def allow(common: Any) -> None:
    """Have the decorators that look for GPUs look no more; before tests are made with them."""

    def always(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda function: function

    common.skip_if_lt_x_gpu = always
    common.skip_if_no_gpu = lambda function: function
    common.skip_if_small_worldsize = _skip_if_small
    common.nccl_skip_if_lt_x_gpu = always
    torch.cuda.set_device = lambda *_, **__: None
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 8
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    nn.Module.cuda = lambda self, *_: self
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, module: nn.Module, *_: Any, **options: Any) -> None:
        options.pop("device_ids", None)
        options.pop("output_device", None)
        original(self, module, **options)

    DistributedDataParallel.__init__ = init


class OnTheCpu(TorchFunctionMode):
    """Functions of torch with the CPU in the place of any other device."""

    def __torch_function__(
        self, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.cuda:
            return args[0]
        options = dict(kwargs or {})
        if options.get("device") is not None:
            options["device"] = CPU
        if function is Tensor.to and len(args) > 1:
            args = (args[0], CPU if _is_device(args[1]) else args[1], *args[2:])
        if getattr(function, "__name__", "") == "_parse_to":
            args = tuple(CPU if _is_device(each) else each for each in args)
        return function(*args, **options)


def _skip_if_small(function: Any) -> Any:
    """Of two processes; torch skips those of less than eight, for as long as it has no GPUs."""
    return unittest.skipIf(int(os.environ["WORLD_SIZE"]) < 3, "fewer than 3 processes")(function)


def _is_device(value: Any) -> bool:
    named = isinstance(value, str) and value.startswith("cuda")
    return named or isinstance(value, int | torch.device)
