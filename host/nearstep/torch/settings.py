"""Arguments of an optimizer besides torch's options: its use of the device and of drives."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, TypedDict, cast, get_args

import torch
from torch import Tensor

from nearstep.device import Device
from nearstep.errors import ArgumentError
from nearstep.plan.overflow import Eviction
from nearstep.run import BOUND, is_bound
from nearstep.scalars import is_whole
from nearstep.storage.drive_set import check_places
from nearstep.storage.store import Store
from nearstep.torch.compression import Compression, check_pairs
from nearstep.torch.convert import NAMES
from nearstep.torch.dtensor import is_sharded
from nearstep.torch.errors import HyperparameterError, UnsupportedOptionError
from nearstep.updater.checks import is_real, real
from nearstep_spec.blockwise import DYNAMIC8, SIGNED
from nearstep_spec.rounding import WORD_BITS
from nearstep_spec.rule.optimizer import Optimizer
from nearstep_spec.rule.rules import PARAMETERS
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.decompressor import Decompressor

Drives = Sequence[str | Path] | Store
"""Paths of a set of drives; or a store that the caller opened, and closes."""

Resume = bool | int | str | Path | Sequence[str | Path]
"""Whether to resume from the last step of the drives; `COMMON`; `IF_ANY`; a generation, or the name
of one that is kept; or the paths of another set of drives that has the step, or their folder."""

FILE = "optimizer.nearstep"
"""Name of the drive in a folder that is given as one."""

COMMON = "common"
"""Resume from the last step that the drives of all processes of a job have."""

IF_ANY = "if-any"
"""Resume if the drives have a step, and begin anew otherwise."""


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """State that does not fit in device memory is kept on drives.

    Attributes
    ----------
    drives : None: the device's own.
    memory : device memory for parameters, gradients and state: bytes, text such as `64MiB`, or a
        share of their size, such as `25%`. None with the device's own drives: each uses the memory
        of its card.
    resume : resume from the last step of the drives (True), if there is one (`IF_ANY`), of all
        ranks (`COMMON`), or of other drives (their paths); or from this generation.
    kept : with True: go back to the generation that the drives keep under this name.
    """

    drives: Drives | None
    memory: int | str | None
    eviction: Eviction
    resume: bool | int | str | Sequence[str | Path]
    kept: str = ""

    @property
    def others(self) -> Sequence[str | Path]:
        """Paths of drives to copy a step from."""
        return () if isinstance(self.resume, int | str) else self.resume

    @property
    def generation(self) -> int | None:
        """Generation to resume from; None: the last, or the common one."""
        return None if isinstance(self.resume, bool | str | Sequence) else self.resume

    @classmethod
    def given(
        cls, drives: Drives | None, memory: int | str | None, eviction: str, *, resume: Resume
    ) -> Overflow | None:
        """Check the arguments of an optimizer; return None if all have their defaults.

        Raises
        ------
        HyperparameterError : invalid `eviction` or `resume`.
        ArgumentError : invalid drives.
        """
        if eviction not in get_args(Eviction):
            raise HyperparameterError("eviction", f"one of {get_args(Eviction)}", eviction)
        is_path = isinstance(resume, str | Path) and resume not in (COMMON, IF_ANY)
        kept = str(resume) if is_path and _is_name(resume) else ""
        found = True if kept else (cast(str | Path, resume),) if is_path else cast(Any, resume)
        is_named = not is_path and isinstance(found, str)
        if not (isinstance(found, bool) or is_whole(found) or is_named or _are_paths(found)):
            expected = (
                "True, False, 'common', 'if-any', a generation or its name, or paths of drives"
            )
            raise HyperparameterError("resume", expected, resume)
        if drives is None and memory is None and found is False:
            return None
        if drives is not None and not isinstance(drives, Store):
            check_places(drives)
            if not _are_paths(drives):
                raise ArgumentError(f"a drive must be given by its path, not {drives!r}")
            paths = _absolute(drives)
            drives = [Path(each) / FILE if os.path.isdir(each) else each for each in paths]
        chosen: Eviction = "belady" if eviction == "belady" else "updated_first"
        return cls(drives=drives, memory=memory, eviction=chosen, resume=found, kept=kept)

    @classmethod
    def on(cls, device: Device, given: Overflow | None) -> Overflow | None:
        """Complete an optimizer's arguments for a device, which may have drives of its own; return
        None without drives.

        Raises
        ------
        HyperparameterError : an argument is missing, or has no effect.
        ArgumentError : the store's drives are not one for each channel of the device.
        """
        own = device.drive_places
        if own:
            found = cls(drives=None, memory=None, eviction="updated_first", resume=False)
            found = found if given is None else given
            if found.resume == IF_ANY:
                expected = "True or False: the device has drives of its own"
                raise HyperparameterError("resume", expected, IF_ANY)
            if found.memory is not None:
                expected = "left out: each drive has the memory of its card"
                raise HyperparameterError("memory", expected, found.memory)
            if found.drives is None:
                return replace(found, drives=_absolute(own))
            if not isinstance(found.drives, Store):
                expected = "left out, or a Store: the device has drives of its own"
                raise HyperparameterError("drives", expected, found.drives)
            if len(found.drives.drives) != device.channel_count:
                raise ArgumentError(
                    f"drives must be {device.channel_count}, one a card, "
                    f"not {len(found.drives.drives)}"
                )
            return found
        if given is None:
            return None
        if given.drives is None:
            name = "memory" if given.memory is not None else "resume"
            raise HyperparameterError(name, "given with drives alone", getattr(given, name))
        if given.memory is None:
            raise HyperparameterError("memory", "given with drives", given.memory)
        return given


def _is_name(given: object) -> bool:
    """Whether this is the name of a generation: a text that is no path, of a file or of several
    parts."""
    return isinstance(given, str) and given == os.path.basename(given) and not os.path.exists(given)


def _absolute(paths: Sequence[str | Path]) -> list[str | Path]:
    """Return paths that name the same files in any directory, to which the program may change."""
    return [each if os.path.isabs(each) else os.path.join(os.getcwd(), each) for each in paths]


def _are_paths(given: object) -> bool:
    listed = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    return listed and all(isinstance(each, str | Path) for each in cast(Sequence[object], given))


_STATE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({**NAMES, torch.uint8: DYNAMIC8})
"""Values of a device's `state_format`, by dtype of the moments."""

Updates = Literal["at-step", "in-backward"]
"""When parameters are updated: by `step()`, or when backward has made their gradients."""

Roundings = Literal["nearest", "stochastic"]
"""Rounding modes of 16-bit states."""

TransferOrder = Literal["overlapped", "naive"]
"""Orders of the transfer handler of cards with drives: see `nearstep.optim.Adam`."""


class OnDevice(TypedDict, total=False):
    """Arguments of every optimizer besides torch's: see `nearstep.optim.Adam`."""

    device: str | Device | Callable[..., Any] | None
    max_cycles: int | None
    compression: float | None
    error_feedback: bool
    compression_form: str
    compression_format: str
    max_grad_norm: float | None
    drives: Drives | None
    memory: int | str | None
    eviction: str
    resume: Resume
    transfer_handler: str
    save_residual: bool
    state_dtype: torch.dtype | None
    rounding: str
    rounding_seed: int
    updates: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments that hold for all groups of an optimizer.

    Attributes
    ----------
    max_cycles : bound on each run of the kernel, in device cycles.
    compression : None sends whole gradients.
    max_grad_norm : bound on the norm of the gradients that a step applies; None is no bound.
    overflow : drives and memory; None keeps all state in memory.
    naive : the transfer handler of cards with drives is sequential.
    save_residual : save the residuals of error feedback on drives.
    state_dtype : dtype of moments on the device; None: the device's.
    stochastic, rounding_seed : states in bfloat16 are rounded stochastically, with this seed.
    in_backward : parameters are updated when backward has made their gradients.

    Raises
    ------
    HyperparameterError
    """

    max_cycles: int | None = None
    compression: Compression | None = None
    max_grad_norm: float | None = None
    overflow: Overflow | None = None
    naive: bool = False
    save_residual: bool = True
    state_dtype: torch.dtype | None = None
    stochastic: bool = False
    rounding_seed: int = 0
    in_backward: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.save_residual, bool):
            raise HyperparameterError("save_residual", "True or False", self.save_residual)
        if self.state_dtype is not None and self.state_dtype not in _STATE_NAMES:
            expected = f"one of {', '.join(map(str, _STATE_NAMES))}, or None"
            raise HyperparameterError("state_dtype", expected, self.state_dtype)
        seed = self.rounding_seed
        if not is_whole(seed) or not 0 <= seed < 1 << WORD_BITS:
            raise HyperparameterError("rounding_seed", f"an integer in [0, 2**{WORD_BITS})", seed)
        if not is_bound(self.max_cycles):
            raise HyperparameterError("max_cycles", BOUND, self.max_cycles)
        given = self.max_grad_norm
        if given is None:
            return
        norm = real("max_grad_norm", given) if is_real(given) else math.nan
        if not (math.isfinite(norm) and norm >= 0.0):
            raise HyperparameterError("max_grad_norm", "finite and at least 0", given)
        object.__setattr__(self, "max_grad_norm", norm)

    @classmethod
    def given(
        cls,
        *,
        max_cycles: int | None = None,
        compression: float | None = None,
        error_feedback: bool = True,
        compression_form: str = "fused",
        compression_format: str = "fp32",
        max_grad_norm: float | None = None,
        drives: Drives | None = None,
        memory: int | str | None = None,
        eviction: str = "updated_first",
        resume: Resume = False,
        transfer_handler: str = "overlapped",
        save_residual: bool = True,
        state_dtype: torch.dtype | None = None,
        rounding: str = "nearest",
        rounding_seed: int = 0,
        updates: str = "at-step",
    ) -> Self:
        """Make settings from the arguments of `OnDevice`."""
        if transfer_handler not in get_args(TransferOrder):
            allowed = f"one of {get_args(TransferOrder)}"
            raise HyperparameterError("transfer_handler", allowed, transfer_handler)
        if rounding not in get_args(Roundings):
            raise HyperparameterError("rounding", f"one of {get_args(Roundings)}", rounding)
        if updates not in get_args(Updates):
            raise HyperparameterError("updates", f"one of {get_args(Updates)}", updates)
        check_pairs(compression_form, compression_format)
        chosen = None
        if compression is not None:
            chosen = Compression(
                share=compression,
                error_feedback=error_feedback,
                form=compression_form,
                format=compression_format,
            )
        return cls(
            max_cycles=max_cycles,
            compression=chosen,
            max_grad_norm=max_grad_norm,
            overflow=Overflow.given(drives, memory, eviction, resume=resume),
            naive=transfer_handler == "naive",
            save_residual=save_residual,
            state_dtype=state_dtype,
            stochastic=rounding == "stochastic",
            rounding_seed=rounding_seed,
            in_backward=updates == "in-backward",
        )

    @property
    def has_residual(self) -> bool:
        """Whether compression keeps residuals for the next step."""
        return self.compression is not None and bool(self.compression.error_feedback)

    def on(self, device: Device) -> Self:
        """Complete the settings for a device, which may have drives of its own.

        Raises
        ------
        HyperparameterError, ArgumentError : as of `Overflow.on`.
        UnsupportedOptionError
        """
        if self.naive and not device.drive_places:
            reason = "only cards with drives have a transfer handler: name these in the device"
            raise UnsupportedOptionError("transfer_handler", "naive", reason)
        overflow = Overflow.on(device, self.overflow)
        if overflow is not None and self.compression is not None and not device.drive_places:
            reason = "gradients of state on drives are sent whole"
            raise UnsupportedOptionError("compression", self.compression.share, reason)
        if overflow is not None and self.max_grad_norm is not None:
            reason = "with drives the gradients are not on the device together; call "
            reason += "torch.nn.utils.clip_grad_norm_ before the step"
            raise UnsupportedOptionError("max_grad_norm", self.max_grad_norm, reason)
        return replace(self, overflow=overflow)

    def check_host(self) -> None:
        """Check that no option needs a device.

        Raises
        ------
        UnsupportedOptionError : names the first option that needs a device.
        """
        share = None if self.compression is None else self.compression.share
        given = {
            "max_cycles": self.max_cycles,
            "compression": share,
            "max_grad_norm": self.max_grad_norm,
            "transfer_handler": "naive" if self.naive else None,
        }
        for name, value in given.items():
            if value is not None:
                raise UnsupportedOptionError(name, value, "it is for a device: give one by device=")

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check that stochastic rounding has other random bits in each step, and that the host has
        the gradients that it computes with between two runs.

        Raises
        ------
        UnsupportedOptionError
        """
        share = None if self.compression is None else self.compression.share
        for name, value in (("compression", share), ("max_grad_norm", self.max_grad_norm)):
            if optimizer.between is not None and value is not None:
                reason = f"the host computes {optimizer.name}'s update of whole gradients"
                raise UnsupportedOptionError(name, value, reason)
        if self.stochastic and not optimizer.counts:
            reason = f"{optimizer.name} counts no steps, whose random bits have to differ"
            raise UnsupportedOptionError("rounding", "stochastic", reason)

    def check(self, kernel: UpdateKernelConfig) -> None:
        """Check that the kernel supports the settings.

        Raises
        ------
        UnsupportedOptionError : names the option of the device.
        """
        if self.max_grad_norm is not None and not scans(kernel):
            reason = "the kernel must take the norm and apply the factor: open the device with "
            reason += "scan=yes and gradient_scale=yes"
            raise UnsupportedOptionError("max_grad_norm", self.max_grad_norm, reason)
        self._check_states(kernel)
        compression = self.compression
        if compression is None:
            return
        if compression.form not in kernel.compression:
            reason = f"the kernel takes no pairs of the form {compression.form}: open the device "
            reason += f"with compression={compression.form}"
            raise UnsupportedOptionError("compression", compression.share, reason)
        if compression.user is not None:
            self._check_user(compression.user, kernel)
        if compression.format not in kernel.gradient_formats:
            reason = f"the kernel takes gradients of {', '.join(kernel.gradient_formats)}: name it "
            reason += "in the device's gradient_formats="
            raise UnsupportedOptionError("compression_format", compression.format, reason)

    def _check_states(self, kernel: UpdateKernelConfig) -> None:
        formats, dtype = kernel.rule_set.whole.formats, self.state_dtype
        for name in kernel.states:
            form = formats.get(name, "fp32")
            kept = DYNAMIC8 if form in SIGNED else form
            if dtype is not None and name != PARAMETERS and kept != _STATE_NAMES[dtype]:
                reason = f"the kernel keeps {name} in {form}: open the device with "
                reason += f"state_format={_STATE_NAMES[dtype]}"
                raise UnsupportedOptionError("state_dtype", dtype, reason)
        if self.stochastic and not kernel.stochastic_rounding:
            reason = "the kernel rounds to nearest even alone: open the device with "
            reason += "stochastic_rounding=yes and a state in bf16, such as state_format=bf16"
            raise UnsupportedOptionError("rounding", "stochastic", reason)

    def _check_user(self, user: Decompressor, kernel: UpdateKernelConfig) -> None:
        if user.digest != kernel.decompressors[0]:
            mine, its = user.digest[:16], kernel.decompressors[0][:16]
            reason = f"the file has changed since the device was opened (digest {mine}, in the "
            reason += f"kernel {its}): open the device again"
            raise UnsupportedOptionError("compression_form", user.name, reason)
        if self.max_grad_norm is not None:
            reason = "the kernel takes the norm of values in memory, which those of records are "
            reason += "not; call torch.nn.utils.clip_grad_norm_ before the step"
            raise UnsupportedOptionError("max_grad_norm", self.max_grad_norm, reason)

    def check_maximize(self, maximize: object, kernel: UpdateKernelConfig) -> None:
        """Check that gradients can be negated, including zeros that are not sent.

        Raises
        ------
        UnsupportedOptionError : names the option of the device.
        """
        if maximize and self.compression is not None and not kernel.gradient_scale:
            reason = "the kernel must negate compressed gradients: open the device with "
            reason += "gradient_scale=yes"
            raise UnsupportedOptionError("maximize", maximize, reason)

    def check_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Check that a step of these parameters needs no data of other processes.

        Raises
        ------
        UnsupportedOptionError
        """
        found = list(parameters)
        if self.max_grad_norm is not None and any(map(is_sharded, found)):
            reason = "the device knows the norm of this process's shards, not of the whole; call "
            reason += "torch.nn.utils.clip_grad_norm_ before the step"
            raise UnsupportedOptionError("max_grad_norm", self.max_grad_norm, reason)


def scans(kernel: UpdateKernelConfig) -> bool:
    """Return whether a kernel can scan gradients before an update, and scale them."""
    return kernel.scan and kernel.gradient_scale
