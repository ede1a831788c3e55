"""Arrays on the drives of cards, updated by the cards' kernels: the transfer handler."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearstep.backends.base import ChainedCompletion, Completion
from nearstep.backends.peer import PeerBackend
from nearstep.buffer import Buffer
from nearstep.device import Device
from nearstep.errors import DeviceError
from nearstep.placement import Launch, Segment, padded
from nearstep.smartssd.device import SmartssdDevice
from nearstep.smartssd.peer import PeerToPeer
from nearstep.storage.aligned import ALIGNMENT, AlignedPool
from nearstep.storage.drive_errors import StorageError
from nearstep.storage.store import Store
from nearstep.torch.exchange import Block, Piece, subgroups
from nearstep.torch.formats import copy_array, gradient_array
from nearstep.torch.homes.durable import DurableHome
from nearstep.torch.homes.home import Share
from nearstep.torch.homes.host_changes import CheckedParameter, HostChangeChecks
from nearstep.torch.homes.opening import OpenStore
from nearstep.torch.homes.segments import ShardedSegment, is_state
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.step import RunKey
from nearstep.torch.table import StateTable
from nearstep.torch.traffic import Traffic
from nearstep.work.clock import Clock
from nearstep.work.graph import Graph
from nearstep.work.operation import Range, Transfer

Read = tuple[str, int, Buffer]
"""A read from a drive: name of the tensor, first byte, and destination."""


class Prefetcher:
    """Reads subgroups, the first ones of a step before the step begins.

    While the host checks which parameters were changed, the drive repeats the first reads of the
    previous step. Reads that this step does not need, or whose data was written since, are
    cancelled.
    """

    def __init__(self, peer: PeerToPeer, traffic: Traffic) -> None:
        self._peer = peer
        self._traffic = traffic
        self._first: Sequence[Read] = ()
        self._generation = -1
        self._begins = True
        self._in_flight: dict[tuple[str, int, int, int], Completion] = {}

    def use(self, store: Store) -> None:
        """Use another store of the same drives."""
        self._peer.store = store

    def begin(self) -> None:
        """Begin the first reads of the previous step.

        The destinations are not used otherwise until `discard_stale` or `cancel`.
        """
        self.cancel()
        self._begins = True
        self._generation = self._peer.store.generation
        there = self._peer.store.tensors
        for place in self._first:
            if place[0] not in there:
                continue
            try:
                self._in_flight[_memory(*place)] = self._begin(*place)
            except (DeviceError, StorageError):
                return  # the step repeats the read, after the commit of changes

    def discard_stale(self, first: Sequence[Read], *, written: bool) -> None:
        """Cancel prefetched reads unless they are the first of the step, or unit, that begins.

        Parameters
        ----------
        first : first reads of the step, before any write to the same places.
        written : the drives may have been written since `begin`, without a new generation.
        """
        if self._begins:
            self._begins, self._first = False, first
        stale = written or self._peer.store.generation != self._generation
        if stale or not {_memory(*each) for each in first}.issuperset(self._in_flight):
            self.cancel()

    def load(self, key: str, offset: int, room: Buffer) -> Completion:
        """Return the read of a tensor from byte `offset` on into a buffer; begin it if needed."""
        begun = self._in_flight.pop(_memory(key, offset, room), None)
        return self._begin(key, offset, room) if begun is None else begun

    def cancel(self) -> None:
        """Wait for all prefetched reads, and discard their data.

        Raises
        ------
        DriveTimeoutError : a read has not ended.
        """
        in_flight, self._in_flight = self._in_flight, {}
        for each in in_flight.values():
            try:
                each.wait()
            except (DeviceError, StorageError):
                if not each.ended:
                    raise

    def _begin(self, key: str, offset: int, room: Buffer) -> Completion:
        reading = self._peer.load(key, offset, room)
        self._traffic.drives_to_cards += room.nbytes
        return reading


def _memory(key: str, offset: int, room: Buffer) -> tuple[str, int, int, int]:
    return key, offset, room.address, room.nbytes


URGENT, LAZY, HOST = 0, 1, 2
"""Priorities: writes of parameters, which the next forward pass needs; other transfers of a drive;
operations that take the host's time, which start after the drive's."""

COMMANDS = 2
"""Transfers of one direction in a drive's queue, in order."""

FETCHED_BYTES = 1 << 20
"""Bytes of one fetch from a card without a clock, if the host scatters the data: the size of the
host's buffer."""

MOST_HELD = 3
"""Subgroups in the memory of a card, if it is large enough: one is read, one updated, one
written."""


class Slots:
    """Memory of each card for subgroups: allocated once, for the largest (section IV-B).

    Parameters
    ----------
    elements : elements of a subgroup on each card.
    count : subgroups that a card holds at once.
    """

    def __init__(self, device: Device, elements: int, count: int) -> None:
        self.elements = elements
        self.count = count
        self._device = device
        self._rooms: dict[tuple[int, int, str], Buffer] = {}

    def room(self, number: int, channel: int, array: str, count: int, segment: Segment) -> Buffer:
        """Return memory for the first `count` elements of an array of a subgroup; of one in 8 bits,
        bytes."""
        if (0, channel, array) not in self._rooms:
            _, _, size = segment.span(array, 0, self.elements)
            for slot in range(self.count):
                self._rooms[slot, channel, array] = self._device.alloc(
                    size, segment.dtype_of(array), channel=channel, align=ALIGNMENT
                )
        return self._rooms[number % self.count, channel, array][:count]

    def free(self) -> None:
        """Free the memory, unless the device is closed."""
        for room in self._rooms.values():
            if not room.device.closed:
                room.free()
        self._rooms.clear()


class PeerHome(DurableHome[ShardedSegment]):
    """Arrays are kept on the drives of cards; a card holds a few subgroups of them.

    A subgroup is read from the drive, updated and written back, its parameters first; meanwhile the
    drive reads the next subgroup into another slot (figure 5b). The naive order is sequential
    (figure 5a).

    Ref: Smart-Infinity, section IV-B.
    """

    kind = ShardedSegment
    fingerprints = keeps_masters = recovers = True
    fetch_priority = HOST

    def __init__(self, table: StateTable, device: SmartssdDevice, opened: OpenStore) -> None:
        super().__init__(table, opened)
        traffic, naive = table.traffic, table.settings.naive
        self.overlaps = self.direct = True
        self.fetches_late = self.at_once = False
        self.alone_from = None
        self._naive = naive
        self._is_timed = device.cycles is not None
        assert isinstance(device.backend, PeerBackend), "the device is of cards"
        self._backend = device.backend
        self._peer = PeerToPeer(device.backend, opened.store)
        self.prefetcher = Prefetcher(self._peer, traffic)
        self.checks = HostChangeChecks()
        held = min(MOST_HELD, device.card.memory_bytes // device.card.subgroup_bytes)
        self._slots = Slots(device, device.card.subgroup, 1 if naive else held)
        weakref.finalize(self, self._slots.free)
        self.ahead = None if self._is_timed else self._slots.count
        self._pool = AlignedPool()
        self._lent: list[Buffer] = []
        self._first: list[Read] = []
        self._segments: set[ShardedSegment] = set()
        self._commands: Counter[str] = Counter()

    @property
    def cut(self) -> int:
        return self._slots.elements * self._device.channel_count

    def clock(self) -> Clock:
        return Clock([self._backend], self._backend.hertz)

    def pieces(
        self, launches: Sequence[Launch], *, whole: bool, transfers: bool
    ) -> Sequence[Sequence[Piece]]:
        return [list(subgroups(launches, self.cut))] * self._device.channel_count

    def states(self, arrays: Mapping[str, float]) -> Sequence[str]:
        return sorted(filter(is_state, arrays), key=lambda name: name != "p")

    def share(self, block: Block, channel: int, number: int, states: Sequence[str]) -> Share:
        segment, key = _sharded(block.launch.segment), cast(RunKey, block.launch.key)
        self._segments.add(segment)
        names = [*states, gradient_array(key.gradient_format)]
        if key.copy_format is not None:
            names.append(copy_array(key.copy_format))
        # To the end of the last line, as tensors have it: an extent written in part is read first.
        lines = block._replace(stop=padded(block.stop, segment.line))
        rooms, parts = {}, {}
        for name in names:
            first, last = lines.span(channel, name)
            rooms[name] = self._slots.room(number, channel, name, last - first, segment)
            parts[name] = rooms[name][: block.span(channel, name)[1] - first]
        return Share(block, channel, number, block.span(channel)[0], rooms, parts, states)

    @property
    def peak(self) -> int:
        return self._device.capacity_bytes - self._device.free_bytes

    def layout(self, names: Mapping[Tensor, str]) -> Mapping[str, Any]:
        """Return the number of cards, the elements of a block, and for each segment the first
        element and the number of elements of each parameter, by name."""
        blocks = {segment.stripes.block for segment in self.segments}
        return {
            "cards": self._device.channel_count,
            "block": max(blocks, default=1),
            "segments": [
                {
                    names[each.parameter]: [each.extent.start, each.extent.count]
                    for each in segment.parameters
                }
                for segment in self.segments
            ],
        }

    def units(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        return [list(parameters)]

    def prepare(
        self, parameters: Iterable[DeviceParameter], *, anew: bool = False, small: bool = False
    ) -> None:
        self.prefetcher.use(self.drives.store)
        beside = self.checks.beside and not anew and not small and not self._is_timed
        if not (small or self._is_dirty):  # else a commit comes first, which makes reads stale
            self.prefetcher.begin()
        later: list[tuple[DeviceParameter, CheckedParameter]] = []
        for each in parameters:
            expected = each.change_check() if beside and not self._is_dirty else None
            if expected is None:
                each.push_changes()
            else:
                later.append((each, expected))
        if self._is_dirty:
            for each, _ in later:
                each.push_changes()
            later = []
        self.checks.begin([expected for _, expected in later])
        self.checks.beside = not self._is_dirty

    def restore(self, parameters: Iterable[DeviceParameter]) -> None:
        if not self.checks.passed:
            return  # the host still has the old ones, the drives may have new ones
        for each in parameters:
            each.read_again()

    def load_unit(self, segment: ShardedSegment, arrays: Mapping[str, float]) -> None:
        segment.reserve({k: v for k, v in arrays.items() if is_state(k)})

    def write_masters(self, segments: Iterable[ShardedSegment]) -> None:
        for segment in segments:
            segment.reserve({"p": 0.0})
            for each in segment.parameters:
                each.push_changes()

    def commit(self, meta: Mapping[str, Any], name: str = "") -> None:
        for segment in self.segments:
            self.forget_gradients(segment)
        super().commit(meta, name)
        self.prefetcher.use(self.drives.store)  # a new one if the commit was in doubt

    def forget(self) -> None:
        self.checks.cancel()
        self.prefetcher.cancel()

    def open(self, graph: Graph) -> None:
        self._first, self._segments = [], set()
        self._commands.clear()
        check = self.checks.take()
        self.looked = []
        if check is not None:
            self.looked = [graph.add("look", "parameters", action=lambda: check)]

    def load(self, graph: Graph, share: Share, *, gradient: str | None) -> None:
        segment = _sharded(share.block.launch.segment)
        kept = [gradient] if gradient is not None and gradient in segment.on_drives else []
        for array in (*share.states, *kept):
            room = share.rooms[array]
            place = segment.key(array, share.channel), _first_byte(share, array), room
            if share.number < self._slots.count:
                self._first.append(place)
            load = partial(self.prefetcher.load, *place)
            self._move(graph, "read", share, array, URGENT, load, writes=[Range.of(room)])

    def store(self, graph: Graph, share: Share) -> None:
        for array in share.states:
            save = partial(self._save, share, array)
            urgent = URGENT if array == "p" else LAZY
            reads = [Range.of(share.rooms[array])]
            self._move(graph, "write", share, array, urgent, save, reads=reads)

    def begin(self) -> None:
        reads_ahead = not self._is_timed and not self._naive
        written = any(each.dirty for each in self._segments)
        self.prefetcher.discard_stale(self._first if reads_ahead else (), written=written)

    def close(self) -> None:
        """Forget the objects of the step, and end loans and reads that an error has left."""
        self.looked, self._first = [], []
        self._segments.clear()
        while self._lent:
            lent = self._lent.pop()
            if not lent.device.closed:
                lent.end_loan()
        self.prefetcher.cancel()

    def holds(self, channel: int, *lanes: str) -> Sequence[str]:
        """Return the resources of an operation; in the naive order also the card's only tasklet."""
        return (*lanes, f"tasklet {channel}") if self._naive else lanes

    def lanes(self, channel: int, *, down: bool) -> Sequence[str]:
        return (f"dma {channel} {'down' if down else 'up'}",)

    def transfer(self, channel: int, room: Buffer, *, down: bool) -> Transfer | None:
        route = self._backend.links.route(channel, 0 if down else 1)
        return Transfer(nbytes=room.nbytes, route=route) if route else None

    def write(self, room: Buffer, data: NDArray[Any]) -> Completion | None:
        """Begin to send data, or lend it until the end of the run if the device accepts loans."""
        if not room.lend(data):
            return room.submit_dma_write(data)
        self._lent.append(room)
        return None

    def read(self, room: Buffer, out: NDArray[Any], done: Callable[[], None]) -> Completion:
        return ChainedCompletion(room.submit_dma_read(out), done)

    def scratch(self, size: int, dtype: np.dtype) -> NDArray[Any]:
        return self._pool.empty(size, dtype)

    def fetch(
        self,
        read: Callable[[int, int], Completion],
        share: Share,
        start: int,
        stop: int,
        *,
        whole: bool,
    ) -> Completion | None:
        if self._is_timed or whole:
            return read(start, stop)
        array = share.rooms[cast(RunKey, share.block.launch.key).result]
        step = FETCHED_BYTES // array.dtype.itemsize * self._device.channel_count
        for at in range(start, stop, step):
            read(at, min(at + step, stop)).wait()
        return None

    def running(
        self, begin: Callable[[], Completion], shares: Sequence[Share]
    ) -> Callable[[], Completion]:
        rooms = [
            share.rooms[gradient_array(cast(RunKey, share.block.launch.key).gradient_format)]
            for share in shares
        ]
        return lambda: ChainedCompletion(begin(), partial(self._end_loans, rooms))

    def _end_loans(self, rooms: Sequence[Buffer]) -> None:
        """End the loans of the gradients in these buffers."""
        for room in rooms:
            stop = room.address + room.nbytes
            for lent in [each for each in self._lent if room.address <= each.address < stop]:
                self._lent.remove(lent)
                lent.end_loan()

    def _move(
        self,
        graph: Graph,
        direction: str,
        share: Share,
        array: str,
        priority: int,
        action: Callable[[], Completion],
        *,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        """Add a transfer between a drive and its card."""
        graph.add(
            f"{direction} {array} {share.number}",
            *self.holds(share.channel, self._command(share.channel, direction, array)),
            reads=reads,
            writes=writes,
            action=action,
            priority=priority,
        )

    def _command(self, channel: int, direction: str, array: str) -> str:
        """Return the next slot of a direction in the drive's queue; without a clock a slot for each
        array, since ends are noticed late."""
        lane = f"drive {channel} {direction}"
        if not self._is_timed:
            return f"{lane} {array}"
        number = self._commands[lane]
        self._commands[lane] += 1
        return f"{lane} {number % COMMANDS}"

    def _save(self, share: Share, array: str) -> Completion:
        segment, room = _sharded(share.block.launch.segment), share.rooms[array]
        self._traffic.cards_to_drives += room.nbytes
        segment.changed(array)
        key = segment.key(array, share.channel)
        return self._peer.save(key, _first_byte(share, array), room)


def _first_byte(share: Share, array: str) -> int:
    """Return where a share begins in the tensor of its array."""
    return share.block.span(share.channel, array)[0] * share.rooms[array].dtype.itemsize


def _sharded(segment: Segment) -> ShardedSegment:
    """Return `segment`: all segments of this home are sharded."""
    assert isinstance(segment, ShardedSegment)
    return segment
