"""The transfer handler: subgroups of a step come from the drives, are updated and go back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from numpy.typing import NDArray

from nearstep.backends.base import Completion
from nearstep.backends.peer import PeerBackend
from nearstep.buffer import Buffer
from nearstep.device import Device
from nearstep.placement import Arenas, Launch
from nearstep.run import Run
from nearstep.smartssd.peer import ChainedCompletion, PeerToPeer
from nearstep.storage.aligned import ALIGNMENT, AlignedPool
from nearstep.torch.cards.host_changes import HostChangeCheck
from nearstep.torch.cards.landing import PieceInbox
from nearstep.torch.cards.prefetcher import Prefetcher
from nearstep.torch.cards.segment import CardSegment, is_state, segment_of
from nearstep.torch.formats import copy_array, gradient_array
from nearstep.torch.launcher import Accelerator
from nearstep.torch.pairs import PairList
from nearstep.torch.staging import DeferredOutbox
from nearstep.torch.step import Key, Start
from nearstep.torch.step_graph import Place, lane, run_parts
from nearstep.torch.traffic import Traffic
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Range, Transfer

URGENT, LAZY, HOST = 0, 1, 2
"""Priorities: on a drive parameters, which the next forward pass needs, and all else; what takes
the host's time comes when the drive has its work."""
COMMANDS = 2
"""Transfers of a direction that a drive has at once, in their order."""

LANDING_BYTES = 1 << 20
"""What is fetched of a card at once without a clock, where parameters have to be put to their
places: memory for that, which the process holds."""


class Subgroup(NamedTuple):
    """Elements [start, stop) of a launch's segment, which the cards hold at once.

    Attributes
    ----------
    launch
    start, stop
    number : in the step.
    states : arrays that the update reads and writes.
    """

    launch: Launch
    start: int
    stop: int
    number: int
    states: Sequence[str]


def subgroups(
    launches: Sequence[Launch], states: Callable[[Launch], Sequence[str]], elements: int
) -> Iterator[Subgroup]:
    """Launches cut at the multiples of `elements` of their segments.

    Ref: Smart-Infinity, section V: subgroup i has the elements from i x D on.
    """
    number = 0
    for launch in launches:
        for start in range(launch.start // elements * elements, launch.stop, elements):
            low, high = max(start, launch.start), min(start + elements, launch.stop)
            yield Subgroup(launch, low, high, number, states(launch))
            number += 1


class Slots:
    """Room in the memory of each card for subgroups: allocated once, for the largest (section
    IV-B).

    Parameters
    ----------
    device
    elements : of a subgroup, on each card.
    count : subgroups that are there at once.
    """

    def __init__(self, device: Device, elements: int, count: int) -> None:
        self.elements = elements
        self.count = count
        self._device = device
        self._rooms: dict[tuple[int, int, str], Buffer] = {}

    def reserve(self, array: str, dtype: Any) -> None:
        """Have room for an array.

        Raises
        ------
        OutOfDeviceMemoryError
        """
        for number in range(self.count):
            for channel in range(self._device.channel_count):
                place = number, channel, array
                if place not in self._rooms:
                    self._rooms[place] = self._device.alloc(
                        self.elements, dtype, channel=channel, align=ALIGNMENT
                    )

    def room(self, number: int, channel: int, array: str, count: int) -> Buffer:
        """For the first `count` elements of an array of a subgroup."""
        return self._rooms[number % self.count, channel, array][:count]

    def free(self) -> None:
        """Give the memory back; on a closed device there is nothing to do."""
        for room in self._rooms.values():
            if not room.device.closed:
                room.free()
        self._rooms.clear()


class TransferHandler:
    """Adds the operations of a step to a graph.

    A subgroup is read from the drive, updated and written back, its parameters first; meanwhile
    the drive reads the next one into other room (figure 5b). The naive order has one subgroup after
    the other (figure 5a).

    Parameters
    ----------
    device
    peer
    ahead : reads from the drives.
    slots
    traffic
    accelerator
    look : at the host's parameters, which stay as they are until it has ended; None if that has
        been done.
    naive

    Attributes
    ----------
    graph
    first : what is read before anything is written: tensor, offset in bytes, memory.

    Ref: Smart-Infinity, section IV-B.
    """

    def __init__(
        self,
        device: Device,
        peer: PeerToPeer,
        ahead: Prefetcher,
        slots: Slots,
        traffic: Traffic,
        accelerator: Accelerator,
        *,
        look: HostChangeCheck | None = None,
        naive: bool,
    ) -> None:
        self.graph = Graph()
        self._looked: list[Operation] = []
        if look is not None:
            self._looked.append(self.graph.add("look", "parameters", action=lambda: look))
        self.first: list[tuple[str, int, Buffer]] = []
        self._device = device
        self._peer = peer
        self._ahead = ahead
        self._slots = slots
        self._traffic = traffic
        self._accelerator = accelerator
        self._naive = naive
        self._is_timed = device.cycles is not None
        self._pool = AlignedPool()
        self._lent: list[Buffer] = []
        self._commands: Counter[str] = Counter()

    def add(
        self,
        subgroup: Subgroup,
        outbox: DeferredOutbox,
        lists: Mapping[Place, PairList],
        start: Start,
        factor: float,
        started: list[Run],
        inbox: PieceInbox | None,
    ) -> Sequence[Operation]:
        """Add one subgroup.

        Parameters
        ----------
        subgroup
        outbox : gradients that are sent.
        lists : compressed gradients.
        start, factor, started : as of `nearstep.torch.step_graph.run_parts`.
        inbox : where the parameters go; None: they stay on the drives.

        Returns
        -------
        Sequence[Operation] : that have been added.
        """
        begun = len(self.graph)
        segment = segment_of(subgroup.launch.segment)
        for channel, (first, last) in segment.shares(subgroup.start, subgroup.stop):
            key = cast(Key, subgroup.launch.key)
            g = gradient_array(key.gradient_format)
            rooms = self._rooms(subgroup, channel, last - first)
            pairs = lists.get(Place(subgroup.launch, subgroup.start, channel))
            held = pairs is None and g in segment.on_drives
            loaded = [*subgroup.states, *([g] if held else [])]
            for array in loaded:
                room = rooms[array]
                load = segment.key(array, channel), first * room.dtype.itemsize, room
                if subgroup.number < self._slots.count:
                    self.first.append(load)
                move = partial(self._ahead.load, *load)
                self._move("read", subgroup, array, channel, URGENT, move, writes=room)
            self._send(subgroup, channel, first, rooms, outbox, pairs)
            gradient = None if pairs is None else pairs.pairs
            numbering = segment.numbering(subgroup.start, channel)
            found = run_parts(rooms, key, start, factor, started, numbering, gradient)
            self.graph.add(
                f"run {subgroup.number}",
                *self._held(channel, lane(channel)),
                reads=map(Range.of, found.reads),
                writes=map(Range.of, found.writes),
                action=partial(self._run, channel, found.starts, rooms[g]),
            )
            result = "p" if key.copy_format is None else copy_array(key.copy_format)
            for array in subgroup.states:
                move = partial(self._save, segment, array, channel, first, rooms[array])
                urgent = URGENT if array == "p" else LAZY
                self._move("write", subgroup, array, channel, urgent, move, reads=rooms[array])
            if inbox is not None and "p" in subgroup.states:
                self._fetch(subgroup, channel, result, rooms[result], inbox)
        return self.graph[begun:]

    def _run(
        self, channel: int, starts: Sequence[Callable[[], Run]], gradient: Buffer
    ) -> Completion:
        runs = self._accelerator.begin(channel, starts)
        return ChainedCompletion(runs, partial(self._end_loans, gradient))

    def _end_loans(self, room: Buffer) -> None:
        """The gradients in this room are the host's again."""
        stop = room.address + room.nbytes
        for lent in [each for each in self._lent if room.address <= each.address < stop]:
            self._lent.remove(lent)
            lent.end_loan()

    def close(self) -> None:
        """Give back what is lent still, as after an error, and forget the operations: their actions
        refer to the handler, and to arrays of the step, which nobody would free at once."""
        self.graph, self._looked = Graph(), []
        while self._lent:
            lent = self._lent.pop()
            if not lent.device.closed:
                lent.end_loan()

    def _rooms(self, subgroup: Subgroup, channel: int, count: int) -> Arenas:
        key, number = cast(Key, subgroup.launch.key), subgroup.number
        names = [*subgroup.states, gradient_array(key.gradient_format)]
        if key.copy_format is not None:
            names.append(copy_array(key.copy_format))
        for name in names:
            self._slots.reserve(name, subgroup.launch.segment.dtype_of(name))
        return {name: self._slots.room(number, channel, name, count) for name in names}

    def _held(self, channel: int, *lanes: str) -> Sequence[str]:
        """What an operation holds: in the naive order the only tasklet of the card, too."""
        return (*lanes, f"tasklet {channel}") if self._naive else lanes

    def _move(
        self,
        name: str,
        subgroup: Subgroup,
        array: str,
        channel: int,
        priority: int,
        action: Callable[[], Completion],
        *,
        reads: Buffer | None = None,
        writes: Buffer | None = None,
    ) -> None:
        """Add a transfer of the drive."""
        self.graph.add(
            f"{name} {array} {subgroup.number}",
            *self._held(channel, self._command(channel, name, array)),
            reads=[] if reads is None else [Range.of(reads)],
            writes=[] if writes is None else [Range.of(writes)],
            action=action,
            priority=priority,
        )

    def _command(self, channel: int, direction: str, array: str) -> str:
        """The next place in the drive's queue of a direction; without a clock one for each array,
        since what has ended is seen late there."""
        lane = f"drive {channel} {direction}"
        if not self._is_timed:
            return f"{lane} {array}"
        number = self._commands[lane]
        self._commands[lane] += 1
        return f"{lane} {number % COMMANDS}"

    def _save(
        self, segment: CardSegment, array: str, channel: int, first: int, room: Buffer
    ) -> Completion:
        self._traffic.cards_to_drives += room.nbytes
        segment.changed(array)
        key = segment.key(array, channel)
        return self._peer.save(key, first * room.dtype.itemsize, room)

    def _send(
        self,
        subgroup: Subgroup,
        channel: int,
        first: int,
        rooms: Arenas,
        outbox: DeferredOutbox,
        pairs: PairList | None,
    ) -> None:
        """Add what comes from the host: gradients, whole or as pairs."""
        segment = subgroup.launch.segment
        for transfer in outbox.cut(segment, subgroup.start, subgroup.stop):
            low, high = segment.stripes.span(transfer.start, transfer.stop, channel)
            whole = rooms[transfer.array]
            low, high = low - first, min(high - first, whole.size)
            if low < high:
                data = partial(_first, transfer.data, channel, high - low)
                self._write(f"{transfer.array} {subgroup.number}", channel, whole[low:high], data)
        for room, listed in () if pairs is None else pairs.lines():
            self._write(f"pairs {subgroup.number}", channel, room, partial(_given, listed))

    def _write(
        self, name: str, channel: int, room: Buffer, data: Callable[[], NDArray[Any]]
    ) -> None:
        self.graph.add(
            f"send {name}",
            *self._held(channel, f"dma {channel} down"),
            writes=[Range.of(room)],
            action=partial(self._give, room, data),
            transfer=self._links(channel, 0, room),
        )

    def _give(self, room: Buffer, data: Callable[[], NDArray[Any]]) -> Completion | None:
        """Have data in a room: lent until the run has ended, if the device can take them so."""
        given = data()
        if not room.lend(given):
            return room.submit_dma_write(given)
        self._lent.append(room)
        return None

    def _fetch(
        self, subgroup: Subgroup, channel: int, array: str, room: Buffer, inbox: PieceInbox
    ) -> None:
        launch, stripes = subgroup.launch, subgroup.launch.segment.stripes
        first, _ = stripes.span(subgroup.start, subgroup.stop, channel)

        def begin(start: int, stop: int) -> Completion:
            target = inbox.whole(launch, start, stop)
            low, high = stripes.span(start, stop, channel)
            part = room[low - first : high - first]
            if target is not None:
                landed = partial(inbox.landed, launch, start, stop)
                return ChainedCompletion(part.submit_dma_read(target), landed)
            out = self._pool.empty(part.size, part.dtype)
            land = partial(inbox.land, launch, start, stop, channel, out)
            return ChainedCompletion(part.submit_dma_read(out), land)

        def fetch() -> Completion | None:
            start, stop = subgroup.start, subgroup.stop
            if self._is_timed or inbox.whole(launch, start, stop) is not None:
                return begin(start, stop)
            step = LANDING_BYTES // room.dtype.itemsize * stripes.channels
            for at in range(start, stop, step):
                begin(at, min(at + step, stop)).wait()
            return None

        self.graph.add(
            f"fetch {array} {subgroup.number}",
            *self._held(channel, f"dma {channel} up"),
            reads=[Range.of(room)],
            after=self._looked,
            action=fetch,
            priority=HOST,
            transfer=self._links(channel, 1, room),
        )

    def _links(self, channel: int, direction: int, room: Buffer) -> Transfer | None:
        """What is on the host's links, to a card (0) or from it (1), if they have a bound."""
        backend = self._device.backend
        assert isinstance(backend, PeerBackend)
        route = backend.links.route(channel, direction)
        return Transfer(nbytes=room.nbytes, route=route) if route else None


def states_of(launch: Launch, arrays: Mapping[str, float]) -> Sequence[str]:
    """Arrays of a rule that are on the drives, the parameters first."""
    return sorted(filter(is_state, arrays), key=lambda name: name != "p")


def _first(data: Callable[[int], NDArray[Any]], channel: int, count: int) -> NDArray[Any]:
    return data(channel)[:count]


def _given(data: NDArray[Any]) -> NDArray[Any]:
    return data
