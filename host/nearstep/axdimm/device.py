"""Driver of an AXDIMM: its Adam kernel as a callable."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real

import numpy as np

from nearstep.axdimm.channel import NORMAL, Channel
from nearstep.axdimm.run import AdamRun
from nearstep.backends.base import Backend
from nearstep.buffer import Buffer
from nearstep.device import Device
from nearstep.errors import (
    AlignmentError,
    ArgumentError,
    BusyError,
    DeviceError,
    DtypeError,
    ForeignBufferError,
    MismatchError,
    OutOfBoundsError,
    OverlapError,
    ShapeError,
)
from nearstep.registers import Registers
from nearstep_hw.axdimm.config import AdamKernelConfig
from nearstep_hw.axdimm.dimm import DimmConfig
from nearstep_hw.axdimm.registers import ARRAYS, device_maps, update_rule
from nearstep_hw.dram.geometry import BEAT_BYTES
from nearstep_hw.rule.adam import ORDERS

READ_ONLY = frozenset({"g"})
"""Arrays that the kernel does not write."""

STEPS = 1 << 63
"""A step count is below it, so that powers of the betas can be taken."""


class AxdimmDevice(Device):
    """An AXDIMM: one Adam kernel near the memory of each channel.

    On a DIMM with arbiters a channel is in one of two modes. In normal mode the host reads and
    writes its memory; in acceleration mode, inside ``with dimm.acceleration(channel):``, its kernel
    does, and the host's reads and writes raise :class:`ModeError`. Channels are independent. A
    device without arbiters (``memory=ideal``) has one channel whose kernel may always be started.

    Memory is reached through :meth:`Buffer.read` and :meth:`Buffer.write` alone, which move whole
    64-byte lines and have moved them when they return: no cached copy exists that could be stale,
    or still has to be flushed.

    Parameters
    ----------
    backend: Backend
    url: str

    Attributes
    ----------
    regs: Registers
        Registers as objects: ``dev.regs.adam0.status.busy``, ``dev.regs.arbiter1.mode``.
    channels: Sequence[Channel]
    dimm: DimmConfig | None
        What the DIMM consists of; None on a device without arbiters.

    Raises
    ------
    MismatchError
        The registers are not those of the backend's configuration.

    Ref: AXDIMM, sections 3.1 to 3.3, 4.1 and 4.2.
    """

    def __init__(self, backend: Backend, url: str) -> None:
        super().__init__(backend, url)
        config = backend.config
        self.dimm = config if isinstance(config, DimmConfig) else None
        if isinstance(config, DimmConfig):
            self.config, maps = config.kernel, config.maps()
        elif isinstance(config, AdamKernelConfig):
            self.config, maps = config, device_maps(config)
        else:
            raise MismatchError("configuration", "of an AXDIMM", f"a {type(config).__name__}")
        self.regs = Registers(backend, maps)
        if self.config.windows < len(ARRAYS):
            raise MismatchError("windows", f"at least {len(ARRAYS)}", self.config.windows)
        self.channels = tuple(
            Channel(
                backend,
                number,
                base,
                self.regs[f"adam{number}"],
                None if self.dimm is None else self.regs[f"arbiter{number}"],
            )
            for number, (base, _) in enumerate(backend.regions)
        )

    @property
    def stripe_bytes(self) -> int:
        return self.config.block_bytes

    @property
    def stripe_align(self) -> int:
        if self.dimm is None:
            return super().stripe_align
        return self.dimm.geometry.banks * BEAT_BYTES  # arrays then begin in the same bank

    @contextmanager
    def acceleration(self, *channels: int) -> Iterator[None]:
        """Acceleration mode of these channels, of all if none is named, for a ``with`` statement.

        At its end runs that have not ended are waited for, or aborted if it ends with an exception;
        then the host has the channels back.

        Raises
        ------
        ArgumentError
            There is no such channel, or one is named twice.
        ModeError
            One is in acceleration mode already.
        WaitTimeoutError
            A change of mode, or a run, did not end.
        KernelError, MemoryFaultError, ProtocolError
            From a run that was waited for at the end.
        ClosedDeviceError
        """
        self.check_open("enter acceleration mode")
        for number in channels:
            self.check_channel(number)
        if len(set(channels)) != len(channels):
            raise ArgumentError(f"channels must be named once, not {channels}")
        chosen = [self.channels[number] for number in channels] or list(self.channels)
        for channel in chosen:
            channel.check_mode("enter acceleration mode", NORMAL)
        try:
            for channel in chosen:
                channel.enter()
            yield
        except BaseException as error:
            self._leave(chosen, error)
            raise
        self._leave(chosen, None)

    def _leave(self, channels: Sequence[Channel], failed: BaseException | None) -> None:
        """Leave acceleration mode on every channel; the first error counts."""
        if self.closed:
            return
        first: DeviceError | None = None
        for channel in channels:
            try:
                channel.leave(failed=failed is not None)
            except DeviceError as error:
                first = first or error
        if failed is not None and first is not None:
            failed.add_note(f"then, on the way back to normal mode: {first}")
        elif first is not None:
            raise first

    def adam(
        self,
        p: Buffer,
        g: Buffer,
        m: Buffer,
        v: Buffer,
        *,
        step: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> AdamRun:
        """Start an Adam step, p, m and v in place, and return at once.

        Parameters
        ----------
        p, g, m, v: Buffer
            Parameters, gradients, first and second moments: float32, of one size, on this device,
            on one channel, each starting on a beat of the memory port (64 bytes with 16 lanes),
            without overlap.
        step: int
            t, from 1.
        lr, betas, eps, weight_decay: float
            As in ``torch.optim.Adam``.
        decoupled: bool
            AdamW's weight decay instead of L2 regularisation.

        Raises
        ------
        ArgumentError
            An argument is wrong (AlignmentError, OverlapError, DtypeError, ShapeError,
            ForeignBufferError, FreedBufferError); the device was not touched.
        ModeError
            The channel is not in acceleration mode.
        BusyError
            The run before this one on the channel has not ended.
        ClosedDeviceError
        """
        self.check_open("run adam")
        buffers = dict(zip(ARRAYS, (p, g, m, v), strict=True))
        channel = self._check_buffers(buffers)
        _check_hyperparameters(step, lr, betas, eps, weight_decay)
        _, scalars_of = ORDERS[self.config.order]
        scalars = scalars_of(lr, betas, eps, weight_decay, step, decoupled)
        _check_scalars(scalars, f"{lr=}, {betas=}, {eps=}, {weight_decay=}, {step=}")
        channel.check_ready("run adam")
        if channel.run is not None and not channel.run.ended:
            raise BusyError(
                f"cannot run adam: {channel.run.what} has not ended",
                registers=channel.kernel.dump(),
            )
        self._configure(channel, buffers, scalars)
        channel.kernel.start.go = 1
        channel.run = AdamRun(
            self.backend,
            channel.kernel,
            buffers,
            lanes=self.config.lanes,
            channel=channel.number,
            base=channel.base,
            reset=channel.reset_kernel,
        )
        return channel.run

    def check_reach(self, buffer: Buffer, action: str) -> None:
        channel = self.channels[self.channel_of(buffer)]
        if channel.accelerated:
            channel.check_mode(f"{action} {buffer!r}", NORMAL)

    def check_unused(self, buffer: Buffer, action: str, *, changes: bool) -> None:
        channel = self.channels[self.channel_of(buffer)]
        run = channel.run
        if run is None:
            return
        names = [name for name in run.sharing(buffer) if changes or name not in READ_ONLY]
        if names and not run.ended:
            raise BusyError(
                f"cannot {action} {buffer!r}: {run.what}, which uses it as {', '.join(names)}, "
                "has not ended",
                registers=channel.kernel.dump(),
            )

    def reset(self) -> None:
        """Hard reset of the kernels and of their paths to memory. Runs in progress are lost, and
        every channel is in normal mode."""
        super().reset()
        for channel in self.channels:
            channel.forget("the device was reset")

    def _configure(
        self,
        channel: Channel,
        buffers: Mapping[str, Buffer],
        scalars: Mapping[str, float | int],
    ) -> None:
        kernel = channel.kernel
        for name, buffer in buffers.items():
            kernel[f"{name}_address"].value = buffer.address - channel.base
        kernel.count.value = buffers["p"].size
        rule = update_rule(self.config)
        for name in rule.scalars:
            kernel[name].value = float(scalars[name])
        kernel.mode.set(**{name: int(scalars[name]) for name in rule.switches})
        for index, (name, buffer) in enumerate(buffers.items()):
            self._grant(channel, index, buffer, write=name not in READ_ONLY)

    def _grant(self, channel: Channel, index: int, buffer: Buffer, *, write: bool) -> None:
        """Open a window for the whole beats of a buffer."""
        kernel = channel.kernel
        beat = self.config.beat_bytes
        first = buffer.address - channel.base
        kernel[f"window{index}_base"].value = first
        kernel[f"window{index}_limit"].value = -(-(first + buffer.nbytes) // beat) * beat
        permissions = kernel[f"window{index}_permissions"]
        permissions.set(read=1, write=int(write), valid=1)

    def _check_buffers(self, buffers: Mapping[str, Buffer]) -> Channel:
        """The channel that all of them lie on, if they can be those of a run."""
        size = buffers["p"].size
        beat = self.config.beat_bytes
        for name, buffer in buffers.items():
            if not isinstance(buffer, Buffer):
                raise DtypeError(name, "Buffer", type(buffer).__name__)
            if buffer.device is not self:
                raise ForeignBufferError(name, self.url, buffer.device.url)
            buffer.check_usable("run adam on")
            if buffer.dtype != np.float32:
                raise DtypeError(name, "float32", buffer.dtype)
            if buffer.size != size:
                raise ShapeError(name, f"of {size} elements like p", f"of {buffer.size}")
            channel = self.channels[self.channel_of(buffer)]
            if buffer.address % beat:
                raise AlignmentError(name, buffer.address, beat)
            begin = buffer.address - channel.base
            if begin + buffer.nbytes > 1 << self.config.address_width:
                end = begin + buffer.nbytes
                raise OutOfBoundsError(name, begin, end, 1 << self.config.address_width)
        for (first, one), (second, other) in itertools.combinations(buffers.items(), 2):
            address = max(one.address, other.address)
            if address < min(one.address + one.nbytes, other.address + other.nbytes):
                raise OverlapError(first, second, address)
        numbers = {name: self.channel_of(buffer) for name, buffer in buffers.items()}
        if len(set(numbers.values())) > 1:
            raise ArgumentError(f"arrays of a run must lie on one channel, not on {numbers}")
        return self.channels[numbers["p"]]


def _check_hyperparameters(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    if isinstance(step, bool | np.bool_) or not isinstance(step, int | np.integer):
        raise ArgumentError(f"step must be an integer, not {step!r}")
    if not 1 <= step < STEPS:
        raise ArgumentError(f"step must be at least 1 and below 2**63, not {step}")
    for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
        if not (math.isfinite(_number(name, value)) and value >= 0.0):
            raise ArgumentError(f"{name} must be finite and not negative, not {value}")
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ArgumentError(f"betas must be two numbers in [0, 1), not {betas!r}")
    if not all(0.0 <= _number("betas", beta) < 1.0 for beta in betas):
        raise ArgumentError(f"betas must be two numbers in [0, 1), not {betas}")


def _number(name: str, value: object) -> float:
    """``value`` if it is a real number; a text or a truth value is none."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise ArgumentError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_scalars(scalars: Mapping[str, float | int], given: str) -> None:
    """Binary32 registers must hold what follows from the arguments."""
    for name, value in scalars.items():
        with np.errstate(over="ignore"):
            fits = bool(np.isfinite(np.float32(value)))
        if not fits:
            raise ArgumentError(f"register {name} would overflow binary32 with {given}")
