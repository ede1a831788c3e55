"""The home of arrays in device memory: memory for a block, and its transfers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearstep.backends.base import ChainedCompletion, Completion
from nearstep.buffer import Buffer
from nearstep.placement import Arenas, Launch, Segment, padded
from nearstep.torch import convert
from nearstep.torch.exchange import SMALL_ELEMENTS, Block, Piece, pieces
from nearstep.torch.formats import Formats
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.traffic import Traffic
from nearstep.updater.device import KernelDevice
from nearstep.work.clock import Clock
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Transfer

FEWEST = 1 << 14
"""A step of n * FEWEST elements is cut into sqrt(n) pieces.

No run overlaps the first transfer: with smaller pieces the first run starts earlier. But each piece
costs two changes of mode and a start, about 1,000 cycles: on a DIMM of DDR4-1600 the time of a
transfer of about 8,000 elements."""

BUS = "bus"
"""Resource that each transfer of a device holds: transfers are sequential."""


def lane(channel: int) -> str:
    """Return the name of a channel as a resource."""
    return f"channel {channel}"


class Share(NamedTuple):
    """A channel's share of a block, in memory of the device.

    Attributes
    ----------
    number : of the piece in the step.
    first : the channel's first element of the block in the segment.
    rooms : buffers for transfers, by array; may extend to the end of the last element's line.
    parts : buffers for runs, by array: the elements of the block alone.
    states : arrays that the home loads and stores.
    """

    block: Block
    channel: int
    number: int
    first: int
    rooms: Arenas
    parts: Arenas
    states: Sequence[str]


class DeviceHome:
    """Arrays are kept in the memory of the device, whose kernels update them there.

    On a device with a clock and several channels, transfers to one channel overlap runs of the
    others: the launches of a step are cut into pieces; for each piece gradients are sent, the rule
    runs, and parameters are fetched, channel by channel. Otherwise a step is one piece; without a
    clock everything is sent, then everything runs, then everything is fetched.

    Parameters
    ----------
    overlaps : None: True if the device has a clock.

    Attributes
    ----------
    overlaps : transfers are added between runs. False: everything is sent before the first run, and
        everything runs before the first fetch.
    at_once : large arrays are sent when the step is prepared, each by itself.
    alone_from : elements of arrays that are fetched alone; None: neighbours of any size are fetched
        together.
    direct : results are written to the memory of the parameters: nothing can fail after the first
        fetch, or the home can roll back.
    fetches_late : results of a piece are fetched before the channel's next piece is sent.
    ahead : number of pieces that are added before the first has ended; None: all.
    looked : operations that must end before fetches start.
    fingerprints : sum a large result while it is fetched, since the device cannot compare the
        parameter with the host's later.
    is_durable : steps are committed to drives; arrays in device memory are evicted, so the device
        cannot compare them with the host's.
    keeps_masters : parameters outlast device memory.
    """

    direct = at_once = fingerprints = False
    is_durable = keeps_masters = False
    fetches_late = True
    fetch_priority = 0
    alone_from: int | None = None
    ahead: int | None = None
    looked: Sequence[Operation] = ()

    def __init__(
        self,
        device: KernelDevice,
        formats: Formats,
        traffic: Traffic,
        *,
        overlaps: bool | None = None,
    ) -> None:
        self._device = device
        self._formats = formats
        self._traffic = traffic
        self.overlaps = device.cycles is not None if overlaps is None else overlaps
        if not self.overlaps:
            self.direct, self.at_once, self.alone_from = True, True, SMALL_ELEMENTS
            self.fetches_late = False

    @property
    def cut(self) -> int | None:
        """Elements of the smallest piece that launches are cut into; None: they are not cut."""
        return self._rounded(1) if self.overlaps and self._device.channel_count > 1 else None

    def clock(self) -> Clock:
        """Return a new clock of the device."""
        return Clock([self._device.backend])

    def pieces(
        self, launches: Sequence[Launch], *, whole: bool, transfers: bool
    ) -> Sequence[Sequence[Piece]]:
        """Return the pieces of each channel.

        The first pieces grow from channel to channel, so that later the channels do not want the
        bus at the same time.

        Parameters
        ----------
        whole : do not cut launches.
        transfers : arrays are sent or fetched, and these transfers can overlap runs; else one piece
            is enough.
        """
        size, channels = None, self._device.channel_count
        if self.cut is not None and transfers:
            total = sum(launch.count for launch in launches)
            size = max(self.cut, self._rounded(math.isqrt(total * FEWEST)))
        return [
            pieces(launches, size, (size or 0) * (channel + 1) // channels, whole=whole)
            for channel in range(channels)
        ]

    def _rounded(self, elements: int) -> int:
        """Round up to whole stripes, equally many on each channel."""
        turn = self._device.stripe_bytes // 4 * self._device.channel_count
        return -(-elements // turn) * turn

    def share(self, block: Block, channel: int, number: int, states: Sequence[str]) -> Share:
        """Return the memory of a channel's share of a block."""
        launch, segment = block.launch, block.launch.segment
        whole = block.start == launch.start and block.stop == launch.stop
        parts = launch.parts if whole else launch.cut(block.start, block.stop)
        first, last = segment.stripes.span(block.start, padded(block.stop, segment.line), channel)
        rooms = {
            name: array[first:last]
            for name, array in segment.arenas[channel].items()
            if not segment.is_quantized(name)
        }
        return Share(block, channel, number, first, rooms, parts[channel], states)

    def states(self, arrays: Mapping[str, float]) -> Sequence[str]:
        """Return the arrays of a rule to load and store, the parameters first."""
        return ()

    def open(self, graph: Graph) -> None:
        """Begin a step; add operations that must end before fetches start."""

    def load(self, graph: Graph, share: Share, *, gradient: str | None) -> None:
        """Add operations that load the states of a share, and a gradient kept by the home."""

    def store(self, graph: Graph, share: Share) -> None:
        """Add operations that store the states of a share."""

    def begin(self) -> None:
        """Prepare for the start of the operations; the graph has those of the first pieces."""

    def close(self) -> None:
        """End the step, complete or failed."""

    def segments_of(
        self,
        groups: Sequence[Mapping[str, Any]],
        parameters: Sequence[Tensor],
        arrays: Mapping[str, float],
        labels: Mapping[Tensor, str],
        *,
        narrow: bool,
    ) -> Sequence[tuple[Segment, Sequence[Tensor]]]:
        """Make segments for new parameters.

        Returns
        -------
        Sequence[tuple[Segment, Sequence[Tensor]]] : each segment with its parameters, in order.
        """
        formats = self._formats
        line = formats.line(narrow=narrow)
        size = sum(padded(convert.size(p), line) for p in parameters)
        segment = Segment(self._device, size, line, formats.dtypes, formats.quantized)
        return [(segment, parameters)]

    def kept(self, arrays: Mapping[str, float]) -> Mapping[str, float]:
        """Return the columns to allocate with the segment."""
        return arrays

    def add(self, segment: Segment, parameters: Sequence[DeviceParameter]) -> None:
        """Register the parameters of a segment."""

    def holds(self, channel: int, *lanes: str) -> Sequence[str]:
        """Return the resources of an operation on a channel."""
        return lanes

    def lanes(self, channel: int, *, down: bool) -> Sequence[str]:
        """Return the resources of a transfer between the host and a channel."""
        return BUS, lane(channel)

    def transfer(self, channel: int, room: Buffer, *, down: bool) -> Transfer | None:
        """Return the shared links of a transfer, where links are modelled; else None."""
        return None

    def write(self, room: Buffer, data: NDArray[Any]) -> Completion | None:
        """Begin to send data."""
        return room.submit_write(data)

    def read(self, room: Buffer, out: NDArray[Any], done: Callable[[], None]) -> Completion:
        """Begin to fetch data into `out`; call `done` at the end."""
        return ChainedCompletion(room.submit_read(out), done)

    def scratch(self, size: int, dtype: np.dtype) -> NDArray[Any]:
        """Return host memory for a transfer."""
        return np.empty(size, dtype)

    def fetch(
        self,
        read: Callable[[int, int], Completion],
        share: Share,
        start: int,
        stop: int,
        *,
        whole: bool,
    ) -> Completion | None:
        """Fetch elements [start, stop) of a segment.

        Parameters
        ----------
        read : begins to fetch a range of the elements.
        whole : fetch the elements into the memory of a parameter.
        """
        return read(start, stop)

    def running(
        self, begin: Callable[[], Completion], shares: Sequence[Share]
    ) -> Callable[[], Completion]:
        """Return the function that begins runs on these shares."""
        return begin
