"""DDR4 rank in Python: the C++ model behind single commands or behind a DFI port."""

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from os import PathLike, fspath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_hw.dram.dfi import PHASES, tphy_rdlat, tphy_wrlat
from nearstep_sim.models.dram.library import (
    CBusClocks,
    CGeometry,
    CIssued,
    CMapping,
    CPortConfig,
    CRefreshExtremes,
    CSlot,
    CTiming,
    CViolation,
    load_error,
)
from nearstep_sim.models.dram.library import load as load_library
from nearstep_sim.models.dram.trace import TraceCommand, header
from nearstep_sim.verilate.abi import values
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.command import DESELECT, Command, Pins, encode
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.timing import DramTiming
from nearstep_spec.errors import NearstepError

__all__ = [
    "BusClocks",
    "Ddr4Device",
    "Ddr4Port",
    "DramViolationError",
    "Issued",
    "RefreshExtremes",
    "columns_of",
    "violation_of",
]

_UNKNOWN = len(Command)  # a code on the pins that is no command of `Command`


@dataclass(frozen=True)
class Issued:
    """A command that reached the rank. `address` has the address pins.

    `command` is None for a code that is no known command, and NOP where only time passed.
    """

    clock: int
    command: Command | None
    bank_group: int
    bank: int
    address: int


@dataclass(frozen=True)
class BusClocks:
    """Clocks of the data bus, up to the end of the last burst.

    `data` carried data, `start` are those before the first data. Any other gap before a column
    command is counted for the first cause that holds: `refresh` (a REF in the gap), `turnaround`
    (the direction changed), `row` (its row was opened in the gap), `bank_group` (at most three
    clocks beyond tCCD_L after its own bank group), `other`.
    """

    data: int
    start: int
    refresh: int
    turnaround: int
    row: int
    bank_group: int
    other: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True)
class RefreshExtremes:
    """Extremes of a rank's refresh intervals and debts, at its REF commands.

    `longest_gap` is the clocks between two, or up to the first; `shortest_seventeen` those from one
    to the sixteenth after it, 2**63 - 1 if there were fewer; the debts are those before a REF.
    """

    longest_gap: int
    shortest_seventeen: int
    lowest_debt: int
    highest_debt: int


class DramViolationError(NearstepError, RuntimeError):
    """A command broke a rule of DDR4.

    Attributes
    ----------
    rule : JEDEC name of the minimum, or the state that does not allow the command.
    previous, next : the two commands; `previous` is None where there was none.
    minimum : clocks required by the rule; 0 for a rule of state.
    """

    def __init__(
        self, rule: str, previous: Issued | None, next_: Issued, minimum: int, text: str
    ) -> None:
        self.rule = rule
        self.previous = previous
        self.next = next_
        self.minimum = minimum
        super().__init__(text)


def _issued(c: CIssued) -> Issued | None:
    if c.ck < 0:
        return None
    command = None if c.command == _UNKNOWN else Command(c.command)
    return Issued(c.ck, command, c.bg, c.ba, c.address)


def _violation(handle: int) -> DramViolationError | None:
    found = CViolation()
    if not load_library().ddr4_device_violation(handle, ctypes.byref(found)):
        return None
    return violation_of(found)


def violation_of(found: CViolation) -> DramViolationError:
    """The error of a violation that the C++ models have found."""
    next_ = _issued(found.next)
    assert next_ is not None
    return DramViolationError(
        found.rule.decode(), _issued(found.previous), next_, found.minimum, found.text.decode()
    )


class Ddr4Device:
    """One DDR4 rank: contents and the rules between commands.

    The first violation raises `DramViolationError`, and so does every command after it.

    Parameters
    ----------
    timing : clocks of the part.
    geometry : by default from the timing's density and width.
    rank : number in traces.
    """

    def __init__(
        self, timing: DramTiming, geometry: DramGeometry | None = None, *, rank: int = 0
    ) -> None:
        self.timing = timing
        self.geometry = geometry or DramGeometry(timing.density, timing.width)
        self._library = load_library()
        self._owner: object = None
        self.handle: int = self._library.ddr4_device_new(
            ctypes.byref(CTiming.of(timing)), ctypes.byref(CGeometry.of(self.geometry)), rank
        )

    @classmethod
    def borrowed(
        cls, handle: int, timing: DramTiming, geometry: DramGeometry, owner: object
    ) -> "Ddr4Device":
        """Return a view of a rank that `owner` owns, and keep `owner` alive."""
        self = cls.__new__(cls)
        self._owner = owner
        self.timing, self.geometry, self.handle = timing, geometry, handle
        self._library = load_library()
        return self

    def __del__(self) -> None:
        if getattr(self, "_owner", self) is None and getattr(self, "handle", None):
            self._library.ddr4_device_free(self.handle)

    def command(self, clock: int, pins: Pins) -> None:
        """One command slot. Raises `DramViolationError`."""
        if not self._library.ddr4_device_command(self.handle, clock, ctypes.byref(CSlot(*pins))):
            self.check()

    def issue(self, clock: int, command: Command, **coordinates: int) -> None:
        """A command by name; see `nearstep_spec.dram.command.encode`."""
        self.command(clock, encode(command, **coordinates))

    def play(self, commands: Sequence[TraceCommand]) -> None:
        """Many commands at once. Raises `DramViolationError`."""
        n = len(commands)
        columns = columns_of(commands, "bank_group", "bank", "row", "column")
        pointers = [array.ctypes.data for array in columns]
        if self._library.ddr4_device_play(self.handle, n, *pointers) != n:
            self.check()

    def advance(self, clock: int) -> None:
        """Advance time without a command.

        Raises
        ------
        DramViolationError : a refresh is overdue.
        """
        if not self._library.ddr4_device_advance(self.handle, clock):
            self.check()

    def check(self) -> None:
        """Raise the violation, if there is one."""
        if found := self.violation:
            raise found

    @property
    def violation(self) -> DramViolationError | None:
        """The first violation."""
        return _violation(self.handle)

    def open_row(self, bank_group: int, bank: int) -> int | None:
        row = self._library.ddr4_device_open_row(self.handle, bank_group, bank)
        return None if row < 0 else int(row)

    def refresh_debt(self, clock: int) -> int:
        """Refreshes owed at `clock`; negative when pulled in."""
        return int(self._library.ddr4_device_refresh_debt(self.handle, clock))

    def refresh_offset(self, clocks: int) -> None:
        """Begin refresh intervals so many clocks early (late if negative), as the refreshing
        controller does.

        Must be called before the first command.
        """
        self._library.ddr4_device_refresh_offset(self.handle, clocks)

    @property
    def refresh_extremes(self) -> RefreshExtremes:
        """Return the extremes of the rank's refresh intervals and debts."""
        out = CRefreshExtremes()
        self._library.ddr4_device_refresh_extremes(self.handle, ctypes.byref(out))
        return RefreshExtremes(**values(out))

    @property
    def counts(self) -> dict[Command, int]:
        """Commands accepted, by kind."""
        out = (ctypes.c_uint64 * len(Command))()
        self._library.ddr4_device_counts(self.handle, out)
        return {command: int(out[command]) for command in Command}

    @property
    def bus_clocks(self) -> BusClocks:
        """Return the use of the bus since the last `restart_bus_clocks`."""
        out = CBusClocks()
        self._library.ddr4_device_account(self.handle, ctypes.byref(out))
        return BusClocks(**values(out))

    def restart_bus_clocks(self, clock: int) -> None:
        """Count from `clock` on."""
        self._library.ddr4_device_restart_account(self.handle, clock)

    def trace_to(self, path: str | PathLike[str]) -> None:
        """Write every command from now on to a file. Raises `OSError`."""
        text = header(self.timing).encode()
        if not self._library.ddr4_device_trace(self.handle, fspath(path).encode(), text):
            raise OSError(f"cannot write {fspath(path)!r}")

    def trace_close(self) -> None:
        """End the trace; the file is then complete."""
        self._library.ddr4_device_trace_close(self.handle)

    def read(self, mapping: AddressMapping, address: int, size: int) -> NDArray[np.uint8]:
        """Read contents without the pins: `size` bytes at a byte address, both whole beats."""
        out = np.empty(size, np.uint8)
        beat, count = _beats(self.geometry, mapping, address, size)
        self._library.ddr4_device_read(
            self.handle, ctypes.byref(CMapping.of(mapping)), beat, count, out.ctypes.data
        )
        return out

    def write(self, mapping: AddressMapping, address: int, data: NDArray[Any]) -> None:
        """Write contents without the pins; `address` and the size are whole beats."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        beat, count = _beats(self.geometry, mapping, address, raw.size)
        self._library.ddr4_device_write(
            self.handle, ctypes.byref(CMapping.of(mapping)), beat, count, raw.ctypes.data
        )

    @property
    def allocated_rows(self) -> int:
        """Rows that occupy memory of this process: 8 KiB each."""
        return int(self._library.ddr4_device_allocated_rows(self.handle))


def columns_of(commands: Sequence[TraceCommand], *names: str) -> list[NDArray[Any]]:
    """Clocks, commands and some coordinates of commands, as the C++ models take them."""
    return [
        np.array([c.clock for c in commands], np.uint64),
        *(np.array([getattr(c, name) for c in commands], np.int32) for name in ("command", *names)),
    ]


def _beats(
    geometry: DramGeometry, mapping: AddressMapping, address: int, size: int
) -> tuple[int, int]:
    if mapping.geometry.ranks != 1:
        raise ValueError(f"mapping must be of one rank, not of {mapping.geometry.ranks}")
    if address % BEAT_BYTES or size % BEAT_BYTES:
        raise ValueError(f"address and size must be multiples of 64, not {address:#x} and {size}")
    if address < 0 or address + size > geometry.capacity_bytes:
        raise ValueError(f"{size} bytes at {address:#x} exceed {geometry.capacity_bytes:#x} bytes")
    return address // BEAT_BYTES, size // BEAT_BYTES


class Ddr4Port:
    """A rank behind a PHY, one call a fabric cycle: for benches that drive a `DfiSignature`.

    Parameters
    ----------
    device : the rank.
    phases, data_bytes : shape of the port.
    read_latency, write_latency : fabric cycles; by default those of `nearstep_hw.dram.dfi`.
    """

    def __init__(
        self,
        device: Ddr4Device,
        *,
        phases: int = PHASES,
        data_bytes: int = BEAT_BYTES,
        read_latency: int | None = None,
        write_latency: int | None = None,
    ) -> None:
        self.device = device
        self.phases = phases
        self.data_bytes = data_bytes
        timing = device.timing
        read_latency = tphy_rdlat(timing, phases) if read_latency is None else read_latency
        write_latency = tphy_wrlat(timing, phases) if write_latency is None else write_latency
        self._library = load_library()
        config = CPortConfig(phases, data_bytes, read_latency, write_latency)
        self.handle: int | None = self._library.ddr4_port_new(device.handle, ctypes.byref(config))
        if not self.handle:
            raise ValueError(load_error())
        self._slots = (CSlot * phases)()
        self._rddata = (ctypes.c_uint8 * data_bytes)()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.ddr4_port_free(self.handle)

    @property
    def cycle(self) -> int:
        """Fabric cycle of the next call."""
        return int(self._library.ddr4_port_cycle_number(self.handle))

    @property
    def uninitialised_reads(self) -> int:
        """Return the number of reads of unwritten beats: a pattern of their address is read."""
        return int(self._library.ddr4_port_uninitialised(self.handle))

    def tick(
        self,
        slots: Sequence[Pins] = (),
        wrdata: bytes | None = None,
        wrdata_mask: int = 0,
    ) -> bytes | None:
        """One fabric cycle.

        Parameters
        ----------
        slots : pins of p0, p1, ...; missing ones are deselected.
        wrdata : data of this cycle, or None while `wrdata_en` is low.
        wrdata_mask : 1 keeps the byte in memory.

        Returns
        -------
        bytes | None : `rddata` of the *next* cycle, or None while `rddata_valid` is low.

        Raises
        ------
        DramViolationError
        """
        if wrdata is not None and len(wrdata) != self.data_bytes:
            raise ValueError(f"wrdata must be {self.data_bytes} bytes, not {len(wrdata)}")
        for phase in range(self.phases):
            self._slots[phase] = CSlot(*(slots[phase] if phase < len(slots) else DESELECT))
        status = self._library.ddr4_port_cycle(
            self.handle,
            self._slots,
            self.phases,
            self.data_bytes,
            wrdata is not None,
            wrdata,
            wrdata_mask,
            self._rddata,
        )
        if not status & 1:
            self.device.check()
        return bytes(self._rddata) if status & 2 else None
