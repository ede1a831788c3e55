"""A process group of `torch.distributed` that reduces on COARSE's memory devices."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ScatterOptions,
    Store,
)
from torch.utils._pytree import tree_leaves, tree_map

from nearstep.coarse.errors import ExactSumError
from nearstep.coarse.pool import EXACT
from nearstep.coarse.routing import RoutingTable
from nearstep.coarse.service.client import PROFILED_BYTES, Client
from nearstep.coarse.service.errors import JobError, UnsharedError
from nearstep.coarse.service.messages import ReduceOpName
from nearstep.torch.distributed.exchanges import Exchanges
from nearstep.torch.distributed.fallback import NATIVE, Gloo
from nearstep.torch.distributed.tensors import (
    RING_DTYPES,
    TensorsError,
    check_list,
    check_parts,
    dense,
    flat,
    lists_of,
    operation_of,
    ring_operation,
    root_of,
    tensors_of,
    with_root,
)
from nearstep.torch.distributed.untraced import untraced
from nearstep.torch.distributed.work import CoarseWork, Lane, StridedReceive, begin, join

GATHER_BYTES = 1 << 20
"""Least size of an all-gather's result through the service's memory, in bytes: gloo takes less time
for smaller ones."""

HELD_WORKS = 1024
"""Maximum number of works kept although not yet waited for: DDP's `join` waits late."""


OPEN: weakref.WeakSet[CoarseProcessGroup] = weakref.WeakSet()
"""Groups that have not ended."""


@untraced
class CoarseProcessGroup(dist.ProcessGroup):
    """Collectives of one group of processes.

    Sums, averages and maxima of float32, bfloat16 and float16 use the rings of the devices, and
    all-gathers into one tensor memory that the service shares with all processes. Gloo moves other
    bytes (broadcast, gathers of lists, scatters, all-to-all, send and recv), and does other
    reductions with a `GlooFallbackWarning`.

    Parameters
    ----------
    connect : makes the client of the service, in a background thread; the group closes it.
    job : name of the group's job at the service.
    store : the group's store, for gloo.
    timeout : limit of each collective.
    wire : format on the links of the devices.
    exact : whether sums and averages are exact, as of `Exchanges`.
    release : called when the group has ended.

    Attributes
    ----------
    exchanges : cache and routing of the group's exchanges.
    gloo : gloo's group of the same processes.
    ring_bytes : bytes summed by the rings, in float32.
    gathered_bytes : bytes of results gathered through the service's memory.

    Ref: COARSE paper, sections III-D and IV-B.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        job: str,
        rank: int,
        size: int,
        store: Store,
        timeout: timedelta,
        *,
        wire: str = "fp32",
        exact: bool = False,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(rank, size)
        self.job = job
        self._rank, self._size = rank, size
        self.ring_bytes = self.gathered_bytes = 0
        self._gathers = True
        self._release = release
        self._connected: Future[Client] = Future()
        self.exchanges = Exchanges(self._connected.result, wire)
        self.exchanges.exact = exact
        self._store, self._timeout = store, timeout
        self._gloos: weakref.WeakSet[Gloo] = weakref.WeakSet()
        self._gloos_made = 0
        self.gloo = self.make_gloo()
        self._lane = Lane("coarse collectives")
        left = self._lane, self._connected, release
        self._finalizer = Finalize(self, _end, (weakref.ref(self), *left), exitpriority=0)
        self._held: list[CoarseWork] = []
        self._sums = 0
        self._failure: JobError | None = None
        self._closed: JobError | None = None
        threading.Thread(
            target=_connect, args=(connect, self._connected), name="coarse connect", daemon=True
        ).start()
        OPEN.add(self)

    @property
    def client(self) -> Client:
        """The client of the service; waits until all processes are connected."""
        return self._connected.result()

    def wait_until_connected(self) -> None:
        """Wait until all processes are connected; raise the error if they cannot be."""
        self._connected.result()

    def make_gloo(self) -> Gloo:
        """Make another group of gloo; all processes make theirs in the same order."""
        place = PrefixStore(f"gloo/{self._gloos_made}", self._store)
        made = Gloo(place, self._rank, self._size, self._timeout)
        self._gloos_made += 1
        self._gloos.add(made)
        return made

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices of the group's tensors; read by torch, as in `async_save`."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> CoarseProcessGroup:
        """Return the group itself: torch asks a backend for its timeout and memory, as FSDP2 with
        `set_allocate_memory_from_process_group_for_comm`."""
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    @property
    def group_name(self) -> str:
        """torch's name of the group, or the name of its job if torch does not know the group."""
        name: str = dist.distributed_c10d._world.pg_names.get(self, self.job)
        return name

    def getBackendName(self) -> str:
        return "coarse"

    @property
    def supports_splitting(self) -> bool:
        return False

    def getSize(self) -> int:
        return self._size

    def getRank(self) -> int:
        return self._rank

    @property
    def timeout_s(self) -> float:
        """Limit of each collective, in seconds."""
        return self._timeout.total_seconds()

    def setTimeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives."""
        self.client.timeout_s = timeout.total_seconds()
        self._timeout = timeout
        for each in list(self._gloos):
            each.group._set_default_timeout(timeout)

    set_timeout = setTimeout

    # torch has two forms of some collectives: with lists and options, and with one tensor, where
    # the options are a reduction or a root. A group written in Python gets both in one method.

    def allreduce(
        self, tensors: Sequence[Tensor] | Tensor, opts: Any = None, timeout: Any = None
    ) -> CoarseWork:
        operation, values = operation_of(opts), tensors_of(tensors)

        def action() -> None:
            for each in values:
                self._reduce(each, each, operation)

        return self._submit("all_reduce", tensors, action, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> CoarseWork:
        return self.allreduce(tensors, opts)

    def reduce_addends(self, addends: Tensor, out: Tensor, op: ReduceOpName = "sum") -> CoarseWork:
        """Reduce the rows of all processes' tensors exactly, each of them an addend.

        The result is rounded once. It depends on the rows alone, and not on the number of processes
        that they are divided among.

        Parameters
        ----------
        addends : float32, bfloat16 or float16; of shape (rows, ...), with as many rows in all
            processes; a row has the shape of `out`, and its dtype.
        out : result.
        op : `sum`, or `average`: the sum divided by the number of all rows.

        Raises
        ------
        TensorsError : other shapes or dtypes, or no row.
        ExactSumError : another `op`, or, by `wait`, more than 1024 rows in all processes.
        """
        if op not in EXACT:
            raise ExactSumError("op", " or ".join(EXACT), repr(op))
        if addends.dtype not in RING_DTYPES or addends.shape[1:] != out.shape or not len(addends):
            raise TensorsError(
                f"addends must be rows of {tuple(out.shape)} of float32, bfloat16 or float16, not "
                f"{tuple(addends.shape)} of {addends.dtype}"
            )
        check_parts(out, addends.data, len(addends))
        rows, target = dense(addends.data).view(len(addends), -1), flat(out.data)

        def take(start: int, stop: int, values: Tensor) -> None:
            target[start:stop].copy_(values)

        def action() -> None:
            self._sum(rows if len(rows) > 1 else rows[0], op, take, len(rows))
            if not out.is_contiguous():
                out.data.copy_(target.view(out.shape))

        return self._submit("reduce_addends", out, action)

    def reduce(
        self, tensors: Sequence[Tensor] | Tensor, opts: Any, op: Any = None, timeout: Any = None
    ) -> CoarseWork:
        root, values = root_of(opts), tensors_of(tensors)
        operation = operation_of(opts if hasattr(opts, "reduceOp") else op)

        def action() -> None:
            for each in values:
                out = each if self._rank == root else None
                self._reduce(each, out, operation)

        return self._submit("reduce", tensors, action, opts)

    def reduce_scatter(
        self,
        outputs: Sequence[Tensor] | Tensor,
        inputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        opts: Any = None,
        timeout: Any = None,
    ) -> CoarseWork:
        operation = operation_of(opts)
        pairs = list(zip(tensors_of(outputs), lists_of(inputs), strict=True))
        for output, parts in pairs:
            check_list(parts, self._size, output)

        def action() -> None:
            for output, parts in pairs:
                self._reduce_scatter(output, parts, operation)

        return self._submit("reduce_scatter", outputs, action, opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> CoarseWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> CoarseWork:
        operation = operation_of(opts)
        pairs = list(zip(tensors_of(outputs), tensors_of(inputs), strict=True))
        for output, given in pairs:
            check_parts(output, given, self._size)

        def action() -> None:
            for output, given in pairs:
                self._reduce_scatter(output, [given], operation)

        return self._submit("reduce_scatter", outputs, action, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def broadcast(
        self, tensors: Sequence[Tensor] | Tensor, opts: Any, timeout: Any = None
    ) -> CoarseWork:
        calls = [([each], None) for each in tensors_of(tensors)]
        return self._move("broadcast", tensors, calls, with_root(BroadcastOptions(), opts))

    def allgather(
        self,
        outputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        inputs: Sequence[Tensor] | Tensor,
        opts: Any = None,
    ) -> CoarseWork:
        pairs = zip(lists_of(outputs), tensors_of(inputs), strict=True)
        return self._move("allgather", outputs, [([places], [given]) for places, given in pairs])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> CoarseWork:
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> CoarseWork:
        pairs = list(zip(tensors_of(outputs), tensors_of(inputs), strict=True))
        for output, given in pairs:
            check_parts(given, output, self._size)

        def action() -> None:
            for output, given in pairs:
                self._gather(output, given)

        return self._submit("all_gather", outputs, action, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> CoarseWork:
        # Here there is one list of outputs for each rank, not for each input.
        places = [list(each) for each in zip(*outputs, strict=True)]
        return self.allgather(places, inputs, opts)

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        inputs: Sequence[Tensor] | Tensor,
        opts: Any,
        timeout: Any = None,
    ) -> CoarseWork:
        options = with_root(GatherOptions(), opts)
        places = lists_of(outputs)[:1] if self._rank == options.rootRank else []
        return self._move("gather", outputs, [(places, tensors_of(inputs))], options)

    def scatter(
        self,
        outputs: Sequence[Tensor] | Tensor,
        inputs: Sequence[Sequence[Tensor]] | Sequence[Tensor],
        opts: Any,
        timeout: Any = None,
    ) -> CoarseWork:
        options = with_root(ScatterOptions(), opts)
        parts = lists_of(inputs)[:1] if self._rank == options.rootRank else []
        return self._move("scatter", outputs, [(tensors_of(outputs), parts)], options)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> CoarseWork:
        return self._move("alltoall", outputs, [(tensors_of(outputs), tensors_of(inputs))])

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> CoarseWork:
        call = output.data, given.data
        return self._move("alltoall_base", output, [call], output_sizes, input_sizes)

    alltoall_base = all_to_all_single

    def route(self, table: RoutingTable | None, shard_bytes: int | None = None) -> CoarseWork:
        """Push by a routing table from now on; see `Exchanges.route`; all processes call it.

        The routing determines the order of additions, so results change with tables.
        """
        return self._submit("route", [], lambda: self.exchanges.route(table, shard_bytes))

    def measure_routing(self, every: int = 0, sizes: Sequence[int] = PROFILED_BYTES) -> CoarseWork:
        """Measure transfers to all devices, route by the result, and repeat after every `every`
        sums.

        All processes call this method. The results are `client.routing` and
        `exchanges.shard_bytes`; `route` with them reproduces the same bits.

        Parameters
        ----------
        every : sums between measurements, of which the first is before the next sum; 0: measure
            once, now.
        sizes : sizes in bytes, as for `Client.profile`.

        Ref: COARSE paper, section III-E.
        """

        def action() -> None:
            self.exchanges.keep_measuring(every, sizes)
            if not every:
                self.exchanges.measure()

        return self._submit("measure_routing", [], action)

    def barrier(self, opts: Any = None) -> CoarseWork:
        return self._submit("barrier", [], self.client.barrier, opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self.barrier().wait(timeout or timedelta(0))

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        return self.gloo.group.send([dense(each) for each in tensors_of(tensors)], rank, tag)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        return self._receive(tensors, lambda given: self.gloo.group.recv(given, rank, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Any:
        return self._receive(tensors, lambda given: self.gloo.group.recv_anysource(given, tag))

    def _receive(self, tensors: Sequence[Tensor], receive: Callable[[list[Tensor]], Any]) -> Any:
        """Return gloo's work, or one that copies what was received to a strided tensor."""
        (place,) = tensors_of(tensors)
        given = dense(place)
        received = receive([given])
        return received if place.is_contiguous() else StridedReceive(received, given, place)

    def shutdown(self) -> None:
        """Close the group after pending collectives have ended. Further calls do nothing."""
        self._end(leave=True)

    def abort(self) -> None:
        """Close the group at once: pending collectives fail."""
        if self._closed is None:
            self._disconnect(leave=False)
        self._end(leave=False)

    def end_with_the_process(self) -> None:
        """Close the group; pending collectives fail, since other processes may never take part."""
        if self._connected.done() and all(each.is_completed() for each in self._held):
            self.shutdown()
        else:
            self.abort()

    def _end(self, *, leave: bool) -> None:
        if self._closed is not None:
            return
        self._closed = JobError("the process group was closed")
        self._lane.close()
        self._disconnect(leave=leave)
        self._held.clear()
        self.exchanges.forget()
        OPEN.discard(self)
        self._finalizer.cancel()
        self._release()

    def _disconnect(self, *, leave: bool) -> None:
        """Close the client and gloo, or prevent their creation."""
        closed = JobError("the process group was closed")
        with contextlib.suppress(InvalidStateError):
            self._connected.set_exception(closed)
        for each in list(self._gloos):
            each.close(closed)
        if self._connected.exception() is None:
            self._connected.result().close(leave=leave)

    def disown(self) -> None:
        """Close the group in a child process, whose parent goes on with it."""
        self._closed = JobError("a process group cannot be used in a child of its process")
        for each in self._gloos:
            each.disown(self._closed)

    def carry_out(self, what: str, action: Callable[[], None]) -> None:
        """Run an action in the order of the program, and wait for its end."""
        self._submit(what, [], action).wait()

    def beside(self, what: str, action: Callable[[], None]) -> CoarseWork:
        """Run an action in a thread of its own, whatever collectives are under way."""
        work = self._hold(CoarseWork(what, [], self._lane))
        begin(f"coarse {what}", work.run, action)
        return work

    def _submit(
        self, what: str, result: Any, action: Callable[[], None], opts: Any = None
    ) -> CoarseWork:
        """Queue an action after all earlier ones; `opts` tells whether the caller waits at once."""
        work = self._hold(CoarseWork(what, result, self._lane))
        awaited = getattr(opts, "asyncOp", True) is False  # torch waits at once
        self._lane.submit(work, partial(self._carry_out, action), awaited=awaited)
        return work

    def _carry_out(self, action: Callable[[], None]) -> None:
        """Run a collective; after a `JobError` or an interruption all later ones fail, because
        processes could be at different collectives."""
        if self._failure is not None:
            kind = type(self._failure)
            raise kind(str(self._failure), self._failure.ranks, self._failure.devices)
        try:
            action()
        except JobError as error:
            self._fail(error)
            raise
        except Exception:
            raise
        except BaseException:
            self._fail(JobError("a collective was interrupted"))
            raise

    def _fail(self, error: JobError) -> None:
        self._failure = error
        self._disconnect(leave=False)  # so that the others do not wait for this one

    def _move(
        self, method: str, result: Any, calls: Sequence[tuple[Any, Any]], *options: Any
    ) -> CoarseWork:
        """Run a collective of gloo in the order of the program.

        Parameters
        ----------
        method : name of gloo's method.
        calls : outputs and inputs of each call, tensors in lists; inputs are None if the method has
            none.
        options : options of each call.
        """

        return self._submit(method, result, lambda: self._by_gloo(method, calls, *options))

    def _by_gloo(self, method: str, calls: Sequence[tuple[Any, Any]], *options: Any) -> None:
        """Run a collective of gloo, as of `_move`, and wait for it."""
        group, works = self.gloo.group, []
        back: list[tuple[Tensor, Tensor]] = []
        for outputs, inputs in calls:
            places = tree_map(dense, outputs)
            given = () if inputs is None else (tree_map(dense, inputs),)
            works.append(getattr(group, method)(places, *given, *options))
            back += zip(tree_leaves(outputs), tree_leaves(places), strict=True)
        self.gloo.wait(works)
        for output, place in back:
            if not output.is_contiguous():
                output.copy_(place)

    def _gather(self, output: Tensor, given: Tensor) -> None:
        """Gather the bytes of all processes' tensors, through memory that they share.

        Gloo gathers less than `GATHER_BYTES`, and where some process does not share memory with the
        service; it refuses shapes other than that of the tensors one behind the other."""
        exchange = None
        nbytes = given.numel() * given.element_size()
        is_large = self._size * nbytes >= max(1, GATHER_BYTES)
        shape = (self._size * given.shape[0], *given.shape[1:]) if given.dim() else None
        is_plain = self._size > 1 and output.layout == given.layout == torch.strided
        if is_large and is_plain and self._gathers and output.shape == shape:
            self._sums += 1
            kind = str(given.dtype).removeprefix("torch.")
            try:
                exchange = self.exchanges.gather(nbytes, kind, self._sums)
            except UnsharedError:  # in all processes
                self._gathers = False
        if exchange is None:
            return self._by_gloo("_allgather_base", [(output, given)])
        target = flat(output)
        rows = target.view(torch.uint8).view(self._size, nbytes)
        own, source = rows[self._rank], flat(given.resolve_conj().resolve_neg()).view(torch.uint8)
        if own.data_ptr() != source.data_ptr():  # FSDP2 gathers in place
            own.copy_(source)

        def take(parts: NDArray[Any], start: int, stop: int) -> None:
            for rank, part in enumerate(parts):
                if rank != self._rank:
                    rows[rank, start:stop].copy_(torch.from_numpy(part))

        exchange.run(
            lambda part, start, stop: torch.from_numpy(part).copy_(own[start:stop]),
            take,
            turn=self._sums,
        )
        self.gathered_bytes += output.numel() * output.element_size()
        if not output.is_contiguous():
            output.copy_(target.view(output.shape))
        return None

    def _hold(self, work: CoarseWork) -> CoarseWork:
        """Keep a reference to a work until it is over: torch alone would drop its Python object.

        Raises
        ------
        JobError : the group has ended.
        """
        if self._closed is not None:
            raise self._closed
        kept = [each for each in self._held if not each.is_over]
        self._held = [*kept[-HELD_WORKS:], work]
        return work

    def _reduce(self, given: Tensor, out: Tensor | None, operation: Any) -> None:
        """Reduce the tensors of all processes, into `out` if it is given."""
        name = ring_operation(given, operation) if self._size > 1 else None
        if name is None:
            taken = given if given is out else given.clone()
            is_dense = taken.layout == torch.strided
            taken = taken.contiguous() if is_dense else taken
            with torch.inference_mode(is_dense or taken.is_inference()):  # a sparse sum is new
                self.gloo.all_reduce("all_reduce", taken, operation)
            if out is not None and out is not taken:
                out.copy_(taken)
            return
        source = flat(given)
        target = None if out is None else flat(out)

        def take(start: int, stop: int, values: Tensor) -> None:
            if target is not None:
                target[start:stop].copy_(values)

        self._sum(source, name, take)
        if out is not None and target is not None and not out.is_contiguous():
            out.copy_(target.view(out.shape))

    def _reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], operation: Any) -> None:
        name = ring_operation(output, operation) if self._size > 1 else None
        source = torch.cat([each.reshape(-1) for each in parts]) if len(parts) > 1 else parts[0]
        source = flat(source)
        own = self._rank * output.numel()
        if name is None:
            taken = source.clone()
            self.gloo.all_reduce("reduce_scatter", taken, operation)
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
        self,
        source: Tensor,
        operation: ReduceOpName,
        take: Callable[[int, int, Tensor], None],
        addends: int = 0,
    ) -> None:
        """Reduce with the rings of the devices; several addends are rows of `source`."""
        if not source.numel():
            return
        self._sums += 1
        kind = str(source.dtype).removeprefix("torch.")
        exchange = self.exchanges.take(source.shape[-1], operation, kind, self._sums, addends)

        def values(part: NDArray[Any]) -> Tensor:
            return torch.from_numpy(part).view(source.dtype)

        exchange.run(
            lambda part, start, stop: values(part).copy_(source[..., start:stop]),
            lambda part, start, stop: take(start, stop, values(part)),
            turn=self._sums,
        )
        self.ring_bytes += 4 * source.numel()


def _connect(connect: Callable[[], Client], connected: Future[Client]) -> None:
    """Make a client for a group; close it if the group has ended meanwhile."""
    try:
        client = connect()
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):
            connected.set_exception(error)
        return
    try:
        connected.set_result(client)
    except InvalidStateError:
        client.close(leave=False)


def _end(
    given: weakref.ref[CoarseProcessGroup],
    lane: Lane,
    connected: Future[Client],
    release: Callable[[], None],
) -> None:
    """End a group with a process of `multiprocessing`, or what is left of a group that nobody
    has."""
    if (group := given()) is None:
        begin("coarse end", _leave, lane, connected, release)
    else:
        group.end_with_the_process()


def _leave(lane: Lane, connected: Future[Client], release: Callable[[], None]) -> None:
    """End the thread of a collected group, and its client or the making of it."""
    lane.close()
    with contextlib.suppress(InvalidStateError):
        connected.set_exception(JobError("the process group was closed"))
    if connected.exception() is None:
        connected.result().close()
    release()


@atexit.register
def _end_open_groups() -> None:
    """End the groups of a process, and wait for all threads that C++ code may call."""
    for group in list(OPEN):
        group.end_with_the_process()
    join()
    NATIVE.acquire()


def _disown() -> None:
    for group in list(OPEN):
        group.disown()
    OPEN.clear()


os.register_at_fork(after_in_child=_disown)
