"""What a device with update kernels does: its update rules as callables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

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
from nearstep.kernel.channel import KernelChannel
from nearstep.kernel.checks import check_hyperparameters, check_scalars
from nearstep.kernel.gradient import Gradient
from nearstep.kernel.run import UpdateRun
from nearstep.registers import Registers
from nearstep_hw.axdimm.config import AdamKernelConfig
from nearstep_hw.axdimm.registers import GradientFormat
from nearstep_hw.rule.adagrad import adagrad_scalars
from nearstep_hw.rule.adam import ORDERS
from nearstep_hw.rule.scale import GRADIENT, GRADIENT_SCALE
from nearstep_hw.rule.sgd import sgd_momentum_scalars, sgd_scalars

BEATS_PER_LANE_GROUP = 7
"""Beats for each beat of parameters: p, g, m, v read, and p, m, v written."""

READ_ONLY = frozenset({GRADIENT})
"""Arrays that the kernel does not write."""


class KernelDevice(Device):
    """A device with one update kernel for each memory channel. Families derive from it.

    Parameters
    ----------
    backend: Backend
    url: str
    config: AdamKernelConfig
        Of each kernel.
    regs: Registers
    channels: Sequence[KernelChannel]

    Raises
    ------
    MismatchError
        The kernel has fewer windows than arrays.
    """

    def __init__(
        self,
        backend: Backend,
        url: str,
        config: AdamKernelConfig,
        regs: Registers,
        channels: Sequence[KernelChannel],
    ) -> None:
        super().__init__(backend, url)
        self.config = config
        self.regs = regs
        self.channels = tuple(channels)
        arrays = len(config.arrays)
        if config.windows < arrays:
            raise MismatchError("windows", f"at least {arrays}", config.windows)

    @property
    def stripe_bytes(self) -> int:
        return self.config.block_bytes

    @contextmanager
    def acceleration(self, *channels: int) -> Iterator[None]:
        """The memory of these channels, of all if none is named, for their kernels, in a ``with``
        statement: acceleration mode, on a device that has modes.

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
            channel.check_enter()
        try:
            for channel in chosen:
                channel.enter()
            yield
        except BaseException as error:
            self._leave(chosen, error)
            raise
        self._leave(chosen, None)

    def _leave(self, channels: Sequence[KernelChannel], failed: BaseException | None) -> None:
        """Leave acceleration mode on every channel, whatever happens; the first error counts."""
        if self.closed:
            return
        first: BaseException | None = None
        for channel in channels:
            try:
                interrupted = not isinstance(first, DeviceError | None)
                channel.leave(failed=failed is not None or interrupted)
            except BaseException as error:  # Ctrl-C too: the other channels still have to leave
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
        gradient_format: str | None = None,
        gradient_scale: float = 1.0,
    ) -> UpdateRun:
        """Start an Adam step, p, m and v in place, and return at once.

        Parameters
        ----------
        p, g, m, v: Buffer
            Parameters, gradients, first and second moments: float32, of one size, on this device,
            on one channel, each starting on a beat of the memory port (64 bytes with 16 lanes),
            without overlap. Where the kernel has the format, g may be float16, or uint16 that
            holds bfloat16.
        step: int
            t, from 1.
        lr, betas, eps, weight_decay: float
            As in ``torch.optim.Adam``.
        decoupled: bool
            AdamW's weight decay instead of L2 regularisation.
        gradient_format: str, optional
            ``fp32``, ``fp16`` or ``bf16``. None is that of g's dtype; ``bf16`` must be named, and
            g be uint16 then.
        gradient_scale: float
            Every gradient is multiplied by it, rounded to binary32 once, before anything else.
            Other than 1 only where the kernel can (``gradient_scale=yes``).

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
        check_hyperparameters(step, betas, lr=lr, eps=eps, weight_decay=weight_decay)
        _, scalars_of = ORDERS[self.config.order]
        scalars = scalars_of(lr, betas, eps, weight_decay, step, decoupled)
        given = f"{lr=}, {betas=}, {eps=}, {weight_decay=}, {step=}"
        gradient = Gradient(gradient_format, gradient_scale)
        return self._start("adam", {"p": p, "g": g, "m": m, "v": v}, scalars, given, gradient)

    def sgd(
        self,
        p: Buffer,
        g: Buffer,
        m: Buffer | None = None,
        *,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        first: bool = False,
        gradient_format: str | None = None,
        gradient_scale: float = 1.0,
    ) -> UpdateRun:
        """Start a step of SGD, p and m in place, and return at once.

        Parameters
        ----------
        p, g, m: Buffer
            As in :meth:`adam`. The momentum buffer m is needed where ``momentum`` is not 0, and
            refused where it is.
        lr, momentum, dampening, weight_decay, nesterov: float, bool
            As in ``torch.optim.SGD``.
        gradient_format, gradient_scale: str, float
            As in :meth:`adam`.
        first: bool
            The first step with momentum: m becomes the gradient, whatever it holds.

        Raises
        ------
        ArgumentError, ModeError, BusyError, ClosedDeviceError
            As :meth:`adam`; and the kernel does not have the rule.
        """
        check_hyperparameters(
            1, (0.0, 0.0), lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay
        )
        if nesterov and (momentum == 0.0 or dampening != 0.0):
            raise ArgumentError("nesterov needs a momentum and no dampening")
        if (m is None) != (momentum == 0.0):
            raise ArgumentError(f"m must be given if and only if momentum is not 0, not {momentum}")
        given = f"{lr=}, {momentum=}, {dampening=}, {weight_decay=}"
        gradient = Gradient(gradient_format, gradient_scale)
        if m is None:
            scalars = sgd_scalars(lr, weight_decay)
            return self._start("sgd", {"p": p, "g": g}, scalars, given, gradient)
        scalars = sgd_momentum_scalars(lr, momentum, dampening, weight_decay, nesterov, first)
        return self._start("sgd_momentum", {"p": p, "g": g, "m": m}, scalars, given, gradient)

    def adagrad(
        self,
        p: Buffer,
        g: Buffer,
        v: Buffer,
        *,
        step: int,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
        gradient_format: str | None = None,
        gradient_scale: float = 1.0,
    ) -> UpdateRun:
        """Start a step of Adagrad, p and v in place, and return at once.

        Parameters
        ----------
        p, g, v: Buffer
            As in :meth:`adam`; v is the sum of squares, initial value included.
        step: int
            t, from 1.
        lr, lr_decay, weight_decay, eps: float
            As in ``torch.optim.Adagrad``.
        gradient_format, gradient_scale: str, float
            As in :meth:`adam`.

        Raises
        ------
        ArgumentError, ModeError, BusyError, ClosedDeviceError
            As :meth:`adam`; and the kernel does not have the rule.
        """
        check_hyperparameters(
            step, (0.0, 0.0), lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps
        )
        scalars = adagrad_scalars(lr, lr_decay, weight_decay, eps, step)
        given = f"{lr=}, {lr_decay=}, {weight_decay=}, {eps=}, {step=}"
        gradient = Gradient(gradient_format, gradient_scale)
        return self._start("adagrad", {"p": p, "g": g, "v": v}, scalars, given, gradient)

    def _start(
        self,
        rule: str,
        buffers: Mapping[str, Buffer],
        scalars: Mapping[str, float | int],
        given: str,
        gradient: Gradient,
    ) -> UpdateRun:
        """Start a rule, if everything is as it should be; ``given`` are its arguments, as text."""
        action = f"run {rule}"
        self.check_open(action)
        self.check_rule(rule)
        gradient.check(self.config)
        if self.config.gradient_scale:
            scalars = {**scalars, GRADIENT_SCALE: gradient.scale}
            given = f"{given}, gradient_scale={gradient.scale}"
        channel = self._check_buffers(buffers, action, gradient)
        check_scalars(scalars, given)
        channel.check_ready(action)
        if channel.run is not None and not channel.run.ended:
            raise BusyError(
                f"cannot {action}: {channel.run.what} has not ended",
                registers=channel.kernel.dump(),
            )
        self._configure(channel, rule, buffers, scalars)
        if self.config.mixed:
            form = gradient.format_of(buffers[GRADIENT], self.config)
            channel.kernel.formats.set(gradient=GradientFormat[form.upper()])
        channel.kernel.start.go = 1
        count = buffers["p"].size
        channel.run = UpdateRun(
            rule,
            self.backend,
            channel.kernel,
            buffers,
            count=count,
            beats=BEATS_PER_LANE_GROUP * -(-count // self.config.lanes),
            channel=channel.number,
            base=channel.base,
            reset=channel.reset_kernel,
        )
        return channel.run

    def check_rule(self, rule: str) -> None:
        """Raise :class:`ArgumentError` unless the kernel has an update rule of this name."""
        if rule not in self.config.rules:
            raise ArgumentError(
                f"rule must be one that the kernel has ({', '.join(self.config.rules)}), "
                f"not {rule}: name it in the device's rules="
            )

    def check_reach(self, buffer: Buffer, action: str) -> None:
        self.channels[self.channel_of(buffer)].check_reach(f"{action} {buffer!r}")

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
        channel: KernelChannel,
        rule: str,
        buffers: Mapping[str, Buffer],
        scalars: Mapping[str, float | int],
    ) -> None:
        kernel, rules = channel.kernel, self.config.rule_set
        for name, buffer in buffers.items():
            kernel[f"{name}_address"].value = buffer.address - channel.base
        kernel.count.value = buffers["p"].size
        chosen = rules.rules[rules.names.index(rule)]
        if len(rules.names) > 1:
            kernel.rule.value = rules.names.index(rule)
        for name in chosen.scalars:
            kernel[name].value = float(scalars[name])
        kernel.mode.set(**{name: int(scalars.get(name, 0)) for name in rules.switches})
        for index, (name, buffer) in enumerate(buffers.items()):
            self._grant(channel, index, buffer, write=name not in READ_ONLY)

    def _grant(self, channel: KernelChannel, index: int, buffer: Buffer, *, write: bool) -> None:
        """Open a window for the whole beats of a buffer."""
        kernel = channel.kernel
        beat = self.config.beat_bytes
        first = buffer.address - channel.base
        kernel[f"window{index}_base"].value = first
        kernel[f"window{index}_limit"].value = -(-(first + buffer.nbytes) // beat) * beat
        permissions = kernel[f"window{index}_permissions"]
        permissions.set(read=1, write=int(write), valid=1)

    def _check_buffers(
        self, buffers: Mapping[str, Buffer], action: str, gradient: Gradient
    ) -> KernelChannel:
        """The channel that all of them lie on, if they can be those of a run."""
        beat = self.config.beat_bytes
        for name, buffer in buffers.items():
            if not isinstance(buffer, Buffer):
                raise DtypeError(name, "Buffer", type(buffer).__name__)
            size = buffers["p"].size
            if buffer.device is not self:
                raise ForeignBufferError(name, self.url, buffer.device.url)
            buffer.check_usable(f"{action} on")
            if name == GRADIENT:
                gradient.format_of(buffer, self.config)
            elif buffer.dtype != np.float32:
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
