"""Typed errors of the runtime: each keeps what was expected and what was found.

Three kinds, by what the caller can do about them:

- `ArgumentError` and its kin: the call was wrong; the device was not touched.
- `DeviceError`: the device refused, failed or did not answer. Those raised by a command
  carry the register dump and the last bus transactions, and
  `nearstep.device.Device.reset` makes the device usable again.
- `MemoryFaultError` and `ProtocolError`: an emulated device caught its kernel doing
  something that hardware would do silently. They mean a bug, in the RTL or in a driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, field

from nearstep_spec.errors import Fielded as Fielded
from nearstep_spec.errors import NearstepError as NearstepError

RESPONSES = ("OKAY", "EXOKAY", "SLVERR", "DECERR")
"""AXI response names, by code."""


class ArgumentError(NearstepError, ValueError):
    """A value that no device could accept. Nothing has been sent to the device."""


class _ChoiceError(ArgumentError):
    """A name or value that must be one of `valid`."""

    valid: Iterable[str]

    @property
    def hint(self) -> str:
        return f"; valid: {', '.join(self.valid)}" if self.valid else ""


class UrlError(Fielded, _ChoiceError):
    """A device name that cannot be parsed, or that no backend opens."""

    template = "cannot open {url!r}: {reason}{hint}"
    url: str
    reason: str
    valid: Iterable[str] = ()


class OptionError(Fielded, _ChoiceError):
    """An option of a device name that is unknown or has a bad value."""

    template = "{device}: option {option}={value!r}: {reason}{hint}"
    device: str
    option: str
    value: str
    reason: str
    valid: Iterable[str] = ()


class ShapeError(Fielded, ArgumentError):
    """An array whose shape is not the buffer's."""

    template = "{what}: shape must be {expected}, not {actual}"
    what: str
    expected: object
    actual: object


class DtypeError(Fielded, ArgumentError, TypeError):
    """An array whose dtype is not the buffer's (there is no silent conversion)."""

    template = "{what}: dtype must be {expected}, not {actual}"
    what: str
    expected: object
    actual: object


class AlignmentError(Fielded, ArgumentError):
    """An array that does not start on a beat of the memory port."""

    template = (
        "{what}: address {address:#x} must be a multiple of {alignment} bytes, not {over} over"
    )
    what: str
    address: int
    alignment: int

    @property
    def over(self) -> int:
        return self.address % self.alignment


class OverlapError(Fielded, ArgumentError):
    """Two arrays of one command that share bytes."""

    template = "{first} and {second} must not overlap, but share address {address:#x}"
    first: str
    second: str
    address: int


class OutOfBoundsError(Fielded, ArgumentError, IndexError):
    """A range outside its buffer or outside the device memory."""

    template = "{what}: [{start}, {stop}) must lie in [0, {limit})"
    what: str
    start: int
    stop: int
    limit: int


class FreedBufferError(Fielded, ArgumentError):
    """A buffer that was used, or freed again, after it was freed."""

    template = "cannot {action} {what}: it has been freed"
    what: str
    action: str


class ForeignBufferError(Fielded, ArgumentError):
    """A buffer of one device given to another."""

    template = "{what} must be a buffer of {expected}, not of {actual}"
    what: str
    expected: str
    actual: str


class OutOfDeviceMemoryError(Fielded, NearstepError, MemoryError):
    """An allocation that does not fit."""

    template = (
        "cannot allocate {requested} bytes: the largest free piece has {largest} bytes "
        "({free} of {capacity} bytes are free){hint}"
    )
    requested: int
    largest: int
    free: int
    capacity: int
    hint: str = ""

    def with_hint(self, options: str) -> OutOfDeviceMemoryError:
        """This error, with the options of the device's name that give it more memory, if any."""
        hint = f"; open the device with more memory: {options}" if options else ""
        return type(self)(self.requested, self.largest, self.free, self.capacity, hint)


class OutOfHostMemoryError(Fielded, NearstepError, MemoryError):
    """A device whose memory this machine cannot emulate."""

    template = (
        "cannot emulate {requested} bytes of memory: {reason}; open the device with less "
        "(memory_bytes)"
    )
    requested: int
    reason: str


class ClosedDeviceError(NearstepError):
    """A device that was used after it was closed."""

    def __init__(self, device: str, action: str) -> None:
        super().__init__(f"cannot {action}: device {device} is closed")


class ForkedDeviceError(ClosedDeviceError):
    """A device that was used in a child of `process`, which opened it."""

    def __init__(self, device: str, action: str, process: int) -> None:
        self.process = process
        NearstepError.__init__(
            self,
            f"cannot {action}: device {device} belongs to process {process}, which opened it; "
            "open one in this process",
        )


class DeviceError(NearstepError):
    """The device refused, failed or did not answer.

    Attributes
    ----------
    registers : register dump at the time of the error, by field; empty where none was taken.
    transactions : the last bus transactions, oldest first; empty where the backend keeps none.
    """

    def __init__(
        self,
        message: str,
        *,
        registers: Mapping[str, int] | None = None,
        transactions: Sequence[str] = (),
    ) -> None:
        self.registers: Mapping[str, int] = dict(registers or {})
        self.transactions: Sequence[str] = tuple(transactions)
        super().__init__(self._with_dump(message))

    def _with_dump(self, message: str) -> str:
        text = [message]
        if self.registers:
            text.append("registers:")
            text += [f"  {name} = {value:#x}" for name, value in self.registers.items()]
        if self.transactions:
            text.append("last bus transactions:")
            text += [f"  {line}" for line in self.transactions]
        return "\n".join(text)


class FieldedDeviceError(Fielded, DeviceError):
    """A `DeviceError` that declares a message and fields."""

    _: KW_ONLY
    registers: Mapping[str, int] = field(default_factory=dict)
    transactions: Sequence[str] = ()

    def _text(self) -> str:
        return self._with_dump(super()._text())


class MismatchError(FieldedDeviceError):
    """The device is not the one that this driver was written for."""

    template = "{what} must be {expected}, not {actual}"
    what: str
    expected: object
    actual: object


class AccessError(FieldedDeviceError):
    """Base: an access of registers or memory that failed.

    Attributes
    ----------
    write : whether the access was a write.
    """

    _: KW_ONLY
    write: bool

    @property
    def action(self) -> str:
        return "write" if self.write else "read"


class BusError(AccessError):
    """A register access that was answered with an error response."""

    template = "register {action} at {address:#x}: response must be OKAY, not {answer}"
    address: int
    response: int

    @property
    def answer(self) -> str:
        return RESPONSES[self.response & 3]


class RegisterAccessError(Fielded, ArgumentError):
    """An access of registers that their BAR does not take; nothing was sent."""

    template = "register access must be {expected}, not of {nbytes} bytes at {address:#x}"
    address: int
    nbytes: int
    expected: str


class MemoryBarError(FieldedDeviceError):
    """An access of memory through a BAR that the device did not carry out.

    Attributes
    ----------
    address : of the first byte that was not accessed, or of its request.
    status : answer of the memory, or `timeout`.
    """

    template = "access of memory at {address:#x}: response must be OKAY, not {status}"
    address: int
    status: str


class CompletionError(MemoryBarError):
    """A read through a memory BAR that was not completed."""

    template = "read of memory at {address:#x}: completion must be OKAY, not {status}"


class PostedWriteError(MemoryBarError):
    """A write through a memory BAR that failed after it was sent; reported by a later access."""

    template = "posted write to memory at {address:#x}: response must be OKAY, not {status}"


class PeerReadError(MemoryBarError):
    """A read of memory by the drive beside it that was not completed."""

    template = "drive's read of memory at {address:#x}: completion must be OKAY, not {status}"


class PeerWriteError(MemoryBarError):
    """A write to memory by the drive beside it that memory did not carry out."""

    template = "drive's write to memory at {address:#x}: response must be OKAY, not {status}"


class BusyError(DeviceError):
    """A command given while another one runs."""


class ResetNeededError(DeviceError):
    """The device has stopped, and must be reset.

    `__cause__` is the error that stopped the device, if known.
    """


class ModeError(FieldedDeviceError):
    """A memory channel is not in the mode that an action needs; nothing was done.

    Attributes
    ----------
    expected, actual : modes: `normal` or `acceleration`.
    """

    template = (
        "cannot {action}: channel {channel} must be in {expected} mode, not {actual}{because}"
    )
    action: str
    channel: int
    expected: str
    actual: str
    _: KW_ONLY
    reason: str = ""

    @property
    def because(self) -> str:
        return self.reason and f": {self.reason}"


class ModeRegisterError(FieldedDeviceError):
    """Mode registers of a channel's DRAM have values that its kernel cannot work with; nothing was
    done.

    Attributes
    ----------
    mode_registers : tuple[int, ...]. Their numbers: 3 is MR3.
    """

    template = (
        "cannot enter acceleration mode: {names} of channel {channel} must be set as "
        "docs/axdimm.md says, and the host has set them otherwise"
    )
    channel: int
    mode_registers: Iterable[int]

    @property
    def names(self) -> str:
        return ", ".join(f"MR{number}" for number in self.mode_registers)


class LostCommandError(FieldedDeviceError):
    """Commands that the host's memory controller sent while the kernel had the memory were lost.

    Attributes
    ----------
    count : lost commands since `control.clear`.
    pins, bank : of the first one: A17 to A0; BA in the low two bits, then BG.
    """

    template = (
        "channel {channel} has lost {count} commands of the host's memory controller; the "
        "first was {name}, with {pins:#x} on the address pins"
    )
    channel: int
    count: int
    _: KW_ONLY
    pins: int
    bank: int

    @property
    def name(self) -> str:
        code = self.pins >> 14 & 7
        return f"MRS of MR{self.bank}" if code == 0 else f"a command with code {code:#05b}"


class WaitTimeoutError(FieldedDeviceError):
    """An event did not happen in the device time given.

    Attributes
    ----------
    max_cycles : device cycles (steps, on a device without a clock).
    unit : `device cycles` or `steps`.
    """

    template = "waited {max_cycles} {unit} for {waited_for}"
    waited_for: str
    max_cycles: int
    _: KW_ONLY
    unit: str = "device cycles"


class KernelError(FieldedDeviceError):
    """A run that stopped with the ERROR register set.

    Attributes
    ----------
    cause : name of the cause, as in the register map.
    stream : name of the stream that failed, as in the register map: `G_READ`, `COPY_OUT`.
    address : address of the first error.
    committed : elements whose every result is known to be in memory. Of the others, blocks that
        were not started are unchanged; the rest may be partly written.
    count : elements that the run was to update.
    """

    template = (
        "run of {count} elements stopped: {cause}{detail} on stream {stream} at {address:#x}; "
        "{committed} elements are committed"
    )
    _: KW_ONLY
    cause: str
    stream: str
    address: int
    committed: int
    count: int
    detail: str = ""


class BusResponseError(KernelError):
    """Memory answered with SLVERR or DECERR."""


class WindowError(KernelError):
    """An address of a run is outside the windows that the host granted, and was not accessed."""


class ConfigurationError(KernelError):
    """START was refused: the configuration registers cannot be run. Nothing was accessed."""


class PairError(KernelError):
    """A compressed gradient that the kernel refused. Nothing was written.

    Attributes
    ----------
    position : the first bad pair, counted from 0.
    """

    template = KernelError.template.replace("{detail}", " of pair {position}")
    _: KW_ONLY
    position: int


class PairRangeError(PairError):
    """An index is not below the number of elements."""


class PairOrderError(PairError):
    """An index is below the one before it, or in an earlier block."""


class AbortedError(KernelError):
    """The run was aborted by the host."""


class MemoryFaultError(AccessError):
    """The kernel made an access that an emulated memory refuses."""

    template = "{action} at {address:#x}: {reason}"
    reason: str
    address: int


class OutOfRangeError(MemoryFaultError):
    """An access beyond the end of the memory."""


class UninitialisedError(MemoryFaultError):
    """A read of memory that was never written."""


class GuardError(MemoryFaultError):
    """An access to a guard: memory between buffers, or freed."""


class ProtocolError(FieldedDeviceError):
    """A port broke its bus protocol."""

    template = "{channel}: {rule}: {detail} (cycle {cycle})"
    channel: str
    rule: str
    detail: str
    _: KW_ONLY
    cycle: int
