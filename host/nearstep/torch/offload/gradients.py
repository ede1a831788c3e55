"""Gradients: from their reservation in the budget until their owner has them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from nearstep.torch.checks import check_gradient
from nearstep.torch.compression import Compressed, Compression
from nearstep.torch.device_gradient import DeviceGradient, SparseGradient
from nearstep.torch.eager import eager
from nearstep.torch.errors import GradientError
from nearstep.torch.offload.averaging import Averager
from nearstep.torch.offload.cache import ParameterCache
from nearstep.torch.offload.compute_copy import ComputeCopy
from nearstep.torch.offload.errors import BudgetError
from nearstep.torch.offload.streams import Download, Streams
from nearstep.torch.optimizer import DeviceOptimizer
from nearstep.torch.select import Chosen, flat, select_largest

OWN_REFERENCES = 3
"""References to a gradient that only its parameter holds: torch's, a local variable's, and that of
`sys.getrefcount`."""


class Gradients:
    """Gradients of the parameters in a cache.

    A gradient is charged before the backward of the operation that makes it. A second gradient of
    the same parameter, from another use, is charged besides the first while it is added.

    Parameters
    ----------
    arrived : called when an owner has received a gradient.

    Attributes
    ----------
    averages : averages gradients before they are sent, if there are other workers.
    compresses : the optimizer, if the optimizer compresses gradients.
    keeps_whole : gradients are not compressed before the step, so that others can be added.
    stay : gradients stay on the compute device until they update their parameters in backward, on
        an optimizer that can roll such updates back.
    """

    def __init__(self, space: ParameterCache, arrived: Callable[[ComputeCopy], None]) -> None:
        self._space = space
        self._arrived = arrived
        self._passes: set[int] = set()
        self._given_up: ComputeCopy | None = None
        self.averages: Averager | None = None
        self.compresses: DeviceOptimizer | None = None
        self.keeps_whole = self.stay = False
        space.spill = self._spill

    def expect(self, uses: Iterable[tuple[ComputeCopy, object]]) -> None:
        """Reserve room for the gradients of these uses of parameters, before backward makes them.

        Raises
        ------
        BudgetError, CaptureError
        GradientError : one has been compressed, and not been reset since.
        """
        if self._space.closed:
            return
        self._space.check_runs()
        if self._space.torn:
            self._space.mend()
        if self._space.watch is not None:
            self._space.watch.see_node()
        task = self._enter_pass()
        for copy, use in uses:
            if use in copy.uses or not copy.accumulates:
                continue
            _check_alone(copy)
            copy.uses[use] = task
            if len(copy.uses) < 3:
                with self._space.aside():
                    what = f"backward of what uses {copy.name}"
                    self._space.reserve(copy.gradient_bytes, what)
                    copy.reserved += copy.gradient_bytes

    def _enter_pass(self) -> int:
        """Register a callback at the end of the running backward; return torch's number of the
        pass."""
        task = torch._C._current_graph_task_id()
        if task not in self._passes and task >= 0:
            self._passes.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(_Pass(self, task))
        return task

    def arriving(self, copy: ComputeCopy, gradient: Tensor | None) -> None:
        """Reserve room for a gradient just before it is accumulated, if no earlier hook announced
        it, as with `autograd.Function`; fetch the held gradient if the sum cannot be sent.

        Raises
        ------
        BudgetError, CaptureError, EarlyUpdateError
        GradientError : one has been compressed, and not been reset since.
        """
        if not copy.reserved:
            self.expect([(copy, object())])
        if gradient is not None and copy.resident.held is not None and not _can_go(copy, gradient):
            self.read(copy)

    def take_given_up(self) -> ComputeCopy | None:
        """Outside backward: clean up failed passes; return once a parameter that such a pass had
        updated."""
        if torch._C._current_graph_task_id() >= 0:
            return None
        for task in [*self._passes]:
            self.fail_pass(task)
        found, self._given_up = self._given_up, None
        return found

    def complete(self, copy: ComputeCopy) -> None:
        """Send a gradient to its owner after backward has accumulated it.

        Raises
        ------
        EarlyUpdateError
        GradientError : one has been compressed, and not been reset since.
        AveragingError, GradientError, LostWorkerError : the gradient is not averaged over workers.
        """
        gradient = copy.raw_gradient()
        if gradient is None:
            return
        if self._space.torn:
            self._space.mend()
        with self._space.aside():
            try:
                self._recount(copy, gradient)
                _check_alone(copy)
            except (BudgetError, GradientError):
                copy.set_raw_gradient(None)
                self._recount(copy, None)
                raise
            finally:
                self._expect_no_more(copy)
        if self.averages is not None and self.averages.takes(copy):
            self._average(self.averages, copy, gradient)
            return
        if not _can_go(copy, gradient):
            return
        with self._space.aside():
            self._space.check_old(copy, "another backward has made a gradient of it")
            if not self.stay or copy.resident.held is not None:
                self._send(copy, gradient)
            self._arrived(copy)

    def _average(self, averages: Averager, copy: ComputeCopy, gradient: Tensor) -> None:
        if gradient.requires_grad:
            expected = "no part of a graph (create_graph), to be averaged"
            raise GradientError(copy.name, expected, "one")
        check_gradient(copy.name, copy.parameter, gradient)
        with self._space.aside():
            self._space.check_old(copy, "another backward has made a gradient of it")
            averages.add(copy)

    def deliver(self, copy: ComputeCopy, averaged: Tensor) -> None:
        """Send an averaged gradient to the owner, in place of the present and held ones."""
        copy.resident.release_gradient()
        copy.set_raw_gradient(averaged)
        self._recount(copy, averaged)
        if not self.stay:
            self._send(copy, averaged)
        self._arrived(copy)

    def spend(self, copy: ComputeCopy) -> None:
        """Free a gradient that has updated its parameter."""
        copy.resident.spend_gradient()
        copy.set_raw_gradient(None)
        self._recount(copy, None)

    def read(self, copy: ComputeCopy) -> Tensor | None:
        """Return `grad` of a parameter; fetch it if the owner holds it, with what backward has
        just added.

        Raises
        ------
        BudgetError, EarlyUpdateError
        GradientError : the gradient was compressed, so it cannot be read.
        """
        held = copy.resident.held
        if held is None:
            return copy.raw_gradient()
        if isinstance(held, SparseGradient):
            expected = f"left unread until optimizer.zero_grad(), since {held.reason}"
            raise GradientError(copy.name, expected, "read")
        if self._space.torn:
            self._space.mend()
        self._space.check_old(copy, "its gradient is read before optimizer.step()")
        hint = "; to clip on the device, give the optimizer max_grad_norm"
        with self._space.aside(), torch.no_grad():
            added = copy.raw_gradient()
            if added is not None:
                self._send(copy, added)
                del added
            self._space.make_room(copy.gradient_bytes, f"gradient of {copy.name}", hint)
            gradient = held.fetch(copy.parameter)
            copy.set_raw_gradient(gradient)
            copy.resident.release_gradient()
            self._recount(copy, gradient)
        return gradient

    def assign(self, copy: ComputeCopy, gradient: Tensor | None) -> None:
        """Set `grad` of a parameter.

        Raises
        ------
        BudgetError, EarlyUpdateError
        """
        if self._space.torn:
            self._space.mend()
        self._space.check_old(copy, "its gradient is set before optimizer.step()")
        with self._space.aside():
            if gradient is not None:
                room = copy.charge(gradient) - copy.counted
                self._space.make_room(room, f"gradient of {copy.name}")
            copy.set_raw_gradient(gradient)
            copy.resident.release_gradient()
            self._recount(copy, gradient)

    def _send(self, copy: ComputeCopy, gradient: Tensor) -> None:
        streams, recording = self._space.streams, self._space.recording
        is_whole = self.keeps_whole or isinstance(copy.resident.held, DeviceGradient)
        if self.compresses is not None and not is_whole:
            self._compress(self.compresses, copy, gradient)
            return
        if streams is not None and copy.resident.held is None:
            self._begin_download(streams, copy, gradient)
            return
        is_first, nbytes = copy.resident.held is None, copy.counted
        begun = 0 if recording is None else recording.now
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            try:
                copy.resident.hold_gradient(gradient)
            except Exception as error:
                copy.optimizer.write_failed(error)
                raise
        self._space.counts.gradients += 1
        copy.set_raw_gradient(None)
        self._recount(copy, None)
        held = copy.resident.held
        if recording is not None and is_first and isinstance(held, DeviceGradient):
            recording.sent(copy, held.array, nbytes, begun)

    def _compress(self, optimizer: DeviceOptimizer, copy: ComputeCopy, gradient: Tensor) -> None:
        """Compress a gradient for its owner, and free it.

        On an accelerator the pairs are selected there if no residual is kept. The host selects if
        residuals, which are state on the host, are kept, or if the pairs are larger than the
        gradient.
        """
        parameter, streams = copy.parameter, self._space.streams
        compression = optimizer.settings.compression
        assert compression is not None, "the optimizer compresses"
        downloads: dict[Download, int] = {}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if streams is None:
                make = partial(optimizer.compress, parameter, gradient)
                held = optimizer.hold_pairs(parameter, make)
                held.land()
            elif _is_smaller(compression, gradient):
                chosen = select_largest(compression, flat(gradient, gradient.device), None)
                index, value = streams.download(chosen.index), streams.download(chosen.value)
                for each, part in ((index, chosen.index), (value, chosen.value)):
                    downloads[each] = part.numel() * part.element_size()
                    copy.resident.count_to_host(part)
                pairs = Chosen(index.staged, value.staged, None)
                held = optimizer.hold_pairs(parameter, _after([index, value], pairs))
            else:
                whole = streams.download(gradient)
                downloads[whole] = copy.counted
                copy.resident.count_to_host(gradient)
                make = partial(optimizer.compress, parameter, whole.staged)
                held = optimizer.hold_pairs(parameter, _after([whole], make))
        self._space.counts.gradients += 1
        copy.set_raw_gradient(None)
        self._recount(copy, None)
        for each, nbytes in downloads.items():
            assert streams is not None, "it has begun downloads"
            self._space.sent += nbytes
            self._space.ledger.add_gradient(nbytes)
            streams.depart(each, nbytes, partial(self._downloaded, copy, held, nbytes))

    def _begin_download(self, streams: Streams, copy: ComputeCopy, gradient: Tensor) -> None:
        """Download a gradient, charged until it is on the host; or write it to the host by a
        kernel, charged no longer, since its memory is reused in stream order."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            written = copy.in_place.gradient
            download = streams.write(gradient) if written else streams.download(gradient)
            copy.resident.hold_gradient(download.staged, wait=download.wait)
        self._space.counts.gradients += 1
        copy.set_raw_gradient(None)
        nbytes, copy.counted = copy.counted, 0
        if written:
            self._space.ledger.add_gradient(-nbytes)
            nbytes = 0
        self._space.sent += nbytes
        held = copy.resident.held
        streams.depart(download, nbytes, partial(self._downloaded, copy, held, nbytes))

    def _downloaded(
        self, copy: ComputeCopy, held: DeviceGradient | SparseGradient | None, nbytes: int
    ) -> None:
        """Hand a downloaded gradient to its owner, unless `grad` was reset or set since."""
        self._gone(nbytes)
        if held is not None and copy.resident.held is held:
            try:
                held.land()
            except Exception as error:
                copy.optimizer.write_failed(error)
                raise

    def _gone(self, nbytes: int) -> None:
        """Stop charging a gradient in transfer."""
        self._space.sent -= nbytes
        self._space.ledger.add_gradient(-nbytes)

    def _recount(self, copy: ComputeCopy, gradient: Tensor | None) -> None:
        """Charge the present gradient of a parameter, first from the bytes reserved; call it in
        `aside`."""
        counted = copy.charge(gradient)
        moved = min(copy.reserved, max(0, counted - copy.counted))
        more = counted - copy.counted - moved
        if more > 0:
            self._space.make_room(more, f"gradient of {copy.name}")
        self._space.ledger.add_gradient(more)
        copy.reserved -= moved
        copy.counted = counted

    def _expect_no_more(self, copy: ComputeCopy) -> None:
        self._space.ledger.add_gradient(-copy.reserved)
        copy.reserved = 0
        copy.uses.clear()

    def recount_all(self) -> None:
        """Charge present gradients by the plan now in force."""
        for copy in self._space.copies:
            self._recount(copy, copy.raw_gradient())

    def fail_pass(self, task: int) -> None:
        """Clean up after a failed backward; invalidate its updates."""
        if task not in self._passes:
            return
        if self.averages is not None:
            self.averages.abandon()
        if self._space.watch is not None:
            self._space.watch.restart()
        if not self.stay:
            self._given_up = next((copy for copy in self._space.copies if copy.updated), None)
        self._space.give_up()
        self.end_pass(task)

    def end_pass(self, task: int) -> None:
        """Release the reservations of a backward that has ended."""
        torn, self._space.torn = self._space.torn, True
        for copy in self._space.copies:
            if task in copy.uses.values():
                self._expect_no_more(copy)
        self._passes.discard(task)
        self._space.torn = torn

    def _spill(self) -> bool:
        """Send one present gradient, unreferenced and still readable later, to its owner; return
        whether there was one."""
        for copy in self._space.copies if self.compresses is None else ():
            if not copy.counted or copy.resident.held is not None:
                continue
            gradient = copy.raw_gradient()
            if (
                gradient is not None
                and sys.getrefcount(gradient) <= OWN_REFERENCES
                and torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) <= 2
                and _can_go(copy, gradient)
            ):
                self._send(copy, gradient)
                return True
        return False


class _Pass:
    """A callback that torch calls when a backward ends, and drops uncalled when it fails."""

    _gradients: Gradients | None = None

    def __init__(self, gradients: Gradients, task: int) -> None:
        self._task = task
        self._gradients = gradients

    @eager
    def __call__(self) -> None:
        found, self._gradients = self._gradients, None
        if found is not None:
            found.end_pass(self._task)

    @eager
    def __del__(self) -> None:
        if self._gradients is not None:
            self._gradients.fail_pass(self._task)


def _check_alone(copy: ComputeCopy) -> None:
    """Raise `GradientError` if the held gradient is compressed or freed, so that nothing can be
    added."""
    held = copy.resident.held
    if isinstance(held, SparseGradient):
        expected = (
            "reset (optimizer.zero_grad()) before another backward, or made in "
            f"engine.accumulate(), since {held.reason}"
        )
        raise GradientError(copy.name, expected, "added to")


def _is_smaller(compression: Compression, gradient: Tensor) -> bool:
    """Return whether no residual is kept and the pairs are smaller than the gradient."""
    pairs = compression.kept_of(gradient.numel()) * compression.pair_bytes
    whole = gradient.numel() * gradient.element_size()
    return not compression.error_feedback and pairs < whole


def _after(
    downloads: Sequence[Download], made: Chosen | Callable[[Tensor | None], Compressed]
) -> Callable[[Tensor | None], Compressed]:
    """Return a function that waits for downloads, then compresses the gradient or returns its
    selected pairs."""

    def make(residual: Tensor | None) -> Compressed:
        for each in downloads:
            each.wait()
        return made.compressed() if isinstance(made, Chosen) else made(residual)

    return make


def _can_go(copy: ComputeCopy, gradient: Tensor) -> bool:
    """Return whether a gradient can be sent: it is no part of a graph, and a step accepts it."""
    if gradient.requires_grad:
        return False
    try:
        check_gradient(copy.name, copy.parameter, gradient)
    except GradientError:
        return False
    return True
