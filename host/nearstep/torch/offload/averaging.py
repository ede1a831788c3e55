"""Averages of gradients over workers, which owners get in place of each worker's own."""

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
from nearstep.torch.offload.buckets import Assignment, Bucket, first_buckets, later_buckets
from nearstep.torch.offload.cache import ParameterCache
from nearstep.torch.offload.compute_copy import ComputeCopy
from nearstep.torch.offload.errors import AveragingError, LostWorkerError

Deliver = Callable[[Sequence[tuple[ComputeCopy, Tensor]]], None]
"""Gives owners gradients."""

REASON = "the engine averages gradients, each bucket when it is complete"
"""Why options of a wrapper are not supported that say how it does."""


class Averager:
    """Averages gradients over the workers of a wrapper, in place of torch's reducer.

    Buckets, their order, the factor and the collectives are those of the reducer, and so are the
    bits. Buckets are on the compute device. Other than there, a bucket has memory from its first
    gradient on until it is averaged and its gradients have gone to their owners. It is both what
    the wrapper calls its reducer and what it calls its logger: methods with torch's names are what
    its forward calls.

    Parameters
    ----------
    copies : of the parameters that the wrapper averages, in its order.

    Attributes
    ----------
    peak : most bytes that buckets had at once.
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
        self._device = copies[0].parameter.device
        self._index = {copy: index for index, copy in enumerate(copies)}
        self._deliver = deliver
        self._factor = 1.0 / dist.get_world_size(ddp.process_group)
        self._finds_unused = ddp.find_unused_parameters
        self._rebuilt = self._finds_unused
        self._order: list[int] = []
        self._nodes: dict[ComputeCopy, Node] = {}
        self._unused: Sequence[ComputeCopy] = ()
        self._ready: set[ComputeCopy] = set()
        self._next = 0
        self._expects = self._failed = False
        self._bytes = self.peak = 0
        self._assign(first_buckets(ddp, [copy.like for copy in copies]))

    def _assign(self, buckets: Assignment) -> None:
        self._buckets = [Bucket([self._copies[index] for index in each]) for each in buckets]
        self._bucket_of = {copy: each for each in self._buckets for copy in each.copies}

    def takes(self, copy: ComputeCopy) -> bool:
        """Whether a gradient that backward has made is to be averaged."""
        return self._expects and copy in self._index

    def add(self, copy: ComputeCopy, gradient: Tensor) -> None:
        """Take a gradient, which counts no more afterwards; average what is complete.

        Raises
        ------
        BudgetError : there is no room for its bucket.
        AveragingError : it is the parameter's second one in this backward.
        LostWorkerError : another worker does not take part.
        """
        try:
            if not self._ready:
                for other in self._unused:
                    self._fill(other, None)
            self._fill(copy, gradient)
            self._space.ledger.add_gradient(-copy.counted)
            copy.counted = 0
            copy.resident.release_gradient()
            copy.set_raw_gradient(None)
            self._order.append(self._index[copy])
            while self._next < len(self._buckets) and not self._buckets[self._next].pending:
                self._average(self._buckets[self._next])
                self._next += 1
            if self._next == len(self._buckets):
                self._finish()
        except BaseException:
            self.abandon()
            self._failed = True
            raise

    def _fill(self, copy: ComputeCopy, gradient: Tensor | None) -> None:
        """Put a gradient into its bucket; None is of a parameter that this worker has not used."""
        if copy in self._ready:
            raise AveragingError(copy.name, "was to be averaged twice in one backward")
        self._ready.add(copy)
        bucket = self._bucket_of[copy]
        if bucket.buffer is None:
            self._space.make_room(bucket.nbytes, f"averaging of gradients with {copy.name}'s")
            self._count(bucket.nbytes)
            bucket.open()
        if gradient is None:
            bucket.absent.append(copy)
        held, room = copy.resident.held, 0
        if held is not None:
            room = copy.gradient_bytes
            self._space.make_room(room, f"gradient of {copy.name}")
            self._space.ledger.add_gradient(room)
        with torch.no_grad():
            if held is not None:
                assert isinstance(held, DeviceGradient), "what is averaged is not compressed"
                before = held.fetch(copy.parameter)
                gradient = before if gradient is None else before.add_(gradient)
            elif gradient is None:
                gradient = copy.raw_gradient()
            view = bucket.view(copy)
            if gradient is None:
                view.zero_()
            else:
                torch.mul(gradient, self._factor, out=view)
        self._space.ledger.add_gradient(-room)
        bucket.pending -= 1

    def _average(self, bucket: Bucket) -> None:
        assert bucket.buffer is not None, "it has gradients"
        self._all_reduce(bucket.buffer)
        if not bucket.absent:
            self._give(bucket, bucket.copies)

    def _give(self, bucket: Bucket, copies: Sequence[ComputeCopy]) -> None:
        """Have owners get what is in a bucket, which ends."""
        found = [(copy, bucket.view(copy)) for copy in copies]
        bucket.buffer = None
        self._count(-bucket.nbytes)
        self._deliver(found)

    def _finish(self) -> None:
        """All is averaged. A parameter that no worker has used keeps the gradient that it had."""
        self._expects = False
        if self._finds_unused:
            unused = set(self._unused)
            mine = [copy not in unused for copy in self._copies]
            used = torch.tensor(mine, dtype=torch.int32, device=self._device)
            self._all_reduce(used)
            anywhere = used.tolist()
            for bucket in self._buckets:
                if bucket.buffer is not None:
                    copies = [copy for copy in bucket.copies if anywhere[self._index[copy]]]
                    self._give(bucket, copies)
        self._ready.clear()

    def _all_reduce(self, tensor: Tensor) -> None:
        try:
            dist.all_reduce(tensor, group=self._ddp.process_group)
        except RuntimeError as error:
            raise LostWorkerError(str(error)) from error

    def _count(self, nbytes: int) -> None:
        self._space.ledger.add_gradient(nbytes)
        self._bytes += nbytes
        self.peak = max(self.peak, self._bytes)

    def abandon(self) -> None:
        """Backward has failed: forget what was being averaged."""
        if self._expects or self._ready:
            self._expects, self._failed = False, bool(self._ready)
            self._end()

    def _end(self) -> None:
        for bucket in self._buckets:
            if bucket.buffer is not None:
                self._count(-bucket.nbytes)
            bucket.reset()
        self._ready.clear()
        if not self._rebuilt:
            self._order.clear()
        self._next = 0

    def check_finished(self) -> None:
        """Raise `AveragingError` if gradients are not the average of all workers."""
        if self._failed:
            raise AveragingError("a gradient", "was not averaged, as backward failed")
        if self._ready:
            missing = next(copy.name for copy in self._copies if copy not in self._ready)
            self.abandon()
            raise AveragingError(
                missing,
                "got no gradient, and nothing after it was averaged: "
                "give the wrapper find_unused_parameters=True",
            )

    # What the wrapper calls

    def prepare_for_forward(self) -> None:
        """Before a forward whose gradients are averaged.

        Raises
        ------
        AveragingError : the backward before left parameters out.
        """
        self._failed = False
        self.check_finished()

    def _rebuild_buckets(self) -> bool:
        """After the first backward that averaged: buckets by the order in which gradients came."""
        if self._rebuilt or self._expects or len(self._order) < len(self._copies):
            return False
        self._rebuilt = True
        likes = [copy.like for copy in self._copies]
        self._assign(later_buckets(self._ddp, likes, self._order, self._device))
        return True

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Average gradients from here on, until there is one of each parameter.

        Parameters
        ----------
        outputs : of forward, if parameters may be unused.
        """
        self._end()
        self._expects = True
        if self._finds_unused:
            reached = _reached(outputs)
            self._unused = [copy for copy in self._copies if self._node(copy) not in reached]

    def _node(self, copy: ComputeCopy) -> Node | None:
        """What adds to the gradient of a parameter; None if it has been frozen all the time."""
        with torch._C.DisableTorchFunctionSubclass():
            if copy not in self._nodes and copy.parameter.requires_grad:
                self._nodes[copy] = get_gradient_edge(copy.parameter).node
        return self._nodes.get(copy)

    def set_runtime_stats_and_log(self) -> None:
        """Nothing is logged."""

    def set_error_and_log(self, _: str) -> None:
        """Nothing is logged: the wrapper raises the error, too."""

    def _set_comm_hook_name(self, name: str) -> NoReturn:
        raise UnsupportedOptionError("register_comm_hook", name, REASON)

    def _set_static_graph(self) -> NoReturn:
        raise UnsupportedOptionError("static_graph", True, REASON)

    def _set_uneven_input_join(self) -> NoReturn:
        raise UnsupportedOptionError("join", "entered", "all workers make as many steps")


def _reached(outputs: Sequence[Tensor]) -> set[Node]:
    """Nodes of the graph of tensors."""
    todo = [each.grad_fn for each in outputs if each.grad_fn is not None]
    found = set(todo)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                todo.append(node)
    return found
