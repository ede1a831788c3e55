"""Iterations of a model that is sharded over ranks, on a modelled cluster of equal machines.

Each GPU of a machine is a rank, and the machines are joined by their part `network`. Parameters,
gradients and state are sharded as FSDP2 does by default: a unit is a block, gathered before its
forward and again before its backward; what is in no block is one unit that is gathered once. The
gradient of a unit is reduced after its backward; each rank sends its shard to the host, which
updates the shards of its ranks and sends the parameters back. State is kept in memory of the host,
or on its drives, from which it is read and to which it is written for each update.

- *Collectives* are rings in the order of the ranks (Patarasuk and Yuan, *Bandwidth optimal
  all-reduce algorithms*, 2009): of `nbytes`, each of n ranks sends (n-1)/n to the next one, in n-1
  rounds, each with the latency of the slowest hop. All-gathers are one after the other, one unit
  ahead of computation; so are reductions, beside them.
- *One machine stands for all.* A shift of the ring by one machine maps the cluster to itself, and
  max-min fair rates are unique, so that equal transfers of all machines have equal rates. So one
  machine is simulated: what its last rank sends leaves by its own link to the network, and arrives
  by the link of the next machine, which is as busy as its own.
- *The host* has one thread of the optimizer. State is read at most two units ahead of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

from nearstep.errors import ArgumentError
from nearstep.memferry import modelled
from nearstep.memferry.profile import LayerProfile
from nearstep.scalars import is_whole
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Transfer
from nearstep.work.timeline import Timeline
from nearstep_spec.platform.machine import Figure, Hop, Link, Platform
from nearstep_spec.platform.models import MODELS
from nearstep_spec.platform.transformer import Transformer

NETWORK = "network"
"""Part of a machine that connects it to the others."""

ROOT = "root"
"""The unit of what is in no block."""

STATE_BYTES = 12
"""Bytes of an element's parameter and two moments in fp32, read and written for an update."""

AHEAD = 2
"""Units whose state is read before it is used."""


def with_network(machine: Platform, bytes_per_s: float) -> Platform:
    """Return the machine with a link of this rate between the first processor and the network.

    Raises
    ------
    ArgumentError : the machine has a network.
    """
    if NETWORK in machine.switches:
        raise ArgumentError(f"{machine.name} has a network: its rate is that of its link")
    rate = Figure(value=bytes_per_s, origin="fitted", source="an assumption")
    link = Link(ends=(next(iter(machine.processors)), NETWORK), bytes_per_s=rate)
    switches, links = (*machine.switches, NETWORK), {**machine.links, NETWORK: link}
    return replace(machine, switches=switches, links=links)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks on machines.

    Attributes
    ----------
    gpu : a rank of a machine; all processors like it are ranks.
    host : part that updates.
    params_per_s : parameters that the host of a machine updates in a second.
    state : where parameters and moments are between updates.

    Raises
    ------
    ArgumentError : there is no such processor; ranks are below 1, or neither fit into one machine
        nor fill machines; several machines without a network; a rate that is not above 0; another
        state, or drives that the machine has not.
    """

    machine: Platform
    ranks: int
    gpu: str = "gpu0"
    host: str = "cpu"
    params_per_s: float = 7e9
    state: Literal["memory", "drives"] = "memory"

    def __post_init__(self) -> None:
        machine = self.machine
        for name in (self.gpu, self.host):
            if name not in machine.processors:
                known = ", ".join(machine.processors)
                raise ArgumentError(f"{machine.name} has no processor {name!r}: {known}")
        if not (is_whole(self.ranks) and self.ranks >= 1):
            raise ArgumentError(f"ranks must be an integer from 1, not {self.ranks!r}")
        if not self.params_per_s > 0:
            raise ArgumentError(f"params_per_s must be above 0, not {self.params_per_s!r}")
        each = len(self._gpus)
        if self.ranks > each and self.ranks % each:
            raise ArgumentError(
                f"ranks must be at most {each} or a multiple of it, the GPUs of {machine.name}, "
                f"not {self.ranks}"
            )
        if self.machines > 1 and NETWORK not in machine.switches:
            raise ArgumentError(f"{machine.name} has no part {NETWORK!r} for {self.ranks} ranks")
        if self.state not in ("memory", "drives"):
            raise ArgumentError(f"state must be in memory or drives, not {self.state!r}")
        if self.state == "drives" and not machine.drives:
            raise ArgumentError(f"{machine.name} has no drives")

    @property
    def _gpus(self) -> list[str]:
        processors = self.machine.processors
        return [name for name, each in processors.items() if each == processors[self.gpu]]

    @property
    def local(self) -> list[str]:
        """Ranks of one machine, by name."""
        return self._gpus[: self.ranks]

    @property
    def machines(self) -> int:
        return max(1, self.ranks // len(self._gpus))

    def ring(self) -> list[tuple[Hop, ...]]:
        """Return the route of each rank of a machine to the next rank; none of one rank."""
        local, machine = self.local, self.machine
        if self.ranks == 1:
            return []
        inside = [machine.route(*pair) for pair in pairwise(local)]
        if self.machines == 1:
            return [*inside, machine.route(local[-1], local[0])]
        away = machine.route(local[-1], NETWORK), machine.route(NETWORK, local[0])
        return [*inside, away[0] + away[1]]

    def drives(self, rank: int) -> list[str]:
        """Return the drives of a local rank; with fewer drives than ranks some share one."""
        names, count = [*self.machine.drives], len(self.local)
        return names[rank::count] or [names[rank % len(names)]]


@dataclass(frozen=True)
class _Segment:
    """Consecutive layers of one unit."""

    unit: str
    forward_s: float
    backward_s: float


class Iteration:
    """The graph of one iteration.

    Parameters
    ----------
    layers : in the order of forward; those of block i are named `blocki.*`.
    element_bytes : of a parameter or gradient on the GPU.

    Raises
    ------
    ArgumentError : the state of a machine's ranks is larger than its drives.
    """

    def __init__(
        self, layers: Sequence[LayerProfile], cluster: Cluster, element_bytes: int
    ) -> None:
        self.graph = Graph()
        self.cluster = cluster
        self._nbytes: dict[str, int] = {}
        self._elements: dict[str, int] = {}
        self._segments: list[_Segment] = []
        for unit, group in groupby(layers, _unit):
            each = [*group]
            forward = sum(one.forward_s + one.between_forward_s for one in each)
            backward = sum(one.backward_s + one.between_backward_s for one in each)
            self._segments.append(_Segment(unit, forward, backward))
            nbytes = sum(one.parameter_bytes for one in each)
            self._nbytes[unit] = self._nbytes.get(unit, 0) + nbytes
            elements = sum(one.gradient_bytes for one in each) // element_bytes
            self._elements[unit] = self._elements.get(unit, 0) + elements
        self._element_bytes = element_bytes
        self._ring = cluster.ring()
        self._tails: dict[str, Operation] = {}
        self._updates: list[Operation] = []
        if cluster.state == "drives":
            state = sum(self._elements.values()) * STATE_BYTES
            needed = -(-state * len(cluster.local) // cluster.ranks)
            drives = cluster.machine.drives.values()
            room = int(sum(float(drive.capacity_bytes) for drive in drives))
            if needed > room:
                raise ArgumentError(
                    f"state of {needed} bytes a machine must fit into the {room} of its drives"
                )
        self._build()

    @property
    def elements(self) -> int:
        """Parameters of the model."""
        return sum(self._elements.values())

    def timeline(self) -> Timeline:
        """Run the graph."""
        return execute(self.graph)

    def _build(self) -> None:
        segments = self._segments
        gathered = self._gather(ROOT, []) if ROOT in self._nbytes else None
        before: list[Operation] = []
        for way in ("forward", "backward"):
            for segment in segments if way == "forward" else reversed(segments):
                ready = gathered
                if segment.unit != ROOT:
                    ready = self._gather(segment.unit, before[-2:-1])
                seconds = segment.forward_s if way == "forward" else segment.backward_s
                after = [each for each in (*before[-1:], ready) if each is not None]
                name = f"{way} {segment.unit}"
                before.append(self.graph.add(name, "GPU", after=after, seconds=seconds))
                if way == "backward" and segment.unit != ROOT:
                    self._update(segment.unit, before[-1], before[len(segments) - 1])
        if ROOT in self._nbytes:
            self._update(ROOT, before[-1], before[len(segments) - 1])

    def _gather(self, unit: str, after: Sequence[Operation]) -> Operation | None:
        return self._collective("all-gather", unit, self._nbytes[unit], after)

    def _collective(
        self, kind: str, unit: str, nbytes: int, after: Sequence[Operation]
    ) -> Operation | None:
        """Add a ring, which ends with its slowest hop; None of one rank or without bytes."""
        ranks = self.cluster.ranks
        if not self._ring or not nbytes:
            return None
        after = [*after, *filter(None, [self._tails.get(kind)])]
        name = f"{kind} {unit}"
        share = -(-nbytes * (ranks - 1) // ranks)
        hops = [
            self.graph.add(name, after=after, transfer=Transfer(nbytes=share, route=route))
            for route in self._ring
        ]
        latency = max(hop.transfer.latency_s for hop in hops if hop.transfer is not None)
        rounds = (ranks - 2) * latency  # the first one is in the transfers
        self._tails[kind] = self.graph.add(name, kind, after=hops, seconds=rounds)
        return self._tails[kind]

    def _update(self, unit: str, computed: Operation, forward: Operation) -> None:
        """Add the reduction of a unit's gradient, and the update of its shards."""
        elements, cluster = self._elements[unit], self.cluster
        if not elements:
            return
        nbytes = elements * self._element_bytes
        shard = -(-elements // cluster.ranks)
        reduced = self._collective("reduce-scatter", unit, nbytes, [computed]) or computed
        sent = self._moves("gradient", unit, shard * self._element_bytes, [reduced], to_host=True)
        loaded = self._state("read", unit, shard, [forward, *self._updates[-AHEAD : 1 - AHEAD]])
        update = self.graph.add(
            f"update {unit}",
            "host",
            after=[*sent, *loaded, *self._updates[-1:]],
            seconds=shard * len(cluster.local) / cluster.params_per_s,
        )
        self._updates.append(update)
        self._state("write", unit, shard, [update])
        self._moves("parameter", unit, shard * self._element_bytes, [update], to_host=False)

    def _moves(
        self, what: str, unit: str, nbytes: int, after: Sequence[Operation], *, to_host: bool
    ) -> list[Operation]:
        cluster = self.cluster
        ends = [(gpu, cluster.host) if to_host else (cluster.host, gpu) for gpu in cluster.local]
        return [self._move(f"{what} {unit}", *pair, nbytes, after) for pair in ends]

    def _state(
        self, way: Literal["read", "write"], unit: str, shard: int, after: Sequence[Operation]
    ) -> list[Operation]:
        cluster = self.cluster
        if cluster.state == "memory":
            return []
        found = []
        for rank in range(len(cluster.local)):
            drives = cluster.drives(rank)
            part = -(-shard * STATE_BYTES // len(drives))
            for drive in drives:
                ends = (drive, cluster.host) if way == "read" else (cluster.host, drive)
                found.append(self._move(f"{way} {unit}", *ends, part, after))
        return found

    def _move(
        self, name: str, start: str, stop: str, nbytes: int, after: Sequence[Operation]
    ) -> Operation:
        transfer = Transfer.between(self.cluster.machine, start, stop, nbytes)
        return self.graph.add(name, after=after, transfer=transfer)


def shape(model: str) -> Transformer:
    """Return the shape of a model.

    Raises
    ------
    ArgumentError : there is no transformer of this name.
    """
    found = MODELS.get(model)
    if not isinstance(found, Transformer):
        known = ", ".join(name for name, each in MODELS.items() if isinstance(each, Transformer))
        raise ArgumentError(f"there is no model {model!r}: {known}")
    return found


def iteration_of(
    machine: Platform, model: Transformer, setup: modelled.Setup, ranks: int, state: str
) -> Iteration:
    """Make the iteration of a model whose layers take the times of `nearstep.memferry.modelled`.

    Raises
    ------
    ArgumentError : as `Cluster` and `modelled.profile`.
    """
    if setup.dtype not in modelled.DTYPE_BYTES:
        known = ", ".join(modelled.DTYPE_BYTES)
        raise ArgumentError(f"dtype must be of {known}, not {setup.dtype!r}")
    cluster = Cluster(
        machine=machine,
        ranks=ranks,
        gpu=setup.gpu,
        host=setup.host,
        params_per_s=setup.host_params_per_s,
        state=state,  # type: ignore[arg-type]  # checked there
    )
    whole = replace(setup, tied="embedding", reads="once")  # nothing is computed in host memory
    layers = modelled.profile(machine, model, whole).layers
    return Iteration(layers, cluster, modelled.DTYPE_BYTES[setup.dtype])


def report(iteration: Iteration, timeline: Timeline, batch: int) -> dict[str, int | float | str]:
    """Report an iteration of `batch` sequences a rank.

    Returns
    -------
    dict : `ranks`, `machines`, `seconds`, `sequences_per_s`; shares of time in which the GPU, the
        host's thread and the `busiest` part work; `network_bytes` that a machine sends.
    """
    cluster, least = iteration.cluster, timeline.least
    seconds, span = timeline.makespan / 1e12, max(timeline.makespan, 1)
    busiest = max(least, key=lambda lane: (least[lane], lane), default="none")
    links = cluster.machine.links
    sent = sum(
        nbytes
        for (name, way), nbytes in timeline.traffic.items()
        if name in links and links[name].ends[1 - way] == NETWORK
    )
    return {
        "ranks": cluster.ranks,
        "machines": cluster.machines,
        "seconds": seconds,
        "sequences_per_s": cluster.ranks * batch / seconds,
        "gpu_busy": timeline.busy("GPU") / span,
        "host_busy": timeline.busy("host") / span,
        "network_bytes": sent,
        "busiest": busiest,
        "busiest_busy": least.get(busiest, 0) / span,
    }


def _unit(layer: LayerProfile) -> str:
    first = layer.name.partition(".")[0]
    return first if first.startswith("block") else ROOT
