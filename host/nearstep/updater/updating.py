"""Update rules of kernels as callables, for devices with kernels."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from nearstep.allocator import LINE_BYTES
from nearstep.buffer import Buffer
from nearstep.device import Device
from nearstep.errors import (
    ArgumentError,
    BusyError,
    DeviceError,
    MemoryFaultError,
    ProtocolError,
    ResetNeededError,
)
from nearstep.scalars import is_whole
from nearstep.updater.arguments import RuleArguments, rule_arguments
from nearstep.updater.buffers import check_buffer, check_format, check_size, common_channel
from nearstep.updater.channel import KernelChannel
from nearstep.updater.command import Command
from nearstep.updater.formats import DTYPES, CopyOut, Gradient
from nearstep.updater.pairs import Pairs, check_count
from nearstep.updater.rounding import Drawn, Rounding
from nearstep.updater.run import KernelRun, ScanRun, UpdateRun
from nearstep_spec.blockwise import DYNAMIC8
from nearstep_spec.rule.optimizer import Optimizer
from nearstep_spec.rule.rules import BY_RULE, FP32, OPTIMIZERS
from nearstep_spec.rule.scale import GRADIENT, GRADIENT_SCALE
from nearstep_spec.updater.config import COPY_OUT, INDEX, ConfigError, UpdateKernelConfig
from nearstep_spec.updater.operands import operands
from nearstep_spec.updater.registers import RunKind

Started = TypeVar("Started", bound=KernelRun)


class UpdatingDevice(Device, ABC):
    """A device with update kernels on its memory channels. Families derive from it.

    Attributes
    ----------
    channels : one for each memory channel; none if there are no kernels.
    """

    channels: tuple[KernelChannel, ...] = ()

    @property
    @abstractmethod
    def kernel_config(self) -> UpdateKernelConfig:
        """Configuration of each kernel.

        Raises
        ------
        ArgumentError : the device has no kernel.
        """

    def update(
        self,
        optimizer: str | Optimizer,
        arrays: Mapping[str, Any],
        *,
        step: int | None = None,
        first: bool = False,
        gradient_format: str | None = None,
        gradient_scale: float = 1.0,
        copy_out: Buffer | None = None,
        copy_out_format: str | None = None,
        rounding: Rounding | None = None,
        **hyper: Any,
    ) -> UpdateRun:
        """Start a step of an optimizer, its states in place, and return at once::

            device.update("adamw", {"p": p, "g": g, "m": m, "v": v}, step=1, lr=1e-3)

        Parameters
        ----------
        optimizer : name of an optimizer whose rules the kernel has: `adam`, `adamw`, `sgd`,
            `adagrad` and others of nearstep, or of your file, such as `lion` with
            `rules=examples/lion.py:LION`.
        arrays : `p`, `g` and the other states of the rule selected by the hyper-parameters, by
            name: of Adam the moments `m` and `v`, and with `amsgrad=True` their maxima `v_max`; of
            SGD with momentum `m`; of Adagrad the sum of squares `v`. Float32, of one size, on this
            device, on one channel, each starting on a beat of the memory port (64 bytes with 16
            lanes), without overlap. States in 16 bits are float16, or uint16 for bfloat16; so may
            `g` be if the kernel has the format. States in 8 bits are uint8, allocated by
            `alloc_blockwise`. If the kernel has the form, `g` may be any number of `Pairs`.
        step : t, from 1; required if the rule depends on it.
        first : state of this rule alone is empty, whatever its contents: SGD's momentum is set to
            the gradient.
        gradient_format : `fp32`, `fp16` or `bf16`. None: that of g's dtype; `bf16` must be named,
            with g in uint16.
        gradient_scale : factor of every gradient, rounded to binary32 once, before the rule. Values
            other than 1 need `gradient_scale=yes`. -1 maximizes.
        copy_out : receives the updated p, rounded to nearest even to 16 bits; of the size and
            channel of p. float16, or uint16 for bfloat16, if the kernel has the format.
        copy_out_format : `fp16` or `bf16`. None: that of copy_out's dtype; `bf16` must be named.
        rounding : of states in bfloat16; None: to nearest even; else stochastic, with
            `stochastic_rounding=yes`.
        **hyper : hyper-parameters, with the names of `torch.optim` and the optimizer's defaults.

        Raises
        ------
        ArgumentError : an argument is invalid (AlignmentError, OverlapError, DtypeError,
            ShapeError, ForeignBufferError, FreedBufferError), or the kernel does not have the rule,
            or has another version of its arithmetic; the device was not touched.
        ModeError : the channel is not in acceleration mode.
        BusyError : the previous run on the channel, of this thread or, after a wait, of another
            one, has not ended.
        ResetNeededError : an earlier fault stopped the device.
        """
        known = self.optimizer(optimizer)
        arguments = rule_arguments(known, self.kernel_config.order, step=step, first=first, **hyper)
        return self.run_rule(
            arguments,
            arrays,
            gradient_format=gradient_format,
            gradient_scale=gradient_scale,
            copy_out=copy_out,
            copy_out_format=copy_out_format,
            rounding=rounding,
        )

    def run_rule(
        self,
        arguments: RuleArguments,
        arrays: Mapping[str, Any],
        *,
        gradient_format: str | None = None,
        gradient_scale: float = 1.0,
        copy_out: Buffer | None = None,
        copy_out_format: str | None = None,
        rounding: Rounding | None = None,
    ) -> UpdateRun:
        """Start `update` with evaluated arguments (`arguments`).

        Raises
        ------
        ArgumentError, ModeError, BusyError, ResetNeededError, ClosedDeviceError : as `update`.
        """
        states = {name: buffer for name, buffer in arrays.items() if name != GRADIENT}
        wanted = {name for name in arguments.form.rule.arrays_in if name != GRADIENT}
        for name in sorted(wanted ^ set(states)):
            raise ArgumentError(
                f"{name} must {'' if name in wanted else 'not '}be given for the rule "
                f"{arguments.rule}, which these hyper-parameters ask for: {arguments.given}"
            )
        if GRADIENT not in arrays:
            raise ArgumentError(f"{GRADIENT} must be given")
        gradient = Gradient(gradient_format, gradient_scale)
        copy = CopyOut(copy_out, copy_out_format)
        if not isinstance(rounding, Rounding | None):
            raise ArgumentError(f"rounding must be a Rounding or None, not {rounding!r}")
        rule = arguments.form.rule
        drawn = (
            None if rounding is None else rounding.drawn(rule, arguments.step, self.kernel_config)
        )
        return self._update(arguments, states, arrays[GRADIENT], gradient, copy, drawn)

    def alloc_blockwise(
        self, count: int, *, channel: int = 0, align: int = LINE_BYTES, offset: int = 0
    ) -> Buffer:
        """Allocate a state of `count` elements in 8 bits, in bytes of `nearstep.blockwise`.

        Contents are undefined.

        Parameters
        ----------
        channel, align, offset : as of `alloc`. On a DIMM arrays of one run are fastest with
            `stripe_align`, and offsets of once, twice `stripe_skew` and so on.

        Raises
        ------
        ArgumentError : the kernel has no state in 8 bits; or as `alloc`.
        """
        config = self.kernel_config
        if not config.blockwise:
            raise ArgumentError(
                "the kernel has no state in 8 bits: open the device with state_format=dynamic8"
            )
        if not is_whole(count) or count < 0:
            raise ArgumentError(f"count must be an integer from 0, not {count!r}")
        nbytes = config.block_layout.nbytes(int(count))
        return self.alloc(nbytes, DTYPES[DYNAMIC8], channel=channel, align=align, offset=offset)

    def optimizer(self, optimizer: str | Optimizer) -> Optimizer:
        """Find an optimizer of the kernel or of nearstep by name.

        Raises
        ------
        ArgumentError : there is no such optimizer, or the device has no kernel.
        """
        if isinstance(optimizer, Optimizer):
            return optimizer
        ours = {each.name: each for each in self.kernel_config.rule_set.optimizers}
        known = {**OPTIMIZERS, **ours}
        if optimizer not in known:
            raise ArgumentError(f"optimizer must be of {', '.join(known)}, not {optimizer!r}")
        return known[optimizer]

    def scan(self, g: Buffer, gradient_format: str | None = None) -> ScanRun:
        """Start a scan of gradients for infinities, NaNs and the sum of squares, and return at
        once.

        Parameters
        ----------
        g : as in `update`, of fewer than 2**32 elements.
        gradient_format : as in `update`.

        Raises
        ------
        ArgumentError, ModeError, BusyError, ClosedDeviceError : as `update`; and the kernel cannot
            scan.
        """
        action = "run scan"
        self.check_open(action)
        if not self.kernel_config.scan:
            raise ArgumentError("the kernel cannot scan: open the device with scan=yes")
        gradient = Gradient(gradient_format)
        gradient.check(self.kernel_config)
        check_buffer(self, self.kernel_config, GRADIENT, g, action)
        check_count("gradients", g.size)
        command = Command(
            operation=RunKind.SCAN,
            buffers={GRADIENT: g},
            count=g.size,
            gradient=gradient.format_of(g, self.kernel_config),
        )
        return self._start(ScanRun, "scan", command)

    def _update(
        self,
        arguments: RuleArguments,
        states: Mapping[str, Buffer],
        g: Buffer | Pairs,
        gradient: Gradient,
        copy_out: CopyOut,
        drawn: Drawn | None,
    ) -> UpdateRun:
        """Check and start a rule."""
        rule, buffers = arguments.rule, self._check_update(arguments, states, g, gradient, copy_out)
        if self.kernel_config.gradient_scale:
            arguments = arguments.also(GRADIENT_SCALE, gradient.scale)
        arguments.check()
        pairs, value = (g, g.value) if isinstance(g, Pairs) else (None, g)
        return self._start(
            UpdateRun,
            rule,
            Command(
                operation=RunKind.UPDATE,
                buffers=buffers,
                count=states["p"].size,
                gradient=gradient.format_of(value, self.kernel_config),
                copy_out=copy_out.format_of(buffers[COPY_OUT], self.kernel_config)
                if COPY_OUT in buffers
                else "none",
                form="none" if pairs is None else pairs.form,
                pairs=0 if pairs is None else pairs.size,
                rule=rule,
                scalars=arguments.scalars,
                drawn=drawn,
            ),
        )

    def _check_update(
        self,
        arguments: RuleArguments,
        states: Mapping[str, Buffer],
        g: Buffer | Pairs,
        gradient: Gradient,
        copy_out: CopyOut,
    ) -> dict[str, Buffer]:
        """Check a run of a rule; return its buffers by array, p first."""
        self.check_open(f"run {arguments.rule}")
        self._check_form(arguments)
        gradient.check(self.kernel_config)
        copy_out.check(self.kernel_config)
        pairs, value = (g, g.value) if isinstance(g, Pairs) else (None, g)
        if pairs is not None:
            pairs.check(self.kernel_config)
        return self._checked_buffers(arguments.rule, states, value, pairs, gradient, copy_out)

    def _start(self, kind: type[Started], name: str, command: Command) -> Started:
        """Start a command on the channel of its buffers, if that is free."""
        action = f"run {name}"
        number = common_channel(command.buffers, self.channel_of)
        channel = self.channels[number]
        with channel.lock:
            channel.check_ready(action)
            for each in command.buffers.values():
                super().check_unused(each, action, changes=True)
            try:
                self._await_other(channel, action)
                command.configure(channel.kernel, self.kernel_config, channel.base)
                command.grant(channel.kernel, self.kernel_config, channel.base)
                run = kind(
                    name,
                    self.backend,
                    channel.kernel,
                    command.buffers,
                    count=command.count,
                    beats=command.beats(self.kernel_config),
                    channel=number,
                    base=channel.base,
                    reset=channel.reset_kernel,
                    lock=channel.lock,
                )
                channel.run = run  # before START: an interrupt must not lose the run
                channel.kernel.start.go = 1
            except (MemoryFaultError, ProtocolError) as fault:
                raise reset_needed(action, fault) from fault
        return run

    def _await_other(self, channel: KernelChannel, action: str) -> None:
        """Wait for the last run of the channel, if another thread started it; that thread gets its
        error.

        Raises
        ------
        BusyError : the run has not ended.
        """
        run = channel.run
        if run is None or run.ended:
            return
        others = run.thread is not threading.current_thread()
        if others:
            with contextlib.suppress(DeviceError):
                run.wait()
        if not run.ended:
            raise BusyError(
                f"cannot {action}: {run.what}{' of another thread' * others} has not ended",
                registers=channel.kernel.dump(),
            )

    def check_rule(self, rule: str, named: str = "") -> None:
        """Raise `ArgumentError` unless the kernel has an update rule of this name.

        Parameters
        ----------
        named : its name in `rules=`, if it is from a file.
        """
        config = self.kernel_config
        names = config.rule_set.names
        if rule in names:
            return
        wanted = (*config.rules, named or (rule if rule in BY_RULE else f"FILE.py:NAME of {rule}"))
        advice = f"name it in the device's rules={','.join(wanted)}"
        if named or rule in BY_RULE:
            try:
                replace(config, rules=wanted)
            except ConfigError as error:
                advice = f"this device cannot have it as well ({error}): open another one with it"
        raise ArgumentError(
            f"rule must be a rule of the kernel ({', '.join(names)}), not {rule}: {advice}"
        )

    def arguments(self, optimizer: str | Optimizer, **given: Any) -> RuleArguments:
        """Evaluate the arguments of a run, and check that the kernel supports them.

        Parameters
        ----------
        optimizer : as in `update`.
        **given : `step`, `first` and hyper-parameters, as there.

        Raises
        ------
        ArgumentError : the kernel does not have the rule, or scalars do not fit registers.
        """
        found = rule_arguments(self.optimizer(optimizer), self.kernel_config.order, **given)
        self._check_form(found)
        found.check()
        return found

    def _check_form(self, arguments: RuleArguments) -> None:
        """Raise an error unless the kernel has the rule, with the same arithmetic."""
        self.check_rule(arguments.rule)
        digest = self.kernel_config.programs[
            self.kernel_config.rule_set.names.index(arguments.rule)
        ]
        if digest != arguments.form.digest:
            raise ArgumentError(
                f"{arguments.form.rule.location}: rule {arguments.rule} has another arithmetic in "
                f"the kernel ({digest}) than here ({arguments.form.digest}): open the device again"
            )

    def check_unused(self, buffer: Buffer, action: str, *, changes: bool) -> None:
        super().check_unused(buffer, action, changes=changes)
        if not self.channels:
            return
        channel = self.channels[self.channel_of(buffer)]
        run = channel.run
        if run is None or run.is_over:
            return
        table = operands(self.kernel_config)
        names = [name for name in run.sharing(buffer) if changes or table[name].write]
        if names and not run.ended:
            raise BusyError(
                f"cannot {action} {buffer!r}: {run.what}, which uses it as {', '.join(names)}, "
                "has not ended",
                registers=channel.kernel.dump(),
            )

    def _checked_buffers(
        self,
        rule: str,
        states: Mapping[str, Buffer],
        value: Buffer,
        pairs: Pairs | None,
        gradient: Gradient,
        copy_out: CopyOut,
    ) -> dict[str, Buffer]:
        """Check and return the used buffers of a run by array, p first.

        Parameters
        ----------
        value : gradients, or values of pairs.
        """
        buffers = {"p": states["p"], GRADIENT: value, **states}
        if pairs is not None:
            buffers[INDEX] = pairs.index
        if copy_out.buffer is not None:
            buffers[COPY_OUT] = copy_out.buffer
        table = operands(self.kernel_config)
        for name, buffer in buffers.items():
            check_buffer(self, self.kernel_config, name, buffer, f"run {rule}")
            if name == GRADIENT:
                gradient.format_of(buffer, self.kernel_config)
            elif name == COPY_OUT:
                copy_out.format_of(buffer, self.kernel_config)
            elif name != INDEX:
                check_format(name, buffer, table[name].format)
            if pairs is None or name not in (GRADIENT, INDEX):
                form = table[name].format if name in states else FP32
                check_size(self.kernel_config, name, buffer, states["p"].size, form)
        if pairs is not None:
            check_count("elements of a run with pairs", states["p"].size)
            if not pairs.size:
                del buffers[GRADIENT], buffers[INDEX]
        return buffers

    def close(self) -> None:
        super().close()
        for channel in self.channels:
            channel.run = None  # which refers to this device: memory lives until its last user

    def reset(self) -> None:
        """Hard reset of the kernels and of their paths to memory.

        Runs in progress are lost.
        """
        with ExitStack() as locks:
            for channel in self.channels:
                locks.enter_context(channel.lock)
            super().reset()
            for channel in self.channels:
                channel.forget("the device was reset")


def reset_needed(action: str, fault: MemoryFaultError | ProtocolError) -> ResetNeededError:
    """Make the error of an action after a kernel's fault, which stops an emulated device."""
    text = str(fault).partition("\n")[0]
    return ResetNeededError(
        f"cannot {action}: an earlier fault stopped the device, which needs a reset(): {text}",
        transactions=fault.transactions,
    )
