"""Iterations under a plan as graphs of work: MemFerry's, native ZeRO-Offload's, and DeepSpeed's.

One iteration alone takes exactly as long as in `nearstep.memferry.cost`. In a sequence of
iterations a layer is loaded, or computed in host memory, after its update in the previous
iteration: updates overlap loads, as in figure 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nearstep.errors import ArgumentError
from nearstep.memferry.cost import GFGB, Costs, Decision, Mode
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Range, Rate, Transfer
from nearstep.work.timeline import Timeline
from nearstep_spec.platform.machine import Hop

GPU, LOADS, SENDS, HOST = "GPU", "host to GPU", "GPU to host", "host"
Updates = Literal["after-backward", "all-gradients"]
"""Begin of updates: as in the cost model, or, as in ZeRO-Offload, when the host has all gradients;
then in the order of the forward pass, so that loads may follow.
"""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A link that direct host access and copies share, unlike in the cost model.

    Attributes
    ----------
    down_bytes_per_s, up_bytes_per_s : from the host, and to it.
    """

    down_bytes_per_s: float
    up_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """DeepSpeed's bucket, which collects gradients before they are sent.

    Gradients of a layer are added when they have been computed; the bucket is sent when those of a
    layer do not fit, and after backward. A layer larger than the bucket has a separate one.

    Attributes
    ----------
    beside : backward continues while the bucket is sent (`overlap_comm`, with two of them); else
        the GPU waits.

    Ref: DeepSpeed, `deepspeed/runtime/zero/stage_1_and_2.py`:
    `reduce_independent_p_g_buckets_and_remove_grads`.
    """

    nbytes: int
    beside: bool = False


class Iterations:
    """Builder of a graph of iterations.

    Parameters
    ----------
    decisions : for each layer.
    shared : None: as in the cost model.
    bucket : None: gradients are sent layer by layer.
    """

    def __init__(
        self,
        costs: Costs,
        decisions: Sequence[Decision],
        *,
        updates: Updates = "after-backward",
        shared: Shared | None = None,
        bucket: Bucket | None = None,
    ) -> None:
        if len(decisions) != len(costs):
            raise ArgumentError(f"decisions must be {len(costs)}, not {len(decisions)}")
        self.graph = Graph()
        self._costs = costs
        self._decisions = decisions
        self._updates = updates
        self._shared = shared
        self._bucket = bucket
        self._names = [layer.name for layer in costs.profile.layers]

    def add(self) -> None:
        """Add an iteration."""
        costs, decisions = self._costs, self._decisions
        count = range(len(costs))
        loads: dict[int, Operation] = {}
        for i in count:
            if decisions[i].mode is Mode.GFGB:
                loads[i] = self._load(i, [*loads.values()][-1:])
        now: Operation | None = None
        forward: list[Operation] = []
        for i in count:
            now = self._gap("between", costs.before_forward[i], now)
            after = [each for each in (now, loads.get(i)) if each is not None]
            ticks = costs.forward[i, decisions[i].index]
            now = self._compute("forward", i, int(ticks), after)
            forward.append(now)
        before = [*loads.values()][-1:]
        for i in reversed(count):
            if decisions[i].mode is Mode.DFGB:
                loads[i] = self._load(i, [*before, forward[i]])
                before = [loads[i]]
        sends: dict[int, Operation] = {}
        held: list[int] = []
        for i in reversed(count):
            after = [each for each in (now, loads.get(i)) if each is not None]
            ticks = costs.backward[i, decisions[i].index]
            now = self._compute("backward", i, int(ticks), after)
            if costs.trained[i] and not decisions[i].write:
                if held and not self._fits([*held, i]):
                    now = self._send_all(held, now, sends)
                held.append(i)
                if self._bucket is None:
                    now = self._send_all(held, now, sends)
            now = self._gap("between", costs.before_backward[i], now)
        self._update(self._send_all(held, now, sends), sends)

    def _fits(self, layers: Sequence[int]) -> bool:
        sizes = [self._costs.profile.layers[i].gradient_bytes for i in layers]
        return self._bucket is not None and sum(sizes) <= self._bucket.nbytes

    def _send_all(
        self, held: list[int], now: Operation | None, sends: dict[int, Operation]
    ) -> Operation | None:
        """Send the collected gradients, and return the operation before the GPU's next
        computation.
        """
        for i in held:
            assert now is not None, "gradients were computed"
            sends[i] = self._send(i, now)
        waits = held and self._bucket is not None and not self._bucket.beside
        last = sends[held[-1]] if waits else now
        held.clear()
        return last

    def _update(self, backward: Operation | None, sends: dict[int, Operation]) -> None:
        trained = [i for i in range(len(self._costs)) if self._costs.trained[i]]
        all_first = self._updates == "all-gradients"
        last: Operation | None = None
        for i in trained if all_first else reversed(trained):
            waits = [*sends.values()] if all_first and last is None else [sends.get(i)]
            last = self.graph.add(
                f"update {self._names[i]}",
                HOST,
                writes=[self._place(i)],
                after=[each for each in (backward, last, *waits) if each is not None],
                seconds=int(self._costs.update[i]) / 1e12,
            )

    def _place(self, layer: int) -> Range:
        return Range(("host parameters", layer), 0, 1)

    def _load(self, layer: int, after: Sequence[Operation]) -> Operation:
        nbytes = self._costs.profile.layers[layer].parameter_bytes
        time = self._time(0, nbytes, self._costs.load[layer])
        reads = [self._place(layer)]
        return self.graph.add(f"load {self._names[layer]}", LOADS, reads=reads, after=after, **time)

    def _send(self, layer: int, after: Operation) -> Operation:
        nbytes = self._costs.profile.layers[layer].gradient_bytes
        time = self._time(1, nbytes, self._costs.send[layer])
        return self.graph.add(f"send {self._names[layer]}", SENDS, after=[after], **time)

    def _time(self, way: int, nbytes: int, ticks: int) -> dict[str, Any]:
        """Time of a copy: that of the cost model, or its bytes on the shared link."""
        if self._shared is None:
            return {"seconds": int(ticks) / 1e12}
        return {"transfer": self._transfer(way, nbytes)}

    def _compute(self, kind: str, layer: int, ticks: int, after: Sequence[Operation]) -> Operation:
        """Compute a layer on the GPU.

        On a shared link its reads of host memory are a concurrent transfer, of the bytes whose time
        is the excess of direct host access over computation on the GPU.
        """
        decision, costs = self._decisions[layer], self._costs
        in_place = decision.mode is Mode.DHA or (decision.mode is Mode.DFGB and kind == "forward")
        done = self.graph.add(
            f"{kind} {self._names[layer]}",
            GPU,
            reads=[self._place(layer)] if in_place else [],
            after=after,
            seconds=ticks / 1e12,
        )
        if self._shared is None or not costs.profile.layers[layer].parameter_bytes:
            return done
        table = costs.forward if kind == "forward" else costs.backward
        extra = ticks - int(table[layer, GFGB.index]) if in_place else 0
        nbytes = round(extra / 1e12 * self._shared.down_bytes_per_s)
        if nbytes <= 0:
            return done
        read = self.graph.add(
            f"read {self._names[layer]}", after=after, transfer=self._transfer(0, nbytes)
        )
        return self.graph.add(f"end {self._names[layer]}", GPU, after=[done, read], seconds=0.0)

    def _transfer(self, way: int, nbytes: int) -> Transfer:
        assert self._shared is not None
        rate = (self._shared.down_bytes_per_s, self._shared.up_bytes_per_s)[way]
        name = ("down", "up")[way]
        hop = Hop(
            link="link", direction=way, lane=name, bytes_per_s=Rate(bytes_per_s=rate).bytes_per_s
        )
        return Transfer(nbytes=nbytes, route=(hop,))

    def _gap(self, name: str, ticks: int, now: Operation | None) -> Operation | None:
        if not ticks:
            return now
        after = [] if now is None else [now]
        return self.graph.add(name, GPU, after=after, seconds=int(ticks) / 1e12)


@dataclass(frozen=True)
class Steady:
    """A steady-state iteration.

    Attributes
    ----------
    seconds : from one to the next.
    busy : share of it in which the GPU computes.
    """

    seconds: float
    busy: float


def steady(iterations: Iterations) -> Steady:
    """Time the last of four iterations against the third: each waits only for the previous one."""
    found: list[Timeline] = []
    for count in (3, 1):
        for _ in range(count):
            iterations.add()
        found.append(execute(iterations.graph))
    cycles = found[1].makespan - found[0].makespan
    busy = found[1].busy(GPU) - found[0].busy(GPU)
    return Steady(cycles / 1e12, busy / cycles if cycles else 0.0)


def once(
    costs: Costs,
    decisions: Sequence[Decision],
    updates: Updates = "after-backward",
    bucket: Bucket | None = None,
) -> Timeline:
    """Time one iteration alone, by default as in the cost model."""
    iterations = Iterations(costs, decisions, updates=updates, bucket=bucket)
    iterations.add()
    return execute(iterations.graph)


def native(costs: Costs) -> tuple[Decision, ...]:
    """ZeRO-Offload's decisions: every layer is loaded, and every gradient sent."""
    loaded = [
        GFGB if costs.allowed[i, GFGB.index] else Decision(Mode.DHA) for i in range(len(costs))
    ]
    return tuple(loaded)
