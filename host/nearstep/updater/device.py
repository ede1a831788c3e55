"""What a device with update kernels does: its update rules as callables."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from nearstep.backends.base import Backend
from nearstep.buffer import Buffer
from nearstep.device import Device
from nearstep.errors import (
    ArgumentError,
    BusyError,
    DeviceError,
    MemoryFaultError,
    MismatchError,
    ProtocolError,
    ResetNeededError,
)
from nearstep.registers import BlockRegisters, Registers
from nearstep.run import Run
from nearstep.updater.accelerated import AcceleratedRuns
from nearstep.updater.arguments import RuleArguments, rule_arguments
from nearstep.updater.buffers import check_buffer, check_format, check_size, common_channel
from nearstep.updater.channel import KernelChannel
from nearstep.updater.command import Command
from nearstep.updater.copy_out import CopyOut
from nearstep.updater.gradient import Gradient
from nearstep.updater.pairs import Pairs, check_count
from nearstep.updater.run import KernelRun, ScanRun, UpdateRun
from nearstep.updater.turns import Region, Turns
from nearstep_spec.rule.optimizer import Optimizer
from nearstep_spec.rule.rules import OPTIMIZERS
from nearstep_spec.rule.scale import GRADIENT, GRADIENT_SCALE
from nearstep_spec.updater.config import COPY_OUT, INDEX, AdamKernelConfig
from nearstep_spec.updater.operands import operands
from nearstep_spec.updater.registers import Operation

Started = TypeVar("Started", bound=KernelRun)


class KernelDevice(Device):
    """A device with one update kernel for each memory channel. Families derive from it.

    Parameters
    ----------
    backend
    url
    config : of each kernel.
    regs
    channels

    Raises
    ------
    MismatchError : the kernel has fewer windows than a run can have arrays.
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
        locks = [channel.lock for channel in self.channels]
        self._turns = Turns(lambda: [lock.used for lock in locks])  # not self: that is a cycle
        arrays = len(config.arrays) + bool(config.compression) + bool(config.copy_out_formats)
        if config.window_count < arrays:
            raise MismatchError("windows", f"at least {arrays}", config.window_count)

    @property
    def blocks(self) -> Mapping[str, BlockRegisters]:
        return {block.name: block for block in self.regs}

    @property
    def stripe_bytes(self) -> int:
        return self.config.block_bytes

    @contextmanager
    def acceleration(self, *channels: int) -> Iterator[None]:
        """The memory of these channels, of all if none is named, for their kernels, in a `with`
        statement: acceleration mode, on a device that has modes.

        At its end runs that have not ended are waited for, or aborted if it ends with an exception;
        then the host has the channels back. Other threads may start runs on the channels; if they
        want to have one themselves, or copy from or to one that has modes, they wait for the end.

        Raises
        ------
        ArgumentError : there is no such channel, or one is named twice.
        ModeError : one is in acceleration mode already; or another thread has one, and waits for
            this thread, or does nothing.
        WaitTimeoutError : a change of mode, or a run, did not end.
        KernelError, MemoryFaultError, ProtocolError : from a run that was waited for at the end.
        ClosedDeviceError
        """
        self.check_open("enter acceleration mode")
        self.settle()
        for number in channels:
            self.check_channel(number)
        if len(set(channels)) != len(channels):
            raise ArgumentError(f"channels must be named once, not {channels}")
        chosen = [self.channels[number] for number in channels] or list(self.channels)
        action = "enter acceleration mode"
        with self._turns.region([channel.number for channel in chosen], action) as region:
            for channel in chosen:
                channel.check_enter()
            self.check_no_transfer((c.number for c in chosen if c.has_modes), action)
            try:
                for channel in chosen:
                    channel.enter()
                yield
            except BaseException as error:
                self._leave(chosen, region, error)
                raise
            self._leave(chosen, region, None)

    def accelerated(self, channel: int, start: Callable[[], Run]) -> AcceleratedRuns:
        """Give a channel to its kernel, start a run there, and return at once: when that has ended
        and is waited for, the host has the channel again.

        Parameters
        ----------
        channel
        start : starts the run, by a method of this device.

        Raises
        ------
        ArgumentError, ModeError, WaitTimeoutError, KernelError, MemoryFaultError, ProtocolError,
            ClosedDeviceError : as `acceleration`, and as `start`.
        """
        with ExitStack() as mode:
            mode.enter_context(self.acceleration(channel))
            return AcceleratedRuns(start(), (), mode.pop_all())

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """All channels for this thread, in a `with` statement: it may copy to one while the kernel
        of another runs, and others that want to copy, or to have a channel, wait for the end.

        Threads then never wait for each other.

        Raises
        ------
        ModeError : another thread has a channel and waits for this one, or does nothing.
        ClosedDeviceError
        """
        self.check_open("reserve channels")
        self.settle()
        numbers = [channel.number for channel in self.channels]
        with self._turns.region(numbers, "reserve channels"):
            yield

    def _leave(
        self, channels: Sequence[KernelChannel], region: Region, failed: BaseException | None
    ) -> None:
        """Leave acceleration mode on every channel, whatever happens; the first error counts."""
        if self.closed:
            return
        first: BaseException | None = None
        for channel in channels:
            if not self._turns.holds(region, channel.number):  # since a reset
                continue
            try:
                interrupted = not isinstance(first, DeviceError | None)
                channel.leave(failed=failed is not None or interrupted)
            except BaseException as error:  # Ctrl-C too: the other channels still have to leave
                first = first or error
        if failed is not None and first is not None:
            failed.add_note(f"then, on the way back to normal mode: {first}")
        elif first is not None:
            raise first

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
        **hyper: Any,
    ) -> UpdateRun:
        """Start a step of an optimizer, its states in place, and return at once::

            device.update("adamw", {"p": p, "g": g, "m": m, "v": v}, step=1, lr=1e-3)

        Parameters
        ----------
        optimizer : name of one whose rules the kernel has: `adam`, `adamw`, `sgd`, `adagrad` and
            others of nearstep, or of a file of yours, such as `lion` with
            `rules=examples/lion.py:LION`.
        arrays : `p`, `g` and the other states of the rule that the hyper-parameters ask for, by
            name: of Adam the moments `m` and `v`, and with `amsgrad=True` their maxima `v_max`; of
            SGD with momentum `m`; of Adagrad the sum of squares `v`. Float32, of one size, on this
            device, on one channel, each starting on a beat of the memory port (64 bytes with 16
            lanes), without overlap. A state that the rule has in 16 bits is float16, or uint16 that
            holds bfloat16; and so may `g` be where the kernel has the format. Where the kernel has
            the form, `g` may be `Pairs`, of which there may be any number.
        step : t, from 1. It must be given where the rule depends on it.
        first : state that the rule alone has holds nothing yet, whatever is there: SGD's momentum
            becomes the gradient.
        gradient_format : `fp32`, `fp16` or `bf16`. None is that of g's dtype; `bf16` must be named,
            and g be uint16 then.
        gradient_scale : every gradient is multiplied by it, rounded to binary32 once, before
            anything else. Other than 1 only where the kernel can (`gradient_scale=yes`). -1
            maximizes.
        copy_out : of the size of p, placed like p: it becomes the updated p, rounded to nearest
            even to 16 bits. float16, or uint16 to hold bfloat16, where the kernel has the format.
        copy_out_format : `fp16` or `bf16`. None is that of copy_out's dtype; `bf16` must be named.
        **hyper : hyper-parameters, those of `torch.optim` under their names; those not given have
            the optimizer's defaults.

        Raises
        ------
        ArgumentError : an argument is wrong (AlignmentError, OverlapError, DtypeError, ShapeError,
            ForeignBufferError, FreedBufferError), or the kernel does not have the rule, or computes
            something else; the device was not touched.
        ModeError : the channel is not in acceleration mode.
        BusyError : the run before this one on the channel has not ended: one of this thread, or one
            of another, for which it waited.
        ResetNeededError : the device stopped at a fault before.
        ClosedDeviceError
        """
        known = self._optimizer(optimizer)
        arguments = rule_arguments(known, self.config.order, step=step, first=first, **hyper)
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
        return self._update(arguments, states, arrays[GRADIENT], gradient, copy)

    def _optimizer(self, optimizer: str | Optimizer) -> Optimizer:
        """The optimizer of a name: one that the kernel has, or one of nearstep."""
        if isinstance(optimizer, Optimizer):
            return optimizer
        ours = {each.name: each for each in self.config.rule_set.optimizers}
        known = {**OPTIMIZERS, **ours}
        if optimizer not in known:
            raise ArgumentError(f"optimizer must be of {', '.join(known)}, not {optimizer!r}")
        return known[optimizer]

    def scan(self, g: Buffer, gradient_format: str | None = None) -> ScanRun:
        """Start reading gradients alone, and return at once: whether all are finite, and their sum
        of squares.

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
        if not self.config.scan:
            raise ArgumentError("the kernel cannot scan: open the device with scan=yes")
        gradient = Gradient(gradient_format)
        gradient.check(self.config)
        check_buffer(self, self.config, GRADIENT, g, action)
        check_count("gradients", g.size)
        command = Command(
            operation=Operation.SCAN,
            buffers={GRADIENT: g},
            count=g.size,
            gradient=gradient.format_of(g, self.config),
        )
        return self._start(ScanRun, "scan", command)

    def _update(
        self,
        arguments: RuleArguments,
        states: Mapping[str, Buffer],
        g: Buffer | Pairs,
        gradient: Gradient,
        copy_out: CopyOut,
    ) -> UpdateRun:
        """Start a rule, if everything is as it should be."""
        rule = arguments.rule
        self.check_open(f"run {rule}")
        self._check_form(arguments)
        gradient.check(self.config)
        copy_out.check(self.config)
        if self.config.gradient_scale:
            arguments = arguments.also(GRADIENT_SCALE, gradient.scale)
        pairs, value = (g, g.value) if isinstance(g, Pairs) else (None, g)
        if pairs is not None:
            pairs.check(self.config)
        buffers = self._checked_buffers(rule, states, value, pairs, gradient, copy_out)
        arguments.check()
        return self._start(
            UpdateRun,
            rule,
            Command(
                operation=Operation.UPDATE,
                buffers=buffers,
                count=states["p"].size,
                gradient=gradient.format_of(value, self.config),
                copy_out=copy_out.format_of(buffers[COPY_OUT], self.config)
                if COPY_OUT in buffers
                else "none",
                form="none" if pairs is None else pairs.form,
                pairs=0 if pairs is None else pairs.size,
                rule=rule,
                scalars=arguments.scalars,
            ),
        )

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
                command.configure(channel.kernel, self.config, channel.base)
                command.grant(channel.kernel, self.config, channel.base)
                run = kind(
                    name,
                    self.backend,
                    channel.kernel,
                    command.buffers,
                    count=command.count,
                    beats=command.beats(self.config),
                    channel=number,
                    base=channel.base,
                    reset=channel.reset_kernel,
                    lock=channel.lock,
                )
                channel.run = run  # before START: an interrupt must not lose a run
                channel.kernel.start.go = 1
            except (MemoryFaultError, ProtocolError) as fault:
                raise _reset_needed(action, fault) from fault
        return run

    def _await_other(self, channel: KernelChannel, action: str) -> None:
        """Let the last run of the channel end, if another thread started it: that one will be told
        how it ended.

        Raises
        ------
        BusyError
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

    def check_rule(self, rule: str) -> None:
        """Raise `ArgumentError` unless the kernel has an update rule of this name."""
        names = self.config.rule_set.names
        if rule not in names:
            raise ArgumentError(
                f"rule must be one that the kernel has ({', '.join(names)}), "
                f"not {rule}: name it in the device's rules={','.join((*self.config.rules, rule))}"
            )

    def check_arguments(self, optimizer: str | Optimizer, **arguments: Any) -> None:
        """Raise `ArgumentError` unless a run could have these numbers.

        Parameters
        ----------
        optimizer : as in `update`.
        **arguments : `step`, `first` and hyper-parameters, as there.
        """
        checked = rule_arguments(self._optimizer(optimizer), self.config.order, **arguments)
        self._check_form(checked)
        checked.check()

    def _check_form(self, arguments: RuleArguments) -> None:
        """Raise unless the kernel has the rule, with the same arithmetic."""
        self.check_rule(arguments.rule)
        digest = self.config.programs[self.config.rule_set.names.index(arguments.rule)]
        if digest != arguments.form.digest:
            raise ArgumentError(
                f"{arguments.form.rule.location}: rule {arguments.rule} computes something else in "
                f"the kernel ({digest}) than here ({arguments.form.digest}): open the device again"
            )

    @contextmanager
    def reach(self, buffer: Buffer, action: str) -> Iterator[None]:
        self.settle(buffer, changes=action != "read")
        channel = self.channels[self.channel_of(buffer)]
        if channel.has_modes:  # the text takes as long as all else here
            self._turns.begin_copy(channel.number, f"{action} {buffer!r}")
        try:
            if channel.has_modes:
                channel.check_reach(f"{action} {buffer!r}")
            yield
        except (MemoryFaultError, ProtocolError) as fault:
            raise _reset_needed(f"{action} {buffer!r}", fault) from fault
        finally:
            if channel.has_modes:
                self._turns.end_copy(channel.number)

    def check_unused(self, buffer: Buffer, action: str, *, changes: bool) -> None:
        super().check_unused(buffer, action, changes=changes)
        channel = self.channels[self.channel_of(buffer)]
        run = channel.run
        if run is None:
            return
        table = operands(self.config)
        names = [name for name in run.sharing(buffer) if changes or table[name].write]
        if names and not run.ended:
            raise BusyError(
                f"cannot {action} {buffer!r}: {run.what}, which uses it as {', '.join(names)}, "
                "has not ended",
                registers=channel.kernel.dump(),
            )

    def close(self) -> None:
        super().close()
        for channel in self.channels:
            channel.run = None  # which refers to this device: the last user's end is the memory's

    def reset(self) -> None:
        """Hard reset of the kernels and of their paths to memory.

        Runs in progress are lost, and every channel is in normal mode.
        """
        with ExitStack() as locks:
            for channel in self.channels:
                locks.enter_context(channel.lock)
            super().reset()
            for channel in self.channels:
                channel.forget("the device was reset")
        self._turns.forget()

    def _checked_buffers(
        self,
        rule: str,
        states: Mapping[str, Buffer],
        value: Buffer,
        pairs: Pairs | None,
        gradient: Gradient,
        copy_out: CopyOut,
    ) -> dict[str, Buffer]:
        """The buffers of a run by array, p first, if they can be that; those without use left out.

        Parameters
        ----------
        value : gradients, or values of pairs.
        """
        buffers = {"p": states["p"], GRADIENT: value, **states}
        if pairs is not None:
            buffers[INDEX] = pairs.index
        if copy_out.buffer is not None:
            buffers[COPY_OUT] = copy_out.buffer
        table = operands(self.config)
        for name, buffer in buffers.items():
            check_buffer(self, self.config, name, buffer, f"run {rule}")
            if name == GRADIENT:
                gradient.format_of(buffer, self.config)
            elif name == COPY_OUT:
                copy_out.format_of(buffer, self.config)
            elif name != INDEX:
                check_format(name, buffer, table[name].format)
            if pairs is None or name not in (GRADIENT, INDEX):
                check_size(name, buffer, states["p"].size)
        if pairs is not None:
            check_count("elements of a run with pairs", states["p"].size)
            if not pairs.size:
                del buffers[GRADIENT], buffers[INDEX]
        return buffers


def _reset_needed(action: str, fault: MemoryFaultError | ProtocolError) -> ResetNeededError:
    """What a fault of a kernel means to another action: an emulated device stops at it."""
    text = str(fault).partition("\n")[0]
    return ResetNeededError(
        f"cannot {action}: the device stopped before and needs a reset(): {text}",
        transactions=fault.transactions,
    )
