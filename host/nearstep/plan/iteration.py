"""Iterations of training as a graph of work on a modelled machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nearstep.errors import ArgumentError
from nearstep.plan.pieces import GRADIENT, Item, Layer, Piece
from nearstep.plan.schedule import Move, Schedule
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Range, Transfer
from nearstep.work.timeline import Entry, Timeline
from nearstep_spec.platform.machine import Platform

PRIORITIES = {"fetch": -2, "send": -1}
"""Priorities: transfers that the compute device waits for; then gradients, so that a channel can
update while the host copies to or from another.
"""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Roles of the parts of a machine.

    Attributes
    ----------
    compute, drives : names of parts or switches of the machine.
    memory : name of the part with each channel's memory.
    updates : `memory`: one kernel for each channel, concurrently with everything else, while the
        host copies to or from one channel at a time (AXDIMM, section 5.2); `processor`: one thread
        of the host, which also copies between memory and drives, without overlap.
    params_per_s : updates of one channel's kernel, or of the thread.
    """

    compute: str
    memory: tuple[str, ...]
    drives: str
    updates: Literal["memory", "processor"]
    params_per_s: float


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of overlap.

    Attributes
    ----------
    layers_ahead : layers that are fetched before the current one has ended.
    gradient_layers : layers whose gradients may be on the compute device, including the current
        one.

    Raises
    ------
    ArgumentError : `layers_ahead` is below 0 or `gradient_layers` below 1.
    """

    layers_ahead: int = 1
    gradient_layers: int = 1

    def __post_init__(self) -> None:
        if self.layers_ahead < 0 or self.gradient_layers < 1:
            raise ArgumentError(
                f"layers_ahead must be at least 0 and gradient_layers 1, not {self.layers_ahead} "
                f"and {self.gradient_layers}"
            )


@dataclass(frozen=True)
class Iteration:
    """Times of one iteration.

    Attributes
    ----------
    forward_s, backward_s : to the end of the last layer's forward, and from there to the end of the
        last update.
    """

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


class Iterations:
    """Builder of a graph of iterations, one after the other.

    Parameters are fetched to the compute device before each use and freed after it, but for the
    last layer, whose backward follows its forward, and those of several layers (`Schedule`). The
    arrays of an update are gathered when the gradients of its layer are complete (section 5.3).

    Parameters
    ----------
    layers, pieces : as `nearstep.plan.pieces.cut` makes them.
    schedule : of these pieces, which has placed them.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        pieces: Sequence[Sequence[Piece]],
        schedule: Schedule,
        machine: Platform,
        roles: Roles,
        limits: Limits,
    ) -> None:
        self.graph = Graph()
        self._layers = layers
        self._pieces = pieces
        self.schedule = schedule
        self._machine = machine
        self._roles = roles
        self._limits = limits
        self._ends: list[tuple[Operation, Operation]] = []
        self._begin: list[Operation] = []  # operations before the iteration
        self._rooms: dict[int, Sequence[Operation]] = {}  # the last one of each channel

    def add(self) -> None:
        """Add an iteration."""
        computed: list[Operation] = []  # layers in the order of computation
        sent: list[list[Operation]] = []  # gradients of each
        updates: list[Operation] = []
        for index, layer in enumerate(self._layers):
            name = f"forward {layer.name}"
            computed.append(self._compute(name, index, layer.forward_s, computed))
        forward = computed[-1]
        for index in reversed(range(len(self._layers))):
            layer = self._layers[index]
            held = self._limits.gradient_layers
            waits = sent[-held] if len(sent) >= held else []
            name = f"backward {layer.name}"
            computed.append(self._compute(name, index, layer.backward_s, computed, waits))
            sent.append([])
            for piece in reversed(self._pieces[index]):
                moves = self.schedule.update(piece)
                room = self._room(piece.channel, moves, computed[-1])
                for move in moves:
                    if move.kind == "load":
                        self._move(move, *room)
                    elif move.kind == "send":
                        sent[-1].append(self._move(move, *room))
                    elif move.kind == "update":
                        updates.append(self._move(move))
        self.schedule.end_iteration()
        end = self.graph.add("end", "end", after=[computed[-1], *updates], seconds=0.0)
        self._ends.append((forward, end))
        self._begin = [end]

    def _room(
        self, channel: int, moves: Sequence[Move], computed: Operation
    ) -> Sequence[Operation]:
        """Add the evictions of an update in a channel, and return the operations that must end
        before bytes may be sent there: these evictions, and all earlier ones."""
        gone = [self._move(move, computed) for move in moves if move.kind in ("evict", "drop")]
        after = [computed, *gone, *self._rooms.get(channel, ())]
        room = self.graph.add(f"room {channel}", f"room {channel}", after=after, seconds=0.0)
        self._rooms[channel] = [room]
        return [room]

    def times(self, timeline: Timeline) -> list[Iteration]:
        """Times of each iteration, from the timeline of the graph."""
        at = {entry.operation.index: entry.end for entry in timeline.entries}
        hertz = timeline.hertz or 1.0
        found, begin = [], 0
        for forward, end in self._ends:
            middle, last = at[forward.index], at[end.index]
            found.append(Iteration((middle - begin) / hertz, (last - middle) / hertz))
            begin = last
        return found

    def split(self, timeline: Timeline) -> list[Timeline]:
        """Split the timeline of the graph into those of the iterations, each from its own begin."""
        at = {entry.operation.index: entry.end for entry in timeline.entries}
        found, first, begin = [], 0, 0
        for _, end in self._ends:
            entries = [
                _moved(entry, first, begin)
                for entry in timeline.entries
                if first <= entry.operation.index <= end.index
            ]
            found.append(Timeline(entries, timeline.hertz, timeline.unit))
            first, begin = end.index + 1, at[end.index]
        return found

    def _compute(
        self,
        name: str,
        layer: int,
        seconds: float,
        before: Sequence[Operation],
        waits: Sequence[Operation] = (),
    ) -> Operation:
        ahead = self._limits.layers_ahead + 1
        room = before[-ahead:][:1] if len(before) >= ahead else []
        there = len(before) == len(self._layers)  # the last layer: backward follows its forward
        moves = [] if there else self.schedule.fetch(layer)
        fetched = [self._move(move, *room, *self._begin) for move in moves]
        after = [*fetched, *before[-1:], *waits, *self._begin]
        return self.graph.add(name, self._roles.compute, after=after, seconds=seconds)

    def _move(self, move: Move, *after: Operation) -> Operation:
        """Add a move, which waits for earlier uses of its bytes."""
        piece, array = move.item
        roles, graph = self._roles, self.graph
        name = f"{move.kind} {array}{piece.index}"
        here = Range(("memory", move.item), 0, move.item.nbytes)
        away = Range(("drives", move.item), 0, move.item.nbytes)
        if move.kind == "update":
            seconds = piece.elements / roles.params_per_s
            touched = [
                Range(("memory", each), 0, each.nbytes)
                for each in (*self.schedule.items(piece), Item(piece, GRADIENT))
            ]
            return graph.add(name, *self._holds(move), writes=touched, after=after, seconds=seconds)
        if move.kind == "drop":
            return graph.add(name, "drop", writes=[here], after=after, seconds=0.0)
        memory = roles.memory[piece.channel]
        source = roles.drives if move.source == "drives" else memory
        start, stop = {
            "fetch": (source, roles.compute),
            "send": (roles.compute, memory),
            "evict": (memory, roles.drives),
            "load": (roles.drives, memory),
        }[move.kind]
        reads, writes = {
            "fetch": ([away if move.source == "drives" else here], []),
            "send": ([], [here]),
            "evict": ([], [here, away]),  # its local reads have ended
            "load": ([away], [here]),
        }[move.kind]
        return graph.add(
            name,
            *self._holds(move),
            reads=reads,
            writes=writes,
            after=after,
            transfer=Transfer.between(self._machine, start, stop, move.nbytes),
            priority=PRIORITIES.get(move.kind, 0),
        )

    def _holds(self, move: Move) -> tuple[str, ...]:
        """Return the resources of a move: a channel, and the one copy to or from channels; or the
        thread; fetches have a separate stream (section 5.2).
        """
        stream = ("fetches",) if move.kind == "fetch" else ()
        if self._roles.updates == "processor":
            return ("host thread",) if move.kind in ("evict", "load", "update") else stream
        if move.kind == "fetch" and move.source == "drives":
            return stream
        channel = f"channel {move.item.piece.channel}"
        return (channel,) if move.kind == "update" else (channel, "copies", *stream)


def _moved(entry: Entry, first: int, begin: int) -> Entry:
    """Shift an entry to the first operation and cycle of its iteration."""
    operation = entry.operation
    own = replace(
        operation,
        index=operation.index - first,
        needs=tuple(need - first for need in operation.needs if need >= first),
    )
    return replace(entry, operation=own, start=entry.start - begin, end=entry.end - begin)
