"""Copies between an accelerator and the host that overlap with computation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearstep.torch.offload.errors import CaptureError
from nearstep.torch.offload.mapped import PINNERS, mapped
from nearstep.torch.parameter import DeviceParameter

WORDS = {2: torch.int16, 4: torch.int32}
"""Integer dtypes by bytes: integer operations keep all bits, those of NaN included."""

Pinned = dict[int, tuple[Tensor, Callable[[], None]]]
"""Memory that is pinned, and what ends that, by address."""


class Arrival:
    """Synchronisation of the accelerator's streams with the upload of one parameter.

    Parameters
    ----------
    device : the accelerator. Its current stream owns the memory: allocation and free are in the
        order of that stream.
    event : the copy has ended; None without a copy.
    mapped : the pinned tensor of the host that the parameter is mapped to, if any.
    used : called with each stream that uses the memory.

    Attributes
    ----------
    is_compared : the owner finds changes by the program by a comparison with what was copied.
    staged : source of the copy in pinned memory, until `land`.
    """

    def __init__(
        self,
        device: torch.device,
        event: torch.Event | None = None,
        mapped: Tensor | None = None,
        used: Callable[[torch.Stream], None] = lambda _: None,
        staged: Tensor | None = None,
    ) -> None:
        self.staged = staged
        self.event = event
        self.is_compared = True
        self._device = device
        self._home = _current(device)
        self.mapped = mapped
        self._used = used
        self._met: set[torch.Stream] = set()

    def land(self, resident: DeviceParameter) -> None:
        """Mark the parameter as equal to the copied data."""
        if self.staged is not None:
            resident.arrived(self.staged if self.is_compared else None)
            self.staged = None

    def meet(self, parameter: Tensor) -> None:
        """Make the current stream wait for the copy, and record its use of the parameter's
        memory."""
        stream = _current(self._device)
        if stream in self._met:
            return
        if self.event is not None:
            stream.wait_event(self.event)
        if self.mapped is not None:
            _tell(self.mapped, self._device)
        elif stream != self._home:
            parameter.record_stream(stream)
        self._used(stream)
        self._met.add(stream)

    def gather(self) -> None:
        """Make the current stream wait for all other streams that used the memory, before a
        write."""
        stream = _current(self._device)
        for each in self._met - {stream}:
            stream.wait_stream(each)

    def leave(self) -> list[torch.Event]:
        """Return events after the last uses of the memory, if the memory is mapped from the
        host."""
        return [] if self.mapped is None else [each.record_event() for each in self._met]

    def drop(self) -> None:
        """Free the unused memory: make its stream wait for the copy before the memory is reused."""
        if self.event is not None:
            self._home.wait_event(self.event)


@dataclass(eq=False)
class Download:
    """A copy of a gradient to the host.

    Attributes
    ----------
    gradient : keeps the memory on the accelerator until the copy has ended; None if a kernel wrote
        the gradient to the host.
    staged : target, in pinned memory.
    event : the gradient is on the host.
    nbytes : bytes charged to the budget until then.
    gone : called then.
    """

    gradient: Tensor | None
    staged: Tensor
    event: torch.Event
    nbytes: int = 0
    gone: Callable[[], None] = lambda: None

    def wait(self) -> None:
        """Block the host until the gradient is on the host."""
        self.event.synchronize()


class Streams:
    """One stream for each direction, and the queue of downloads.

    An upload waits for all work launched before, which may still use the target's memory; a
    download waits for the kernels that make the gradient.

    Parameters
    ----------
    device : the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = torch.Stream(device=device), torch.Stream(device=device)
        self._departures: list[Download] = []
        self._users: set[torch.Stream] = set()
        self._vector: Tensor | None = None
        self._pinned: Pinned = {}

    def pins(self, array: NDArray[Any]) -> bool:
        """Pin the memory of an array until `close`, so that copies need no staging; return whether
        the type of accelerator can.

        Raises
        ------
        RuntimeError : the system cannot pin as much.
        """
        pin = PINNERS.get(self._device.type)
        if pin is None:
            return False
        if array.ctypes.data not in self._pinned:
            memory = torch.from_numpy(array.view(np.uint8))
            self._pinned[array.ctypes.data] = memory, pin(memory)
        return True

    def load_into(self, vector: Tensor | None) -> None:
        """Upload parameters to slices of this vector from now on; None: to memory of their own.

        Slices are reused: each upload waits for the work queued before on every stream.
        """
        self._vector = vector
        if vector is not None:
            for stream in (self._up, *self._users):
                vector.record_stream(stream)

    def _used(self, stream: torch.Stream) -> None:
        if stream not in self._users and self._vector is not None:
            self._vector.record_stream(stream)
        self._users.add(stream)

    def check_runs(self) -> None:
        """Raise `CaptureError` while the current stream is captured."""
        module = torch.get_device_module(self._device)
        is_captured = getattr(module, "is_current_stream_capturing", None)
        if is_captured is not None and is_captured():
            raise CaptureError(self._device)

    def join_when_gone(self, owner: object) -> None:
        """When `owner`, which has memory of running copies, is collected, make the current stream
        wait for both copy streams, so that the memory is reused only after the copies."""
        both = self._up, self._down
        weakref.finalize(owner, _join, self._device, both, self._pinned).atexit = False

    @property
    def departing_bytes(self) -> int:
        """Bytes of downloads that have not ended."""
        return sum(each.nbytes for each in self._departures)

    def staging(self, like: Tensor) -> Tensor:
        """Allocate pinned memory for a tensor of this shape, dtype and strides."""
        size = like.untyped_storage().nbytes() // like.element_size()
        flat = torch.empty(size, dtype=like.dtype, device="cpu", pin_memory=True)
        return flat.as_strided(like.size(), like.stride())

    def upload(self, staged: Tensor, target: Tensor) -> Arrival:
        """Begin to copy pinned memory to the accelerator."""
        self._up.wait_stream(_current(self._device))
        for stream in self._users if self._vector is not None else ():
            self._up.wait_stream(stream)
        with self._up:
            target.copy_(staged, non_blocking=True)
            event = self._up.record_event()
        return Arrival(self._device, event, used=self._used, staged=staged)

    def download(self, gradient: Tensor) -> Download:
        """Begin to copy a gradient to pinned memory."""
        gradient = gradient.resolve_neg()  # a copy would negate data not yet copied
        staged = torch.empty_like(gradient, device="cpu", pin_memory=True)
        self._down.wait_stream(_current(self._device))
        with self._down:
            staged.copy_(gradient, non_blocking=True)
            return Download(gradient, staged, self._down.record_event())

    def write(self, gradient: Tensor) -> Download:
        """Write a gradient to pinned, mapped memory by a kernel of the current stream, as integer
        words (`WORDS`), which keep all bits."""
        gradient = gradient.resolve_neg()
        staged = torch.empty_like(gradient, device="cpu", pin_memory=True)
        words = WORDS[gradient.element_size()]
        here = mapped(staged, self._device)
        torch.bitwise_or(gradient.view(words), 0, out=here.view(words))
        event = _current(self._device).record_event()
        _tell(staged, self._device)
        return Download(None, staged, event)

    def depart(self, download: Download, nbytes: int, gone: Callable[[], None]) -> None:
        """Queue a download: charge `nbytes` until the gradient is on the host, then call `gone`."""
        download.nbytes, download.gone = nbytes, gone
        self._departures.append(download)

    def reap(self) -> None:
        """Remove downloads that have ended."""
        for each in [each for each in self._departures if each.event.query()]:
            self._departures.remove(each)
            each.gone()

    def wait_for_room(self) -> None:
        """Wait for the oldest download."""
        self._departures[0].wait()
        self.reap()

    def finish(self) -> None:
        """Wait for all downloads."""
        while self._departures:
            self.wait_for_room()

    def close(self) -> None:
        """Wait for all copies, so that users of the memory need not wait."""
        self.finish()
        self._up.synchronize()
        _unpin(self._pinned)


def _join(device: torch.device, streams: Iterable[torch.Stream], pinned: Pinned) -> None:
    for each in streams:
        _current(device).wait_stream(each)
        if pinned:
            each.synchronize()
    _unpin(pinned)


def _unpin(pinned: Pinned) -> None:
    while pinned:
        _, end = pinned.popitem()[1]
        end()


def _tell(pinned: Tensor, device: torch.device) -> None:
    """Record the current stream's use of pinned memory by a small copy: the pinned allocator waits
    only for streams that copy."""
    first = pinned[(slice(1),) * pinned.dim()]
    first.to(device, non_blocking=True)


def _current(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)
