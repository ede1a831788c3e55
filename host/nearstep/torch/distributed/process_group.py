"""A process group of `torch.distributed` whose collectives go through COARSE's memory devices."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from nearstep.coarse.routing import RoutingTable
from nearstep.coarse.service.client import PROFILED_BYTES, Client
from nearstep.coarse.service.errors import JobError
from nearstep.coarse.service.messages import Operation
from nearstep.errors import ArgumentError
from nearstep.torch.distributed.exchanges import Exchanges
from nearstep.torch.distributed.fallback import Gloo
from nearstep.torch.distributed.moves import Moves
from nearstep.torch.distributed.tensors import (
    check_parts,
    flat,
    lists_of,
    operation_of,
    options_of,
    ring_operation,
    root_of,
    tensors_of,
)
from nearstep.torch.distributed.untraced import untraced
from nearstep.torch.distributed.work import CoarseWork

HELD_WORKS = 1024
"""At most, that nobody has asked for yet: DDP's `join` asks for one late."""


@untraced
class CoarseProcessGroup(dist.ProcessGroup):
    """Collectives of one group of processes.

    Sums, averages and maxima of float32, bfloat16 and float16 go through the rings of the devices;
    what moves bytes (broadcast, gathers, scatters, all-to-all, send and recv) goes through the
    devices' memory. Sums of other types and other operations have no ring: gloo carries them out,
    with a `GlooFallbackWarning`.

    Parameters
    ----------
    client : of the service; it belongs to the group from here on.
    store : of the group, for gloo.
    timeout : of each collective.
    wire : format on the links of the devices.
    release : called when the group is gone.

    Attributes
    ----------
    exchanges : where and how tensors go to the devices.
    gloo : groups of the same processes.
    ring_bytes : of tensors that were summed in the rings.

    Ref: COARSE paper, sections III-D and IV-B.
    """

    def __init__(
        self,
        client: Client,
        store: Store,
        timeout: timedelta,
        *,
        wire: str = "fp32",
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(client.rank, client.clients)
        self.client = client
        self.ring_bytes = 0
        self._release = release
        self.exchanges = Exchanges(client, wire)
        self._moves = Moves(client)
        self._executor = ThreadPoolExecutor(1, "coarse collectives")
        self._seekers = ThreadPoolExecutor(1, "coarse recv of any source")
        self._seeking: dict[int, int] = defaultdict(int)
        self.gloo = Gloo(store, client.rank, client.clients, timeout)
        self._number = 0
        self._numbers: dict[tuple[int, int, int], int] = defaultdict(int)
        self._held: list[CoarseWork] = []
        self._sums = 0
        self._failure: JobError | None = None
        self._closed = False

    @property
    def group_name(self) -> str:
        """torch's name of the group; one that torch does not know has the name of its job."""
        name: str = dist.distributed_c10d._world.pg_names.get(self, self.client.job)
        return name

    def getBackendName(self) -> str:
        return "coarse"

    @property
    def supports_splitting(self) -> bool:
        return False

    def getSize(self) -> int:
        return self.client.clients

    def getRank(self) -> int:
        return self.client.rank

    def setTimeout(self, timeout: timedelta) -> None:
        """Bound of what is begun from here on."""
        self.client.timeout_s = timeout.total_seconds()

    set_timeout = setTimeout

    # torch has some collectives twice: with lists and options, and with one tensor, where the
    # options are a reduction or a root. Of a group written in Python both come to one method.

    def allreduce(
        self, tensors: Sequence[Tensor] | Tensor, opts: Any = None, timeout: Any = None
    ) -> CoarseWork:
        operation, tensors = operation_of(opts), tensors_of(tensors)

        def action() -> None:
            for each in tensors:
                self._reduce(each, each, operation)

        return self._submit("all_reduce", tensors, action)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> CoarseWork:
        return self.allreduce(tensors, opts)

    def reduce(
        self, tensors: Sequence[Tensor] | Tensor, opts: Any, op: Any = None, timeout: Any = None
    ) -> CoarseWork:
        root, tensors = root_of(opts), tensors_of(tensors)
        operation = operation_of(opts if hasattr(opts, "reduceOp") else op)

        def action() -> None:
            for each in tensors:
                out = each if self.client.rank == root else None
                self._reduce(each, out, operation)

        return self._submit("reduce", tensors, action)

    def reduce_scatter(
        self,
        outputs: Sequence[Tensor] | Tensor,
        inputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        opts: Any = None,
        timeout: Any = None,
    ) -> CoarseWork:
        operation, outputs, lists = operation_of(opts), tensors_of(outputs), lists_of(inputs)

        def action() -> None:
            for output, parts in zip(outputs, lists, strict=True):
                self._reduce_scatter(output, parts, operation)

        return self._submit("reduce_scatter", outputs, action)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> CoarseWork:
        operation = operation_of(opts)
        check_parts(output, given, self.client.clients)

        def action() -> None:
            self._reduce_scatter(output, [given], operation)

        return self._submit("reduce_scatter", output, action)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> CoarseWork:
        operation = operation_of(opts)

        def action() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, [given], operation)

        return self._submit("reduce_scatter", outputs, action)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def broadcast(
        self, tensors: Sequence[Tensor] | Tensor, opts: Any, timeout: Any = None
    ) -> CoarseWork:
        root, key, tensors = root_of(opts), self._key("broadcast"), tensors_of(tensors)

        def action() -> None:
            for index, each in enumerate(tensors):
                self._moves.broadcast(f"{key}/{index}", each, root)

        return self._submit("broadcast", tensors, action)

    def allgather(
        self,
        outputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        inputs: Sequence[Tensor] | Tensor,
        opts: Any = None,
    ) -> CoarseWork:
        key, lists, inputs = self._key("all_gather"), lists_of(outputs), tensors_of(inputs)

        def action() -> None:
            for index, (places, given) in enumerate(zip(lists, inputs, strict=True)):
                self._moves.gather_all(f"{key}/{index}", places, given)

        return self._submit("all_gather", outputs, action)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> CoarseWork:
        check_parts(given, output, self.client.clients)
        key = self._key("all_gather")

        def action() -> None:
            self._moves.gather_single(key, output, given)

        return self._submit("all_gather", output, action)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> CoarseWork:
        key = self._key("all_gather")

        def action() -> None:
            for index, (output, given) in enumerate(zip(outputs, inputs, strict=True)):
                self._moves.gather_single(f"{key}/{index}", output, given)

        return self._submit("all_gather", outputs, action)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> CoarseWork:
        # Here it is one list of outputs for each rank, not for each input.
        places = [list(each) for each in zip(*outputs, strict=True)]
        return self.allgather(places, inputs, opts)

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        inputs: Sequence[Tensor] | Tensor,
        opts: Any,
        timeout: Any = None,
    ) -> CoarseWork:
        root, key, rank = root_of(opts), self._key("gather"), self.client.rank
        lists, inputs = lists_of(outputs), tensors_of(inputs)

        def action() -> None:
            self._moves.gather(key, lists[0] if rank == root else [], inputs[0], root)

        return self._submit("gather", outputs, action)

    def scatter(
        self,
        outputs: Sequence[Tensor] | Tensor,
        inputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        opts: Any,
        timeout: Any = None,
    ) -> CoarseWork:
        root, key, rank = root_of(opts), self._key("scatter"), self.client.rank
        outputs, lists = tensors_of(outputs), lists_of(inputs)

        def action() -> None:
            self._moves.scatter(key, outputs[0], lists[0] if rank == root else [], root)

        return self._submit("scatter", outputs, action)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> CoarseWork:
        key = self._key("all_to_all")
        return self._submit(
            "all_to_all", outputs, lambda: self._moves.exchange_all(key, outputs, inputs)
        )

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> CoarseWork:
        key, size = self._key("all_to_all"), self.client.clients
        outputs = torch.split(output, list(output_sizes) or output.shape[0] // size)
        inputs = torch.split(given, list(input_sizes) or given.shape[0] // size)
        return self._submit(
            "all_to_all", output, lambda: self._moves.exchange_all(key, outputs, inputs)
        )

    alltoall_base = all_to_all_single

    def route(self, table: RoutingTable | None, shard_bytes: int | None = None) -> CoarseWork:
        """Push by a table from here on; see `Exchanges.route`. All processes call it.

        Where a process pushes to decides the order of additions, so bits change with tables.
        """
        return self._submit("route", [], lambda: self.exchanges.route(table, shard_bytes))

    def measure_routing(self, every: int = 0, sizes: Sequence[int] = PROFILED_BYTES) -> CoarseWork:
        """Measure the ways to all devices now, push by the result, and so again after `every` sums.

        All processes call it. What was measured is `client.routing` and `exchanges.shard_bytes`;
        given to `route`, these make the same bits again.

        Parameters
        ----------
        every : 0: only now.
        sizes : bytes that are measured, as for `Client.profile`.

        Ref: COARSE paper, section III-E.
        """

        def action() -> None:
            self.exchanges.keep_measuring(every, sizes)
            if not every:
                self.exchanges.measure()

        return self._submit("measure_routing", [], action)

    def barrier(self, opts: Any = None) -> CoarseWork:
        return self._submit("barrier", [], self.client.barrier)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self.barrier().wait(timeout or timedelta(0))

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> CoarseWork:
        key = self._key_between(self.client.rank, rank, tag)
        return self._begin("send", tensors, lambda: self._moves.put(key, tensors[0], 1))

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> CoarseWork:
        if self._seeking[tag]:
            raise ArgumentError(f"a recv of any source with tag {tag} is under way: await it first")
        key = self._key_between(rank, self.client.rank, tag)
        return self._begin("recv", tensors, lambda: self._moves.get(key, tensors[0]))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> CoarseWork:
        """Receive from whoever sends first; of those that have sent, from the lowest rank.

        Raises
        ------
        ArgumentError : when a `recv` with a source begins before this one has ended.
        """
        work = CoarseWork("recv", tensors)

        def action() -> None:
            rank = self.client.rank
            peers = [each for each in range(self.client.clients) if each != rank]
            keys = [self._name_between(each, rank, tag) for each in peers]
            try:
                source = peers[keys.index(self.client.seek(keys))]
                self._moves.get(self._key_between(source, rank, tag), tensors[0])
                work._source = source
            finally:
                self._seeking[tag] -= 1

        self._seeking[tag] += 1
        self._hold(work)
        self._seekers.submit(work.run, partial(self._carry_out, action))
        return work

    def shutdown(self) -> None:
        """End: what is under way is carried out first. Ending twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._executor.shutdown(wait=True)
        self._seekers.shutdown(wait=False)  # nobody may ever send
        self.client.close()
        self._release()

    def abort(self) -> None:
        """End at once: what is under way fails."""
        if not self._closed:
            self.client.close(leave=False)
        self.shutdown()

    def carry_out(self, what: str, action: Callable[[], None]) -> None:
        """Do something with the client, in the order of the program, and wait for its end.

        Raises
        ------
        Exception : that of `action`.
        """
        self._submit(what, [], action).wait()

    def _submit(self, what: str, result: Any, action: Callable[[], None]) -> CoarseWork:
        """Carry out in the order of the program, in the thread of the group."""
        work = self._hold(CoarseWork(what, result))
        self._executor.submit(work.run, partial(self._carry_out, action))
        return work

    def _carry_out(self, action: Callable[[], None]) -> None:
        """A collective that has failed, or was not waited for to its end, is the last one: the
        processes would not be at the same one any more."""
        if self._failure is not None:
            kind = type(self._failure)
            raise kind(str(self._failure), self._failure.ranks, self._failure.devices)
        try:
            action()
        except JobError as error:
            self._failure = error
            self.client.close(leave=False)  # so that the others do not wait for this one
            raise

    def _begin(self, what: str, result: Any, action: Callable[[], None]) -> CoarseWork:
        """Carry out in a thread of its own: it may wait for another one of this process."""
        work = self._hold(CoarseWork(what, result))
        carried = partial(self._carry_out, action)
        threading.Thread(target=work.run, args=(carried,), name=f"coarse {what}").start()
        return work

    def _hold(self, work: CoarseWork) -> CoarseWork:
        """Keep it until it is over: if torch alone had it, it would be no work of Python's."""
        kept = [each for each in self._held if not each.is_over]
        self._held = [*kept[-HELD_WORKS:], work]
        return work

    def _key(self, what: str) -> str:
        """A name that is the same in all processes: they call collectives in the same order."""
        self._number += 1
        return f"{what}/{self._number}"

    def _key_between(self, source: int, destination: int, tag: int) -> str:
        key = self._name_between(source, destination, tag)
        self._numbers[source, destination, tag] += 1
        return key

    def _name_between(self, source: int, destination: int, tag: int) -> str:
        """That of the next message."""
        number = self._numbers[source, destination, tag] + 1
        return f"send/{source}/{destination}/{tag}/{number}"

    def _reduce(self, given: Tensor, out: Tensor | None, operation: Any) -> None:
        """All clients' tensors, to `out` where there is one."""
        name = ring_operation(given, operation) if self.client.clients > 1 else None
        if name is None:
            taken = given.contiguous().clone() if out is not given else given
            self.gloo.fallback("all_reduce", given.dtype, operation).allreduce(
                [taken], options_of(operation)
            ).wait()
            if out is not None and out is not taken:
                out.copy_(taken)
            return
        source = given.contiguous().view(-1)
        target = None if out is None else flat(out)

        def take(start: int, stop: int, values: Tensor) -> None:
            if target is not None:
                target[start:stop].copy_(values)

        self._sum(source, name, take)
        if out is not None and target is not None and not out.is_contiguous():
            out.copy_(target.view(out.shape))

    def _reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], operation: Any) -> None:
        name = ring_operation(output, operation) if self.client.clients > 1 else None
        source = torch.cat([each.reshape(-1) for each in parts]) if len(parts) > 1 else parts[0]
        source = source.contiguous().view(-1)
        own = self.client.rank * output.numel()
        if name is None:
            taken = source.clone()
            self.gloo.fallback("reduce_scatter", output.dtype, operation).allreduce(
                [taken], options_of(operation)
            ).wait()
            output.copy_(taken[own : own + output.numel()].view(output.shape))
            return
        target = flat(output)

        def take(start: int, stop: int, values: Tensor) -> None:
            low, high = max(start, own), min(stop, own + target.numel())
            if low < high:
                target[low - own : high - own].copy_(values[low - start : high - start])

        self._sum(source, name, take)
        if not output.is_contiguous():
            output.copy_(target.view(output.shape))

    def _sum(
        self, source: Tensor, operation: Operation, take: Callable[[int, int, Tensor], None]
    ) -> None:
        """Sum through the rings of the devices."""
        if not source.numel():
            return
        self._sums += 1
        kind = str(source.dtype).removeprefix("torch.")
        exchange = self.exchanges.take(source.numel(), operation, kind, self._sums)
        exchange.run(
            lambda part, start, stop: torch.from_numpy(part).copy_(source[start:stop]),
            lambda part, start, stop: take(start, stop, torch.from_numpy(part)),
            turn=self._sums,
        )
        self.ring_bytes += 4 * source.numel()
