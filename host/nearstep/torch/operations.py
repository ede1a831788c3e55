"""Operations of a step: each piece is loaded, sent, run, stored and fetched on each channel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, zip_longest
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion
from nearstep.buffer import Buffer
from nearstep.placement import Extent, Launch, padded
from nearstep.run import Run
from nearstep.torch.exchange import Block, Piece, Results, Sends
from nearstep.torch.formats import copy_array, gradient_array
from nearstep.torch.homes.home import DeviceHome, Share, lane
from nearstep.torch.pair_space import PairList
from nearstep.torch.settings import Settings
from nearstep.torch.step import RunKey, StepPlan
from nearstep.updater.device import KernelDevice
from nearstep.updater.pairs import Pairs
from nearstep.updater.rounding import Rounding
from nearstep.work.graph import Graph
from nearstep.work.operation import Action, Operation, Range

Pieces = Sequence[Sequence[Piece]]
"""By channel: pieces, in the order in which the channel updates them."""

Lists = Mapping[tuple[Launch, int, int], PairList]
"""Compressed gradients of a run, by launch, first element, and channel."""


Begin = Callable[[int, Sequence[Callable[[], Run]]], Callable[[], Completion]]
"""Returns the start of runs on a channel, one after the other, from what starts each."""


class StepOperations:
    """Adds the operations of one step to a graph.

    Runs hold their channel, and transfers what `home.lanes` names: the channel, or on cards with
    drives lanes of the DMA engine.
    """

    def __init__(
        self,
        device: KernelDevice,
        home: DeviceHome,
        settings: Settings,
        plan: StepPlan,
        sends: Sends,
        lists: Lists,
        results: Results,
    ) -> None:
        self._device, self._home, self._settings = device, home, settings
        # Not the plan, whose items have gradients: a timeline keeps the operations of its step.
        self._arrays, self._arguments = plan.arrays, plan.arguments
        self._sends, self._lists, self._results = sends, lists, results
        self._lists_sent = False
        self._late: dict[int, Callable[[], None]] = {}
        self._sent: list[Operation] = []
        self._ran: list[Operation] = []
        self.graph = Graph()
        home.open(self.graph)

    def scan(self, launches: Sequence[Launch], begin: Begin) -> Mapping[int, Sequence[int]]:
        """Add operations that send all arrays and scan all gradients.

        Parameters
        ----------
        begin : returns the start of the runs of a channel.

        Returns
        -------
        Mapping[int, Sequence[int]] : indices of the scanned launches in `launches`, by channel, in
            the order of the channel's scans.
        """
        numbers: dict[int, list[int]] = {}

        def turn(channel: int) -> Iterator[None]:
            starts: list[Callable[[], Run]] = []
            gradients, own = [], numbers.setdefault(channel, [])
            for number, launch in enumerate(launches):
                block = Block(launch, launch.start, launch.stop)
                if not block.has(channel):
                    continue
                share = self._home.share(block, channel, number, ())
                self._send("", share)
                gradient = self._gradient(share)
                g = gradient.value if isinstance(gradient, Pairs) else gradient
                form = _key(share).gradient_format
                if g.size:
                    own.append(number)
                    starts.append(partial(self._device.scan, g, gradient_format=form))
                    gradients.append(g)
            yield
            if starts:
                self.graph.add(
                    "scan",
                    lane(channel),
                    reads=map(Range.of, gradients),
                    after=() if self._home.overlaps else self._sent,
                    action=begin(channel, starts),
                )

        self._take_turns(map(turn, range(self._device.channel_count)))
        return numbers

    def scanned(self) -> None:
        """Mark the arrays as sent."""
        self._sends.sent()
        self._lists_sent = True

    def executed(self) -> None:
        """Begin a new graph.

        The actions of the old graph refer to this object; if it referred to the graph, the cycle
        would keep the memory of a step until Python's collector runs.
        """
        self.graph, self._sent, self._ran = Graph(), [], []

    def update(
        self, number: int, *, work: Pieces, factor: float, begin: Begin
    ) -> Sequence[Operation]:
        """Add loads, sends, runs, stores and fetches of each channel's piece of this number.

        Parameters
        ----------
        factor : multiplies the gradients.
        begin : returns the start of the runs of a channel.
        """
        begun = len(self.graph)
        self._take_turns(
            self._update(number, channel, own[number], factor, begin)
            for channel, own in enumerate(work)
            if number < len(own)
        )
        return self.graph[begun:]

    def fetch_late(self) -> None:
        """Add the fetches that `update` has put off (`DeviceHome.fetches_late`)."""
        while self._late:
            self._late.pop(next(iter(self._late)))()

    def _update(
        self, number: int, channel: int, piece: Piece, factor: float, begin: Begin
    ) -> Iterator[None]:
        home, graph = self._home, self.graph
        shares = [
            home.share(
                block,
                channel,
                number,
                home.states(self._arrays[cast(RunKey, block.launch.key).group]),
            )
            for block in piece
            if block.has(channel)
        ]
        if not shares:
            return
        if channel in self._late:
            self._late.pop(channel)()
        for share in shares:
            form = _key(share).gradient_format
            kept = None if self._listed(share) is not None else gradient_array(form)
            home.load(graph, share, gradient=kept)
            self._send(str(number), share)
        yield
        reads: list[Range] = []
        writes: list[Range] = []
        starts: list[Callable[[], Run]] = []
        for share in shares:
            gradient = self._gradient(share)
            pairs = isinstance(gradient, Pairs)
            given = [gradient.index, gradient.value] if isinstance(gradient, Pairs) else [gradient]
            reads += map(Range.of, given)
            rest = (each for each in share.parts.values() if pairs or each is not gradient)
            writes += map(Range.of, rest)
            starts += [self._start(share, gradient, factor)] * _key(share).times
        run = graph.add(
            f"run {number}",
            *home.holds(channel, lane(channel)),
            reads=reads,
            writes=writes,
            after=() if home.overlaps else self._sent,
            action=home.running(begin(channel, starts), shares),
        )
        self._ran.append(run)
        for share in shares:
            home.store(graph, share)
        yield
        if home.fetches_late:
            self._late[channel] = partial(self._fetch, str(number), shares)
        else:
            self._fetch(str(number), shares)

    def _start(self, share: Share, gradient: Buffer | Pairs, factor: float) -> Callable[[], Run]:
        """Return a function that starts a group's rule on a share."""
        key, settings = _key(share), self._settings
        found = self._arguments[key.group, key.phase]
        arrays = {**share.parts, "g": gradient}
        options: dict[str, Any] = {
            "gradient_format": key.gradient_format,
            "gradient_scale": -factor if key.negate else factor,
        }
        if settings.stochastic:
            segment, start = share.block.launch.segment, share.block.start
            numbering = segment.numbering(start, share.channel)
            options["rounding"] = Rounding(seed=settings.rounding_seed, numbering=numbering)
        if key.copy_format is not None:
            options["copy_out"] = arrays[copy_array(key.copy_format)]
            options["copy_out_format"] = key.copy_format
        wanted = {name: arrays[name] for name in found.form.rule.arrays_in}
        return partial(self._device.run_rule, found, wanted, **options)

    def _take_turns(self, turns: Iterable[Iterator[None]]) -> None:
        """Add the operations of each channel: one channel after the other where transfers overlap
        runs; else the transfers of all, the runs of all, the fetches of all."""
        if self._home.overlaps:
            for turn in turns:
                for _ in turn:
                    pass
        else:
            for _ in zip_longest(*turns):
                pass

    def _send(self, name: str, share: Share) -> None:
        """Add transfers of what the host sends to one block: parameters and gradients, whole or as
        pairs."""
        block = share.block
        for cut in self._sends.cut(block.launch.segment, block.start, block.stop):
            room = self._room(share, cut.array, cut.start, cut.stop)
            if room.size:
                data = partial(cut.data, share.channel, room.size)
                self._write(f"{cut.array} {name}", share, room, data)
        pairs = self._listed(share)
        if pairs is not None and not self._lists_sent:
            for room, listed in pairs.writes(lines=self._home.overlaps):
                self._write(f"pairs {name}", share, room, partial(np.asarray, listed))

    def _write(
        self, name: str, share: Share, room: Buffer, data: Callable[[], NDArray[Any]]
    ) -> None:
        home = self._home
        self._sent.append(
            self.graph.add(
                f"send {name}".strip(),
                *home.holds(share.channel, *home.lanes(share.channel, down=True)),
                writes=[Range.of(room)],
                action=lambda: home.write(room, data()),
                transfer=home.transfer(share.channel, room, down=True),
            )
        )

    def _fetch(self, name: str, shares: Sequence[Share]) -> None:
        home, results, order = self._home, self._results, count()
        for share in shares:
            array = _key(share).result
            if array not in share.rooms:
                continue
            fetches: list[tuple[Buffer, Action]] = []
            for start, stop, extents in results.runs(share.block, alone_from=home.alone_from):
                room = self._room(share, array, start, stop)
                if not room.size:
                    continue
                whole = results.is_whole(start, stop, extents)
                read = partial(self._read, share, array, extents)
                action = partial(home.fetch, read, share, start, stop, whole=whole)
                fetches.append((room, action))
            stripes = share.block.launch.segment.stripes
            if fetches and not home.overlaps and stripes.channels == 1:  # faster than one by one
                fetches = [(share.rooms[array], partial(_in_turn, [each for _, each in fetches]))]
            for room, fetch in fetches:
                # A result is stored, and freed, when the parts of all channels have been fetched.
                priority = home.fetch_priority if home.overlaps else next(order)
                self.graph.add(
                    f"fetch {array} {name}",
                    *home.holds(share.channel, *home.lanes(share.channel, down=False)),
                    reads=[Range.of(room)],
                    after=(*home.looked, *(() if home.overlaps else self._ran)),
                    action=fetch,
                    priority=priority,
                    transfer=home.transfer(share.channel, room, down=False),
                )

    def _read(
        self,
        share: Share,
        array: str,
        extents: Sequence[Extent],
        start: int,
        stop: int,
    ) -> Completion:
        """Begin to fetch elements [start, stop) of a segment into the results."""
        room, results = self._room(share, array, start, stop), self._results
        target = results.memory(start, stop, extents)
        if target is not None:
            done = partial(results.filled, start, stop, extents)
            return self._home.read(room[: stop - start], target, done)
        out = self._home.scratch(room.size, room.dtype)
        return self._home.read(
            room, out, partial(results.put, start, stop, extents, share.channel, out)
        )

    def _room(self, share: Share, array: str, start: int, stop: int) -> Buffer:
        """A channel's elements [start, stop) of an array; whole lines where transfers overlap."""
        segment = share.block.launch.segment
        end = padded(stop, segment.line) if self._home.overlaps else stop
        low, high = segment.stripes.span(start, end, share.channel)
        room = share.rooms[array]
        return room[low - share.first : min(high - share.first, room.size)]

    def _listed(self, share: Share) -> PairList | None:
        return self._lists.get((share.block.launch, share.block.start, share.channel))

    def _gradient(self, share: Share) -> Buffer | Pairs:
        listed = self._listed(share)
        if listed is not None:
            return listed.pairs
        return share.parts[gradient_array(_key(share).gradient_format)]


def _in_turn(actions: Iterable[Action]) -> None:
    """Execute actions one after the other, on a device without a clock."""
    for action in actions:
        completion = action()
        if completion is not None:
            completion.wait()


def _key(share: Share) -> RunKey:
    return cast(RunKey, share.block.launch.key)
