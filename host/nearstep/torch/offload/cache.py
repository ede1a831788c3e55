"""Cache of parameters on the compute device, within a budget: the one used last is evicted
first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, MutableSet, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nearstep.torch.computation import is_in_backward
from nearstep.torch.device_gradient import DeviceGradient
from nearstep.torch.errors import EarlyUpdateError
from nearstep.torch.memferry.tracer import ModelTracer
from nearstep.torch.offload.compute_copy import ComputeCopy
from nearstep.torch.offload.errors import BudgetError, TransformError
from nearstep.torch.offload.ledger import Ledger
from nearstep.torch.offload.order import UseOrder
from nearstep.torch.offload.recording import Recording
from nearstep.torch.offload.shadow import Shadow
from nearstep.torch.offload.streams import Streams


@dataclass(kw_only=True)
class Counts:
    """Counters of transfers between owner and compute device.

    Attributes
    ----------
    fetches, prefetches : parameters fetched on use, and before use.
    releases : parameters freed on the compute device.
    updates : updates in backward.
    gradients : gradients sent to their owner.
    """

    fetches: int = 0
    prefetches: int = 0
    releases: int = 0
    gradients: int = 0
    updates: int = 0


class ParameterCache:
    """Memory of the compute device that parameters and their gradients share.

    Parameters
    ----------
    order : expected uses of parameters, by index.
    prefetches : whether parameters are fetched before they are used.
    streams : of the accelerator that layers compute on; None for the CPU.

    Attributes
    ----------
    closed : all parameters are on the compute device for good.
    sent : bytes of gradients in transfer, charged until the owner has them.
    shadow : memory of the parameters that a plan names, while a plan is in force.
    watch : tracer of the program's computation; the engine's own operations are hidden from the
        tracer.
    recording : notified of fetches, frees and computation, while a recording is open.
    torn : an exception has left an operation of the engine; `mend` before the next one.
    """

    def __init__(
        self,
        copies: Sequence[ComputeCopy],
        ledger: Ledger,
        order: UseOrder,
        *,
        prefetches: bool,
        streams: Streams | None = None,
    ) -> None:
        self.copies = copies
        self.ledger = ledger
        self.order = order
        self.counts = Counts()
        self.prefetches = prefetches
        self.closed = False
        self.streams = streams
        self.sent = 0
        self.torn = False
        self.recording = None
        self.spill: Callable[[], bool] = lambda: False
        self.give_up: Callable[[], bool] = lambda: False
        self.shadow: Shadow | None = None
        self.watch: ModelTracer | None = None
        self._direct: MutableSet[ComputeCopy] = set()  # read in place, so not charged
        self._present: MutableSet[ComputeCopy] = {copy for copy in copies if copy.present}
        self._by_storage: MutableMapping[int, ComputeCopy] = {}
        for copy in self._present:
            self._know(copy)
            copy.holds = copy.nbytes
        self._largest = max((copy.own_nbytes for copy in copies), default=0)
        self._reserve = self._largest_gradient
        ledger.add_parameter(sum(copy.nbytes for copy in self._present))

    @property
    def recording(self) -> Recording | None:
        return self._recording

    @recording.setter
    def recording(self, recording: Recording | None) -> None:
        self._recording = recording
        self.ledger.grown = None if recording is None else recording.grown

    @property
    def _largest_gradient(self) -> int:
        growing = (each.gradient_bytes for each in self.copies if each.parameter.requires_grad)
        return max(growing, default=0)

    def follow_plan(self, shadow: Shadow | None, budget: int) -> None:
        """Place parameters by a new plan, that is, by the `in_place` of each copy; call
        `release_all` before."""
        self.shadow = shadow
        self._reserve = self._largest_gradient
        self.bring_in_place()
        if shadow is not None:
            shadow.allocate(budget - self.ledger.used)
            self.ledger.add_parameter(shadow.nbytes)
            if self.streams is not None:
                self.streams.load_into(shadow.vector if shadow.nbytes else None)

    def free_vector(self) -> bool:
        """Evict all parameters in the vector of a plan and free the vector; return whether it was
        freed."""
        shadow = self.shadow
        if shadow is None or not shadow.nbytes:
            return False
        for copy in [each for each in self._present if not each.holds and each.can_go]:
            self.release(copy)
        nbytes = shadow.nbytes
        if not shadow.free():
            return False
        self.ledger.add_parameter(-nbytes)
        if self.streams is not None:
            self.streams.load_into(None)
        return True

    def rebind(self, copy: ComputeCopy) -> None:
        """Track the new memory of a present parameter."""
        before = copy.holds
        self._forget(copy)
        copy.binding = []
        copy.rebind()
        self._know(copy)
        if copy not in self._direct:
            copy.holds = copy.nbytes
            if copy.holds - before > self.ledger.free:
                self.free_vector()
            self.ledger.add_parameter(copy.holds - before)

    def follow(self, copy: ComputeCopy) -> None:
        """Switch to the parameter's new extent on the owner, if the optimizer has allocated one.

        Raises
        ------
        BudgetError
        """
        if copy.has_moved:
            with self.using([copy]):
                copy.move()

    def forget_memory(self) -> None:
        """Forget the memory of parameters, which all are plain."""
        self._by_storage.clear()
        for copy in self.copies:
            copy.leave_to_graphs()

    def leave(self, copies: Sequence[ComputeCopy]) -> None:
        """Forget parameters, before all others become plain."""
        self.copies = [each for each in self.copies if each not in copies]
        for copy in copies:
            copy.binding, copy.storage = [], None
            self._present.discard(copy)
            self._direct.discard(copy)

    def _know(self, copy: ComputeCopy) -> None:
        assert copy.storage is not None, "it is here"
        self._by_storage[copy.storage._cdata] = copy

    def _forget(self, copy: ComputeCopy) -> None:
        assert copy.storage is not None, "it is here"
        self._by_storage.pop(copy.storage._cdata, None)

    def owner_of(self, tensor: Tensor) -> ComputeCopy | None:
        """Return the parameter whose memory a plain tensor uses."""
        return self.owner_at(tensor.untyped_storage()._cdata)

    def owner_at(self, storage: int) -> ComputeCopy | None:
        """Return the parameter of a storage, by the address of torch's storage object."""
        return self._by_storage.get(storage)

    @contextmanager
    def using(self, copies: Sequence[ComputeCopy]) -> Iterator[None]:
        """Fetch parameters and pin them for the duration of the context.

        Raises
        ------
        BudgetError, CaptureError, EarlyUpdateError
        """
        if self.closed:
            yield
            return
        self.check_runs()
        if self.torn:
            self.mend()
        use = object()
        try:
            try:
                with self.aside():
                    self._pin(copies, use)
                if self.recording is not None:
                    self.recording.uses(copies, [each for each in copies if each in self._direct])
                yield
            finally:
                for copy in copies:
                    copy.pins.discard(use)
        except BaseException:
            self.torn = True
            for copy in copies:
                copy.pins.discard(use)
            raise

    def _pin(self, copies: Sequence[ComputeCopy], use: object) -> None:
        """Pin parameters for a use, and fetch those that are absent."""
        for copy in copies:
            self._switch(copy)
        for copy in copies:
            copy.pins.add(use)
        for copy in copies:
            self.check_old(copy, "it is used before optimizer.step()")
            self.order.used(copy.index, is_in_backward())
        for copy in copies:
            if not copy.present:
                self._fetch(copy)
                self.counts.fetches += 1
        if self.prefetches:
            self._prefetch()
        for copy in copies:
            copy.land()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the engine's operations in this `with` statement from all modes of torch."""
        try:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                if self.recording is not None:
                    self.recording.compute()
                yield
        except BaseException:
            self.torn = True
            raise

    def mend(self) -> None:
        """After an exception at any bytecode, as of Ctrl-C: derive what is present and what is
        charged from parameters, gradients and transfers as they are."""
        in_backward = is_in_backward()
        with self.aside():
            for copy in self.copies:
                copy.mend()
                if copy.present and copy not in self._direct and copy not in self._present:
                    if copy.can_go:
                        copy.release()
                    else:
                        self._present.add(copy)
                if not copy.present:
                    self._direct.discard(copy)
                if not copy.present or copy in self._direct:
                    self._present.discard(copy)
                in_vector = self.shadow is not None and self.shadow.has(copy)
                copy.holds = copy.nbytes if copy in self._present and not in_vector else 0
                if not in_backward:
                    copy.reserved = 0
                    copy.uses.clear()
                    if isinstance(copy.resident.held, DeviceGradient):  # has torch's in it
                        copy.set_raw_gradient(None)
                copy.counted = copy.charge(copy.raw_gradient())
            self._by_storage = {
                copy.storage._cdata: copy for copy in self.copies if copy.storage is not None
            }
            self.sent = self._departing
            self.ledger.parameters = sum(copy.holds for copy in self.copies)
            if self.shadow is not None:
                self.ledger.parameters += self.shadow.nbytes
            charged = sum(copy.reserved + copy.counted for copy in self.copies)
            self.ledger.gradients = self.sent + charged
            if self.ledger.free < 0:  # data assigned to a parameter of the vector
                self.free_vector()
        self.torn = False

    def reap(self) -> None:
        """Stop charging gradients whose transfer has ended."""
        if self.streams is not None:
            self.streams.reap()

    def check_runs(self) -> None:
        """Raise `CaptureError` while the stream is captured into a graph, and `TransformError` in a
        tracer, an export, or a transform other than vmap."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            for each in torch._C._functorch.get_interpreter_stack() or ():
                if each.key() != torch._C._functorch.TransformType.Vmap:
                    raise TransformError(f"torch.func ({each.key().name})")
        if torch._C._get_tracing_state() is not None:
            raise TransformError("torch.jit.trace")
        if torch.compiler.is_exporting():
            raise TransformError("torch.export")
        if self.streams is not None:
            self.streams.check_runs()

    def end_sending(self) -> None:
        """Wait for all downloads of gradients."""
        if self.streams is not None:
            self.streams.finish()

    def land_all(self) -> None:
        """Complete all fetches that were begun."""
        for copy in list(self._present):
            copy.land()

    def check_old(self, copy: ComputeCopy, reason: str) -> None:
        """Raise `EarlyUpdateError` if backward has updated the parameter since the last
        `step()`."""
        if copy.updated and self.give_up():
            raise EarlyUpdateError(copy.name, reason)

    def make_room(self, nbytes: int, what: str, hint: str = "") -> None:
        """Evict parameters until `nbytes` are free.

        Raises
        ------
        BudgetError : parameters in use and `nbytes` exceed the budget.
        """
        self.reap()
        while self._soon_free < nbytes:
            victim = self._victim()
            if victim is not None:
                self.release(victim)
            elif self._departing:
                self._wait_for_room()
            elif not (self.spill() or self.free_vector()):
                stay = [copy.name for copy in self._present if not copy.pins and copy.is_aliased]
                if stay:
                    hint += f"; in memory that something refers to: {', '.join(sorted(stay))}"
                needed, budget = self.ledger.used + nbytes, self.ledger.budget
                total = sum(copy.nbytes for copy in self.copies)
                raise BudgetError(what, needed, budget, hint, parameters=total)
        while self.ledger.free < nbytes:
            self._wait_for_room()

    def make_room_for_other(self, copy: ComputeCopy, nbytes: int) -> None:
        """Make room for new memory of a present parameter.

        Raises
        ------
        BudgetError
        """
        if copy in self._direct or self.closed:
            return
        more, shadow = nbytes - copy.holds, self.shadow
        with self.aside():
            try:
                self.make_room(more, f"other memory of {copy.name}")
            except BudgetError:
                # The vector can be freed once this parameter, the last one in it, has other memory.
                if shadow is None or not shadow.has_only(copy):
                    raise
                if more > self.ledger.free + shadow.nbytes:
                    raise

    def _wait_for_room(self) -> None:
        """Wait until the oldest download has ended."""
        assert self.streams is not None, "something departs"
        self.streams.wait_for_room()

    @property
    def _soon_free(self) -> int:
        """Bytes free once running downloads have ended, except those allowed to overlap
        (`_on_their_way`)."""
        return self.ledger.free + max(0, self._departing - self._on_their_way)

    @property
    def _on_their_way(self) -> int:
        """Bytes of downloads that may run without anyone waiting: the gradients made at once, if
        two parameters fit in the budget besides."""
        if self.streams is None and self.recording is None:
            return 0
        left = self.ledger.budget - 2 * self._reserve
        return self._reserve if left >= 2 * self._largest else 0

    @property
    def _new_gradients(self) -> int:
        """Bytes of gradients that are not in transfer."""
        return self.ledger.gradients - self.sent

    @property
    def _gradient_room(self) -> int:
        """Bytes to keep free for gradients to be made and for gradients in transfer."""
        made = max(0, self._reserve - self._new_gradients)
        return made + max(0, self._on_their_way - self.sent)

    @property
    def _departing(self) -> int:
        """Bytes charged until downloads have ended."""
        return 0 if self.streams is None else self.streams.departing_bytes

    def reserve(self, nbytes: int, what: str) -> None:
        """Charge a gradient before backward makes it; call it in `aside`.

        Raises
        ------
        BudgetError
        """
        self.make_room(nbytes, what)
        self.ledger.add_gradient(nbytes)
        self._reserve = max(self._reserve, self._new_gradients)

    def release(self, copy: ComputeCopy) -> None:
        """Free a present parameter, whether or not `can_go`; send it to the owner first if it was
        changed."""
        cdata = copy.storage._cdata if copy.storage is not None else 0
        copy.release()
        self.counts.releases += 1
        self._by_storage.pop(cdata, None)
        if copy in self._direct:
            self._direct.discard(copy)
            return
        self._present.discard(copy)
        nbytes, copy.holds = copy.holds, 0
        self.ledger.add_parameter(-nbytes)
        if self.recording is not None:
            self.recording.freed(copy, nbytes)

    def released(self, copy: ComputeCopy) -> bool:
        """Free a parameter if `can_go`; return whether it is absent."""
        if copy.can_go:
            self.release(copy)
        return not copy.present

    def release_all(self) -> Sequence[ComputeCopy]:
        """Free all parameters that can be freed and are not in place; return those still
        present."""
        for copy in [each for each in self.copies if each.can_go and each not in self._direct]:
            self.release(copy)
        return [copy for copy in self.copies if copy.present]

    def bring_in_place(self) -> None:
        """Put the parameters that forward reads in place into host memory."""
        for copy in self.copies:
            if copy.in_place.forward and copy not in self._direct:
                self._put_in_place(copy)

    def _put_in_place(self, copy: ComputeCopy) -> None:
        if copy.can_go:
            self.release(copy)
        if not copy.present:
            memory = None if self.shadow is None else self.shadow.on_host(copy)
            copy.fetch(streams=self.streams, direct=True, memory=memory)
            self._know(copy)
        elif copy in self._present:  # its memory is in use, so it is not moved
            if self.streams is not None:
                return  # in memory of the accelerator
            copy.land()
            self._direct.add(copy)
            self._present.discard(copy)
            self.ledger.add_parameter(-copy.holds)
            copy.holds = 0
        self._direct.add(copy)

    def leave_places(self) -> None:
        """Free all parameters in place that can be freed."""
        for copy in [each for each in self.copies if each in self._direct and each.can_go]:
            self.release(copy)

    def _switch(self, copy: ComputeCopy) -> None:
        """Before a use: put a parameter in place, or free it so that it is fetched, as its
        `in_place` says."""
        in_backward = is_in_backward()
        if copy.in_place.backward if in_backward else copy.in_place.forward:
            if copy not in self._direct and not copy.pins:
                self._put_in_place(copy)
        elif copy in self._direct and copy.can_go:
            self.release(copy)

    def _fetch(self, copy: ComputeCopy) -> None:
        if not self._has_place(copy):
            self.make_room(copy.nbytes, copy.name)
        holds = 0 if self._has_place(copy) else copy.nbytes
        memory = None if self.shadow is None else self.shadow.in_vector(copy)
        begun = 0 if self.recording is None else self.recording.now
        copy.fetch(self.streams, memory=memory)
        self._know(copy)
        self._present.add(copy)
        copy.holds = holds
        self.ledger.add_parameter(holds)
        if self.recording is not None:
            self.recording.fetched(copy, begun)

    def _has_place(self, copy: ComputeCopy) -> bool:
        """Return whether a fetch needs no memory besides the vector of a plan."""
        return self.shadow is not None and self.shadow.has_room(copy)

    def _victim(self) -> ComputeCopy | None:
        distance = self.order.distance
        ordered = sorted(self._present, key=lambda each: (-distance(each.index), each.index))
        return next((copy for copy in ordered if copy.holds and copy.can_go), None)

    def _prefetch(self) -> None:
        """Fetch the next parameters in order of use, while there is room or a parameter used later
        can be evicted; in backward, keep as much room for gradients as they needed before.

        Parameters that forward reads in place are fetched for backward, in backward's order, after
        their last use in forward."""
        if len(self._present) == len(self.copies) or not self.order.is_known:
            return
        in_backward = is_in_backward()
        distance = self.order.distance
        trains = in_backward or torch.is_grad_enabled()
        ahead: set[int] = set()  # uses in forward
        for index, later in self.order.upcoming():
            copy = self.copies[index]
            if not later:
                ahead.add(index)
            if copy.present and copy not in self._direct:
                continue
            if copy.in_place.forward:
                if copy.in_place.backward or not (later and trains):
                    continue
                if index in ahead or copy.pins:
                    return  # in the order of backward
                if copy.present and not copy.can_go:
                    continue
            again = self.recording is not None and self.order.was_used(index)  # then in backward
            reserve = self._gradient_room if in_backward or again else 0
            needed = 0 if self._has_place(copy) else copy.nbytes + reserve
            while self._soon_free < needed:
                victim = self._victim()
                if victim is None or distance(victim.index) <= distance(index):
                    return
                self.release(victim)
            if self.ledger.free < needed:
                return  # not yet
            if copy in self._direct:
                self.release(copy)
            self._fetch(copy)
            self.counts.prefetches += 1
