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
from typing import Any

from nearstep_spec.errors import NearstepError as NearstepError

RESPONSES = ("OKAY", "EXOKAY", "SLVERR", "DECERR")
"""AXI response names, by code."""


class ArgumentError(NearstepError, ValueError):
    """A value that no device could accept. Nothing has been sent to the device."""


class UrlError(ArgumentError):
    """A device name that cannot be parsed or that nobody answers to."""

    def __init__(self, url: str, reason: str, valid: Iterable[str] = ()) -> None:
        self.url = url
        self.valid = tuple(valid)
        hint = f"; valid: {', '.join(self.valid)}" if self.valid else ""
        super().__init__(f"cannot open {url!r}: {reason}{hint}")


class OptionError(ArgumentError):
    """An option of a device name that is unknown or has a bad value."""

    def __init__(
        self, device: str, option: str, value: str, reason: str, valid: Iterable[str] = ()
    ) -> None:
        self.device = device
        self.option = option
        self.value = value
        self.valid = tuple(valid)
        hint = f"; valid: {', '.join(self.valid)}" if self.valid else ""
        super().__init__(f"{device}: option {option}={value!r}: {reason}{hint}")


class ShapeError(ArgumentError):
    """An array whose shape is not the buffer's."""

    def __init__(self, what: str, expected: object, actual: object) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(f"{what}: shape must be {expected}, not {actual}")


class DtypeError(ArgumentError, TypeError):
    """An array whose dtype is not the buffer's (there is no silent conversion)."""

    def __init__(self, what: str, expected: object, actual: object) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(f"{what}: dtype must be {expected}, not {actual}")


class AlignmentError(ArgumentError):
    """An array that does not start on a beat of the memory port."""

    def __init__(self, what: str, address: int, alignment: int) -> None:
        self.address = address
        self.alignment = alignment
        super().__init__(
            f"{what}: address {address:#x} must be a multiple of {alignment} bytes, "
            f"not {address % alignment} over"
        )


class OverlapError(ArgumentError):
    """Two arrays of one command that share bytes."""

    def __init__(self, first: str, second: str, address: int) -> None:
        self.first = first
        self.second = second
        self.address = address
        super().__init__(f"{first} and {second} must not overlap, but share address {address:#x}")


class OutOfBoundsError(ArgumentError, IndexError):
    """A range that lies outside its buffer or outside the device memory."""

    def __init__(self, what: str, start: int, stop: int, limit: int) -> None:
        self.start = start
        self.stop = stop
        self.limit = limit
        super().__init__(f"{what}: [{start}, {stop}) must lie in [0, {limit})")


class FreedBufferError(ArgumentError):
    """A buffer that was used, or freed again, after it was freed."""

    def __init__(self, what: str, action: str) -> None:
        super().__init__(f"cannot {action} {what}: it has been freed")


class ForeignBufferError(ArgumentError):
    """A buffer of one device given to another."""

    def __init__(self, what: str, expected: str, actual: str) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(f"{what} must be a buffer of {expected}, not of {actual}")


class OutOfDeviceMemoryError(NearstepError, MemoryError):
    """An allocation that does not fit."""

    def __init__(
        self, requested: int, largest: int, free: int, capacity: int, hint: str = ""
    ) -> None:
        self.requested = requested
        self.largest = largest
        self.free = free
        self.capacity = capacity
        super().__init__(
            f"cannot allocate {requested} bytes: the largest free piece has {largest} bytes "
            f"({free} of {capacity} bytes are free){hint}"
        )

    def with_hint(self, options: str) -> OutOfDeviceMemoryError:
        """This error, with the options of the device's name that give it more memory, if any."""
        hint = f"; open the device with more memory: {options}" if options else ""
        return type(self)(self.requested, self.largest, self.free, self.capacity, hint)


class OutOfHostMemoryError(NearstepError, MemoryError):
    """A device whose memory this machine cannot emulate."""

    def __init__(self, requested: int, reason: str) -> None:
        self.requested = requested
        super().__init__(
            f"cannot emulate {requested} bytes of memory: {reason}; open the device with less "
            "(memory_bytes)"
        )


class ClosedDeviceError(NearstepError):
    """A device that was used after it was closed."""

    def __init__(self, device: str, action: str) -> None:
        super().__init__(f"cannot {action}: device {device} is closed")


class ForkedDeviceError(ClosedDeviceError):
    """A device that was used in a child of the process that opened it.

    Attributes
    ----------
    process : that opened it.
    """

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
        text = [message]
        if self.registers:
            text.append("registers:")
            text += [f"  {name} = {value:#x}" for name, value in self.registers.items()]
        if self.transactions:
            text.append("last bus transactions:")
            text += [f"  {line}" for line in self.transactions]
        super().__init__("\n".join(text))


class MismatchError(DeviceError):
    """The device is not the one that this driver was written for."""

    def __init__(self, what: str, expected: object, actual: object) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(f"{what} must be {expected}, not {actual}")


class BusError(DeviceError):
    """A register access that was answered with an error response."""

    def __init__(self, address: int, response: int, *, write: bool) -> None:
        self.address = address
        self.response = response
        self.write = write
        super().__init__(
            f"register {'write' if write else 'read'} at {address:#x}: response must be OKAY, "
            f"not {RESPONSES[response & 3]}"
        )


class RegisterAccessError(ArgumentError):
    """An access of registers that their BAR does not take; nothing was sent.

    Attributes
    ----------
    address
    nbytes
    """

    def __init__(self, address: int, nbytes: int, expected: str) -> None:
        self.address = address
        self.nbytes = nbytes
        self.expected = expected
        super().__init__(
            f"register access must be {expected}, not of {nbytes} bytes at {address:#x}"
        )


class MemoryBarError(DeviceError):
    """An access of memory through a BAR that the device did not carry out.

    Attributes
    ----------
    address : of the first byte that was not accessed, or of its request.
    status : answer of the memory, or `timeout`.
    """

    what = "access of memory at {address:#x}: response"

    def __init__(self, address: int, status: str, *, transactions: Sequence[str] = ()) -> None:
        self.address = address
        self.status = status
        super().__init__(
            f"{self.what.format(address=address)} must be OKAY, not {status}",
            transactions=transactions,
        )


class CompletionError(MemoryBarError):
    """A read through a memory BAR that was not completed."""

    what = "read of memory at {address:#x}: completion"


class PostedWriteError(MemoryBarError):
    """A write through a memory BAR that failed after it was sent: found out at a later access."""

    what = "posted write to memory at {address:#x}: response"


class PeerReadError(MemoryBarError):
    """A read of memory by the drive beside it that was not completed."""

    what = "drive's read of memory at {address:#x}: completion"


class PeerWriteError(MemoryBarError):
    """A write to memory by the drive beside it that memory did not carry out."""

    what = "drive's write to memory at {address:#x}: response"


class BusyError(DeviceError):
    """A command given while another one runs."""


class ResetNeededError(DeviceError):
    """The device stopped before; it does nothing more until it is reset.

    Its `__cause__` is what it stopped with, where that is known.
    """


class ModeError(DeviceError):
    """A memory channel is not in the mode that an action needs; nothing was done.

    Attributes
    ----------
    channel
    expected, actual : modes: `normal` or `acceleration`.
    """

    def __init__(
        self,
        action: str,
        channel: int,
        expected: str,
        actual: str,
        *,
        reason: str = "",
        registers: Mapping[str, int] | None = None,
    ) -> None:
        self.channel = channel
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"cannot {action}: channel {channel} must be in {expected} mode, not {actual}"
            f"{reason and ': '}{reason}",
            registers=registers,
        )


class ModeRegisterError(DeviceError):
    """The DRAM of a channel has mode registers that its kernel cannot work with, as somebody set
    them; nothing was done.

    Attributes
    ----------
    channel
    mode_registers : tuple[int, ...]. Their numbers: 3 is MR3.
    """

    def __init__(
        self,
        channel: int,
        mode_registers: Iterable[int],
        *,
        registers: Mapping[str, int] | None = None,
    ) -> None:
        self.channel = channel
        self.mode_registers = tuple(mode_registers)
        names = ", ".join(f"MR{number}" for number in self.mode_registers)
        super().__init__(
            f"cannot enter acceleration mode: {names} of channel {channel} must be set as "
            "docs/axdimm.md says, and the host has set them otherwise",
            registers=registers,
        )


class LostCommandError(DeviceError):
    """Commands of the host's memory controller came while the kernel had the memory, and were lost.

    Attributes
    ----------
    channel
    count : since `control.clear`.
    pins, bank : of the first: A17 to A0; BA in the low two bits, then BG.
    """

    def __init__(
        self,
        channel: int,
        count: int,
        *,
        pins: int,
        bank: int,
        registers: Mapping[str, int] | None = None,
    ) -> None:
        self.channel = channel
        self.count = count
        self.pins = pins
        self.bank = bank
        code = pins >> 14 & 7
        name = f"MRS of MR{bank}" if code == 0 else f"a command with code {code:#05b}"
        super().__init__(
            f"channel {channel} has lost {count} commands of the host's memory controller; the "
            f"first was {name}, with {pins:#x} on the address pins",
            registers=registers,
        )


class WaitTimeoutError(DeviceError):
    """What was waited for did not happen in the device time given.

    Attributes
    ----------
    waited_for
    max_cycles : device cycles (steps, on a device without a clock).
    unit : which of the two.
    """

    def __init__(
        self,
        waited_for: str,
        max_cycles: int,
        *,
        unit: str = "device cycles",
        registers: Mapping[str, int] | None = None,
        transactions: Sequence[str] = (),
    ) -> None:
        self.waited_for = waited_for
        self.max_cycles = max_cycles
        self.unit = unit
        super().__init__(
            f"waited {max_cycles} {unit} for {waited_for}",
            registers=registers,
            transactions=transactions,
        )


class KernelError(DeviceError):
    """A run that stopped with the ERROR register set.

    Attributes
    ----------
    cause : name of the cause, as in the register map.
    stream : name of the stream that failed, as in the register map: `G_READ`, `COPY_OUT`.
    address : address of the first error.
    committed : elements whose every result is known to be in memory. Of the others, the blocks that
        were not started are as they were; the rest may be half done.
    count : elements that the run was to update.
    """

    def __init__(
        self,
        *,
        cause: str,
        stream: str,
        address: int,
        committed: int,
        count: int,
        detail: str = "",
        registers: Mapping[str, int] | None = None,
        transactions: Sequence[str] = (),
    ) -> None:
        self.cause = cause
        self.stream = stream
        self.address = address
        self.committed = committed
        self.count = count
        super().__init__(
            f"run of {count} elements stopped: {cause}{detail} on stream {stream} at {address:#x}; "
            f"{committed} elements are committed",
            registers=registers,
            transactions=transactions,
        )


class BusResponseError(KernelError):
    """Memory answered with SLVERR or DECERR."""


class WindowError(KernelError):
    """The kernel was sent to an address not granted by the host; nothing was accessed there."""


class ConfigurationError(KernelError):
    """START was refused: the configuration registers cannot be run. Nothing was accessed."""


class PairError(KernelError):
    """A compressed gradient that the kernel refused. Nothing was written.

    Attributes
    ----------
    position : the first bad pair, counted from 0.
    """

    def __init__(self, *, position: int, **outcome: Any) -> None:
        self.position = position
        super().__init__(detail=f" of pair {position}", **outcome)


class PairRangeError(PairError):
    """An index is not below the number of elements."""


class PairOrderError(PairError):
    """An index comes too late: below the one before it, or of a block before that one's."""


class AbortedError(KernelError):
    """The run was aborted by the host."""


class MemoryFaultError(DeviceError):
    """The kernel made an access that an emulated memory does not let pass."""

    def __init__(
        self, reason: str, address: int, *, write: bool, transactions: Sequence[str] = ()
    ) -> None:
        self.reason = reason
        self.address = address
        self.write = write
        super().__init__(
            f"{'write' if write else 'read'} at {address:#x}: {reason}", transactions=transactions
        )


class OutOfRangeError(MemoryFaultError):
    """An access beyond the end of the memory."""


class UninitialisedError(MemoryFaultError):
    """A read of memory that nobody has written."""


class GuardError(MemoryFaultError):
    """An access to a guard: memory between buffers, or freed."""


class ProtocolError(DeviceError):
    """A port broke its bus protocol."""

    def __init__(
        self, channel: str, rule: str, detail: str, *, cycle: int, transactions: Sequence[str] = ()
    ) -> None:
        self.channel = channel
        self.rule = rule
        self.cycle = cycle
        super().__init__(f"{channel}: {rule}: {detail} (cycle {cycle})", transactions=transactions)
