"""Driver of an AXDIMM: its Adam kernel as a callable."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from numbers import Real

import numpy as np

from nearstep.axdimm.run import AdamRun
from nearstep.backends.base import Backend
from nearstep.buffer import Buffer
from nearstep.device import Device
from nearstep.errors import (
    AlignmentError,
    ArgumentError,
    BusyError,
    DtypeError,
    ForeignBufferError,
    MismatchError,
    OutOfBoundsError,
    OverlapError,
    ShapeError,
)
from nearstep.registers import BlockRegisters, Registers
from nearstep_hw.axdimm.config import AdamKernelConfig
from nearstep_hw.axdimm.registers import ARRAYS, device_maps, update_rule
from nearstep_hw.rule.adam import ORDERS

READ_ONLY = frozenset({"g"})
"""Arrays that the kernel does not write."""

STEPS = 1 << 63
"""A step count is below it, so that powers of the betas can be taken."""


class AxdimmDevice(Device):
    """An AXDIMM with one Adam kernel near its memory.

    Attributes
    ----------
    regs: Registers
        Registers as objects: ``dev.regs.adam0.status.busy``.

    Raises
    ------
    MismatchError
        The registers are not those of an Adam kernel of the backend's configuration.

    Ref: AXDIMM, sections 3.3 and 4.2.
    """

    def __init__(self, backend: Backend, url: str) -> None:
        super().__init__(backend, url)
        self.regs = Registers(backend, device_maps(backend.config))
        if self.config.windows < len(ARRAYS):
            raise MismatchError("windows", f"at least {len(ARRAYS)}", self.config.windows)
        self._run: AdamRun | None = None

    @property
    def config(self) -> AdamKernelConfig:
        """Configuration of the kernel."""
        return self.backend.config

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
            each starting on a beat of the memory port (64 bytes with 16 lanes), without overlap.
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
        BusyError
            The run before this one has not ended.
        ClosedDeviceError
        """
        self.check_open("run adam")
        buffers = dict(zip(ARRAYS, (p, g, m, v), strict=True))
        self._check_buffers(buffers)
        _check_hyperparameters(step, lr, betas, eps, weight_decay)
        _, scalars_of = ORDERS[self.config.order]
        scalars = scalars_of(lr, betas, eps, weight_decay, step, decoupled)
        _check_scalars(scalars, f"{lr=}, {betas=}, {eps=}, {weight_decay=}, {step=}")
        if self._run is not None and not self._run.ended:
            raise BusyError(
                f"cannot run adam: {self._run.what} has not ended",
                registers=self.regs.adam0.dump(),
            )
        kernel = self.regs.adam0
        self._configure(kernel, buffers, scalars)
        kernel.start.go = 1
        self._run = AdamRun(self.backend, kernel, buffers)
        return self._run

    def check_unused(self, buffer: Buffer, action: str, *, changes: bool) -> None:
        run = self._run
        if run is None:
            return
        names = [name for name in run.sharing(buffer) if changes or name not in READ_ONLY]
        if names and not run.ended:
            raise BusyError(
                f"cannot {action} {buffer!r}: {run.what}, which uses it as {', '.join(names)}, "
                "has not ended",
                registers=self.regs.adam0.dump(),
            )

    def reset(self) -> None:
        """Hard reset of the kernel and of its path to memory. A run in progress is lost."""
        super().reset()
        if self._run is not None:
            self._run.lose("the device was reset")
            self._run = None

    def _configure(
        self,
        kernel: BlockRegisters,
        buffers: Mapping[str, Buffer],
        scalars: Mapping[str, float | int],
    ) -> None:
        for index, (name, buffer) in enumerate(buffers.items()):
            kernel[f"{name}_address"].value = buffer.address
            self._grant(kernel, index, buffer, write=name not in READ_ONLY)
        kernel.count.value = buffers["p"].size
        rule = update_rule(self.config)
        for name in rule.scalars:
            kernel[name].value = float(scalars[name])
        kernel.mode.set(**{name: int(scalars[name]) for name in rule.switches})

    def _grant(self, kernel: BlockRegisters, index: int, buffer: Buffer, *, write: bool) -> None:
        """Open a window for the whole beats of a buffer."""
        beat = self.config.beat_bytes
        limit = -(-(buffer.address + buffer.nbytes) // beat) * beat
        kernel[f"window{index}_base"].value = buffer.address
        kernel[f"window{index}_limit"].value = limit
        permissions = kernel[f"window{index}_permissions"]
        permissions.set(read=1, write=int(write), valid=1)

    def _check_buffers(self, buffers: Mapping[str, Buffer]) -> None:
        size = buffers["p"].size
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
            if buffer.address % self.config.beat_bytes:
                raise AlignmentError(name, buffer.address, self.config.beat_bytes)
            if buffer.address + buffer.nbytes > 1 << self.config.address_width:
                end = buffer.address + buffer.nbytes
                raise OutOfBoundsError(name, buffer.address, end, 1 << self.config.address_width)
        for (first, one), (second, other) in itertools.combinations(buffers.items(), 2):
            address = max(one.address, other.address)
            if address < min(one.address + one.nbytes, other.address + other.nbytes):
                raise OverlapError(first, second, address)


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
