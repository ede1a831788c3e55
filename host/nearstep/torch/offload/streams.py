"""Copies between an accelerator and the host beside what the accelerator computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nearstep.torch.offload.errors import CaptureError
from nearstep.torch.offload.mapped import mapped
from nearstep.torch.parameter import DeviceParameter

WORDS = {2: torch.int16, 4: torch.int32}
"""Integers by their bytes: what has their bits whole, whatever number it may be."""


class Arrival:
    """What a stream of the accelerator waits for before it uses the memory of a parameter.

    Parameters
    ----------
    device : the accelerator. Its current stream is that in whose order the memory came, and goes.
    event : of a copy, what goes there is there.
    mapped : what the memory is on, if it is the host's.
    used : called with each stream that uses the memory.

    Attributes
    ----------
    staged : what is copied there, in pinned memory, until `land`.
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
        self._device = device
        self._home = _current(device)
        self._event = event
        self._mapped = mapped
        self._used = used
        self._met: set[torch.Stream] = set()

    def land(self, resident: DeviceParameter) -> None:
        """The parameter is what is copied there."""
        if self.staged is not None:
            resident.arrived(self.staged)
            self.staged = None

    def meet(self, parameter: Tensor) -> None:
        """Have what the current stream does from now on come after the copy, and the memory, which
        is the parameter's, be others' only after that."""
        stream = _current(self._device)
        if stream in self._met:
            return
        if self._event is not None:
            stream.wait_event(self._event)
        if self._mapped is not None:
            _tell(self._mapped, self._device)
        elif stream != self._home:
            parameter.record_stream(stream)
        self._used(stream)
        self._met.add(stream)

    def gather(self) -> None:
        """Have what the current stream does from now on come after what others did with the memory,
        which it writes, while the host waits."""
        stream = _current(self._device)
        for each in self._met - {stream}:
            stream.wait_stream(each)

    def leave(self) -> list[torch.Event]:
        """The memory is used no more: what comes when streams have done with that of the host."""
        return [] if self._mapped is None else [each.record_event() for each in self._met]

    def drop(self) -> None:
        """Nobody has met it: the memory may be another's, but after the copy."""
        if self._event is not None:
            self._home.wait_event(self._event)


@dataclass(eq=False)
class Download:
    """A gradient on its way to the host.

    Attributes
    ----------
    gradient : its memory on the accelerator stays until it is on the host; None of one that its
        own stream has written.
    staged : where it goes, in pinned memory.
    event : it is there.
    nbytes : that count until it is.
    gone : called then.
    """

    gradient: Tensor | None
    staged: Tensor
    event: torch.Event
    nbytes: int = 0
    gone: Callable[[], None] = lambda: None

    def wait(self) -> None:
        """Have the host wait for it."""
        self.event.synchronize()


class Streams:
    """A stream for each direction, and what departs.

    A copy to the accelerator comes after all that was launched before it began, as its memory was
    others' until then; a copy to the host after what made the gradient.

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

    def load_into(self, vector: Tensor | None) -> None:
        """Copy parameters to parts of this from here on; None: to memory of their own.

        The parts are used again and again: each copy comes after what any stream has been given
        before it.
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
        """When `owner` is gone, which has memory that copies are under way to and from, have that
        memory be others' after them."""
        both = self._up, self._down
        weakref.finalize(owner, _join, self._device, both).atexit = False

    @property
    def departing_bytes(self) -> int:
        """Of gradients that are on their way."""
        return sum(each.nbytes for each in self._departures)

    def staging(self, like: Tensor) -> Tensor:
        """Pinned memory for a tensor of this shape, dtype and strides."""
        size = like.untyped_storage().nbytes() // like.element_size()
        flat = torch.empty(size, dtype=like.dtype, device="cpu", pin_memory=True)
        return flat.as_strided(like.size(), like.stride())

    def upload(self, staged: Tensor, target: Tensor) -> Arrival:
        """Begin to copy pinned memory to that of the accelerator."""
        self._up.wait_stream(_current(self._device))
        for stream in self._users if self._vector is not None else ():
            self._up.wait_stream(stream)
        with self._up:
            target.copy_(staged, non_blocking=True)
            event = self._up.record_event()
        return Arrival(self._device, event, used=self._used, staged=staged)

    def download(self, gradient: Tensor) -> Download:
        """Begin to copy a gradient to pinned memory."""
        gradient = gradient.resolve_neg()  # a copy would negate what is not there yet
        staged = torch.empty_like(gradient, device="cpu", pin_memory=True)
        self._down.wait_stream(_current(self._device))
        with self._down:
            staged.copy_(gradient, non_blocking=True)
            return Download(gradient, staged, self._down.record_event())

    def write(self, gradient: Tensor) -> Download:
        """Have a kernel of the current stream write a gradient to pinned, mapped memory: all of its
        bits, as words, and not by a copy."""
        gradient = gradient.resolve_neg()
        staged = torch.empty_like(gradient, device="cpu", pin_memory=True)
        words = WORDS[gradient.element_size()]
        here = mapped(staged, self._device)
        torch.bitwise_or(gradient.view(words), 0, out=here.view(words))
        event = _current(self._device).record_event()
        _tell(staged, self._device)
        return Download(None, staged, event)

    def depart(self, download: Download, nbytes: int, gone: Callable[[], None]) -> None:
        """Count bytes until a gradient is on the host, and call `gone` then."""
        download.nbytes, download.gone = nbytes, gone
        self._departures.append(download)

    def reap(self) -> None:
        """Count no more what is on the host."""
        for each in [each for each in self._departures if each.event.query()]:
            self._departures.remove(each)
            each.gone()

    def wait_for_room(self) -> None:
        """Wait until one more gradient is on the host."""
        self._departures[0].wait()
        self.reap()

    def finish(self) -> None:
        """Wait until all are."""
        while self._departures:
            self.wait_for_room()

    def close(self) -> None:
        """Wait for all copies: whoever uses the memory need not."""
        self.finish()
        self._up.synchronize()


def _join(device: torch.device, streams: Iterable[torch.Stream]) -> None:
    for each in streams:
        _current(device).wait_stream(each)


def _tell(pinned: Tensor, device: torch.device) -> None:
    """Have pinned memory be others' only after what the current stream has been given so far and
    until it goes: allocators of it hear of copies alone, and wait for the streams of these."""
    first = pinned[(slice(1),) * pinned.dim()]
    first.to(device, non_blocking=True)


def _current(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)
