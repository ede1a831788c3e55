"""Averages of gradients over workers, sent to the owners in place of each worker's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from nearstep.torch.device_gradient import DeviceGradient
from nearstep.torch.errors import UnsupportedOptionError
from nearstep.torch.offload.cache import ParameterCache
from nearstep.torch.offload.compute_copy import ComputeCopy
from nearstep.torch.offload.errors import AveragingError, LostWorkerError

Deliver = Callable[[ComputeCopy, Tensor], None]
"""Sends a gradient to the owner of a parameter."""

REASON = "the engine averages gradients, each by itself"
"""Why options of a wrapper that control averaging are not supported."""


class Averager:
    """Averages gradients over the workers of a wrapper, in place of torch's reducer.

    Each gradient is multiplied by 1 / workers, and summed in place by one all-reduce of the
    wrapper's process group, in the reverse order of registration. A gradient made before its turn
    is kept as the parameter's `grad`, charged to the budget. The object is both the wrapper's
    reducer and its logger: the wrapper's forward calls the methods with torch's names.

    Parameters
    ----------
    copies : of the parameters whose gradients are averaged, in the order of registration.
    deliver : called with each average.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        space: ParameterCache,
        copies: Sequence[ComputeCopy],
        deliver: Deliver,
    ) -> None:
        self._ddp = ddp
        self._space = space
        self._copies = copies
        self._turns = copies[::-1]
        self._known = frozenset(copies)
        self._deliver = deliver
        self._factor = 1.0 / dist.get_world_size(ddp.process_group)
        self._finds_unused = ddp.find_unused_parameters
        self._nodes: dict[ComputeCopy, Node] = {}
        self._unused: frozenset[ComputeCopy] = frozenset()  # by this worker
        self._skipped: frozenset[ComputeCopy] = frozenset()  # unused by all workers
        self._ready: set[ComputeCopy] = set()
        self._touched: set[ComputeCopy] = set()  # got a gradient since the last average
        self._next = 0
        self._expects = self._failed = False

    def takes(self, copy: ComputeCopy) -> bool:
        """Return whether a new gradient is averaged now; a gradient made in `no_sync` is averaged
        with the next one."""
        if not self._expects:
            self._touched.add(copy)
        return self._expects and copy in self._known

    def add(self, copy: ComputeCopy) -> None:
        """Mark the gradient of a parameter as made; average all gradients that are next in order.

        Raises
        ------
        BudgetError : there is no room for the gradient accumulated before.
        AveragingError : the gradient is the parameter's second in this backward.
        LostWorkerError : another worker does not take part.
        """
        try:
            if not self._ready and self._finds_unused:
                self._find_skipped()
            if copy in self._ready:
                raise AveragingError(copy.name, "was to be averaged twice in one backward")
            self._ready.add(copy)
            while self._next < len(self._turns):
                following = self._turns[self._next]
                if following in self._ready or following in self._unused:
                    if following not in self._skipped:
                        self._average(following)
                elif following not in self._skipped:
                    return
                self._next += 1
            self._expects = False
            self._ready.clear()
            self._touched.clear()
        except BaseException:
            self.abandon()
            self._failed = True
            raise

    def _find_skipped(self) -> None:
        """Find the parameters that no worker has used: their gradients are kept as they are."""
        mine = [copy in self._touched or copy not in self._unused for copy in self._copies]
        device = self._copies[0].parameter.device
        used = torch.tensor(mine, dtype=torch.int32, device=device)
        self._all_reduce(used)
        pairs = zip(self._copies, used.tolist(), strict=True)
        self._skipped = frozenset(copy for copy, count in pairs if not count)

    def _average(self, copy: ComputeCopy) -> None:
        """Average one gradient, the part accumulated before included, and deliver the average."""
        gradient, held, counted = copy.raw_gradient(), copy.resident.held, 0
        try:
            with torch.no_grad():
                if held is not None or gradient is None:
                    counted += self._reserve(copy)
                if held is not None:
                    assert isinstance(held, DeviceGradient), "what is averaged is not compressed"
                    before = held.fetch(copy.parameter)
                    gradient = before if gradient is None else before.add_(gradient)
                elif gradient is None:
                    gradient = torch.zeros_like(copy.like, device=copy.parameter.device)
                flat = _flat(gradient, copy.like)
                if flat is None:  # workers must agree on the order of elements
                    counted += self._reserve(copy)
                    gradient = torch.empty_like(copy.like, device=gradient.device).copy_(gradient)
                    flat = _flat(gradient, copy.like)
                    assert flat is not None, "it has the layout of the parameter"
                self._all_reduce(flat.mul_(self._factor))
        finally:
            self._space.ledger.add_gradient(-counted)
        self._deliver(copy, gradient)

    def _reserve(self, copy: ComputeCopy) -> int:
        self._space.reserve(copy.gradient_bytes, f"gradient of {copy.name}")
        return copy.gradient_bytes

    def _all_reduce(self, flat: Tensor) -> None:
        if not flat.numel():
            return
        try:
            dist.all_reduce(flat, group=self._ddp.process_group)
        except RuntimeError as error:
            raise LostWorkerError(str(error)) from error

    def abandon(self) -> None:
        """Drop the averages of a backward that has failed."""
        if self._expects or self._ready:
            self._expects, self._failed = False, bool(self._ready)
            self._ready.clear()

    def check_finished(self) -> None:
        """Raise `AveragingError` if gradients are not the average of all workers."""
        if self._failed:
            raise AveragingError("a gradient", "was not averaged, as backward failed")
        if self._ready:
            missing = self._turns[self._next].name
            self.abandon()
            raise AveragingError(
                missing,
                "got no gradient, and nothing after it was averaged: "
                "give the wrapper find_unused_parameters=True",
            )

    # Called by the wrapper

    def prepare_for_forward(self) -> None:
        """Check the last backward before a forward whose gradients are averaged.

        Raises
        ------
        AveragingError : the last backward made no gradient for some parameters.
        """
        self._failed = False
        self.check_finished()

    def _rebuild_buckets(self) -> bool:
        """Return False: there are no buckets."""
        return False

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Average gradients from now on, until each parameter has one.

        Parameters
        ----------
        outputs : of forward, if parameters may be unused.
        """
        self._ready.clear()
        self._next, self._expects = 0, True
        if self._finds_unused:
            reached = _reached(outputs)
            unused = (copy for copy in self._copies if self._node(copy) not in reached)
            self._unused = frozenset(unused)

    def _node(self, copy: ComputeCopy) -> Node | None:
        """Return the node that accumulates a parameter's gradient; None if the parameter has always
        been frozen."""
        with torch._C.DisableTorchFunctionSubclass():
            if copy not in self._nodes and copy.parameter.requires_grad:
                self._nodes[copy] = get_gradient_edge(copy.parameter).node
        return self._nodes.get(copy)

    def set_runtime_stats_and_log(self) -> None:
        """Nothing is logged."""

    def set_error_and_log(self, _: str) -> None:
        """Nothing is logged: the wrapper raises the error as well."""

    def _set_comm_hook_name(self, name: str) -> NoReturn:
        raise UnsupportedOptionError("register_comm_hook", name, REASON)

    def _set_static_graph(self) -> NoReturn:
        raise UnsupportedOptionError("static_graph", True, REASON)

    def _set_uneven_input_join(self) -> NoReturn:
        raise UnsupportedOptionError("join", "entered", "all workers make as many steps")


def _reached(outputs: Sequence[Tensor]) -> set[Node]:
    """Return the nodes of the autograd graph of tensors."""
    todo = [each.grad_fn for each in outputs if each.grad_fn is not None]
    found = set(todo)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                todo.append(node)
    return found


def _flat(gradient: Tensor, like: Tensor) -> Tensor | None:
    """Return a gradient's memory as one dimension; None if the order of elements differs from that
    of a new tensor like the parameter."""
    wanted = zip(gradient.shape, gradient.stride(), torch.empty_like(like).stride(), strict=True)
    if gradient.is_neg() or any(size != 1 and own != its for size, own, its in wanted):
        return None
    return gradient.as_strided((gradient.numel(),), (1,))
