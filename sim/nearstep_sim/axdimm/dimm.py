"""`sim:axdimm?memory=ddr4-1600`: the RTL of a DIMM behind a host memory controller."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion, Poll
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.errors import (
    ArgumentError,
    DeviceError,
    OutOfBoundsError,
    WaitTimeoutError,
)
from nearstep.threads import shared, simulation_threads
from nearstep_sim.axdimm.library import (
    CHANNEL,
    DRAM_MODELS,
    HARNESS,
    MODULE,
    dimm_library,
    whole_library,
)
from nearstep_sim.axdimm.options import DimmOptions
from nearstep_sim.coverage.observed import saw_register
from nearstep_sim.models.dram.host import HostConfig, HostStatistics
from nearstep_sim.models.dram.library import (
    CGeometry,
    CHostStatistics,
    CPortConfig,
    CTiming,
)
from nearstep_sim.models.dram.trace import header
from nearstep_sim.models.memory import POISON
from nearstep_sim.updater.transfer import DeviceTransfer
from nearstep_sim.verilate.abi import load, structure, values
from nearstep_sim.verilate.harness import (
    FAULTED,
    HISTORY_BYTES,
    HUNG,
    TIMEOUT,
    CInjection,
    CPoll,
    FaultRecord,
    Simulation,
    writable,
)
from nearstep_spec.axdimm.registers import WINDOW_BYTES
from nearstep_spec.csr.model import LINE_BYTES, WORD_BYTES
from nearstep_spec.dram.command import Command, encode
from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.dram.latency import (
    HOST_READ_LATENCY,
    HOST_WRITE_LATENCY,
    HOST_WRITE_TO_READ,
    PHASES,
    TPHY_RDLAT,
    TPHY_WRLAT,
)

_GUARD, _UNWRITTEN, _WRITTEN = 0, 1, 2

RESET_CYCLES = 20_000
"""Cycles that a reset may take; the longest hand-over is shorter."""


_Options = structure("axdimm/dimm_memory.hpp", "DimmOptions")


_Counters = structure("axdimm/dimm.cpp", "ChannelCounters")


class DimmTransfer(DeviceTransfer):
    """A copy between host and DIMM."""

    device: DimmBackend

    def abort(self, max_cycles: int | None = None) -> None:
        """Abandon the copy and all submitted copies that have not ended; memory may be partly
        written.
        """
        if not self.ended:
            self.device.withdraw()


class DimmBackend(EmulatedBackend):
    """A DIMM simulated cycle by cycle and DDR4 command by DDR4 command.

    Host accesses of memory and registers are whole 64-byte lines through the host's memory
    controller and take device cycles. There is no cache: a write has reached the DRAM or the
    register when the call returns, and a read returns their contents. Consecutive words written to
    one line of registers are merged, and flushed at the latest before the next access of anything
    else.

    Registers and memory share one address space: channel c begins at c times its size.
    """

    capacity_options = "channels, ranks, density, width"

    def __init__(self, options: DimmOptions) -> None:
        self.family = "axdimm"
        self.options = options
        dimm = options.config()
        self.config = dimm
        self.capacity_bytes = dimm.channels * dimm.memory_bytes
        name = f"sim:axdimm?memory={options.memory}"
        if options.trace is not None:
            writable(name, "trace", options.trace)
        if options.commands is not None:
            files = (f"{options.commands}.{number}" for number in range(dimm.channels))
            writable(name, "commands", options.commands, *files)
        self._threads = simulation_threads()
        tops = {"whole": MODULE, "channel": CHANNEL}
        self._lib = load(
            whole_library(dimm, tops[options.top])
            if options.top in tops
            else dimm_library(dimm, trace=options.trace is not None),
            HARNESS,
            DRAM_MODELS,
        )
        host = HostConfig(
            density=dimm.density,
            width=dimm.width,
            ranks=dimm.channels * dimm.ranks,
            channel_ranks=dimm.ranks,
            mapping=dimm.mapping,
            interleave=dimm.interleave,
            read_latency=HOST_READ_LATENCY,
            write_latency=HOST_WRITE_LATENCY,
            write_to_read=HOST_WRITE_TO_READ,
            scheduler=options.scheduler,
            postpone=options.postpone,
            stall=options.stall,
            seed=options.seed,
        )
        given = _Options(
            host=host._c(),
            timing=CTiming.of(dimm.timing),
            geometry=CGeometry.of(dimm.geometry),
            port=CPortConfig(PHASES, BEAT_BYTES, TPHY_RDLAT, TPHY_WRLAT),
            native=int(options.fu == "native"),
            window_bytes=WINDOW_BYTES,
            trace=None if options.trace is None else options.trace.encode(),
            commands=None if options.commands is None else options.commands.encode(),
            commands_header=header(dimm.timing).encode(),
            threads=self._threads,
        )
        handle = self._lib.dimm_open(ctypes.byref(given))
        if handle is None:
            raise ArgumentError(self._lib.ddr4_last_error().decode())
        self._simulation = Simulation(
            self,
            "sim:axdimm",
            handle,
            self._lib.dimm_close,
            self._lib.dimm_abandon,
            at_exit=options.trace is not None or options.commands is not None,
        )
        self._limit = dimm.channels * dimm.channel_bytes
        self._line: int | None = None  # of registers, waiting to be written
        self._words: dict[int, int] = {}
        self._transfers: deque[DimmTransfer] = deque()  # not known to have ended

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        dimm = self.config
        return tuple((c * dimm.channel_bytes, dimm.memory_bytes) for c in range(dimm.channels))

    @property
    def cycles(self) -> int | None:
        with self._lock:
            self._flush()
            return int(self._lib.dimm_cycle(self._dimm))

    @property
    def host_statistics(self) -> HostStatistics:
        """Counts of the host's memory controller since the device was opened."""
        out = CHostStatistics()
        self._lib.dimm_statistics(self._dimm, ctypes.byref(out))
        return HostStatistics(**values(out))

    @property
    def dram_counters(self) -> Sequence[dict[str, int]]:
        """DRAM commands of each channel since the device was opened."""
        found = []
        for channel in range(self.config.channels):
            counters = _Counters()
            self._lib.dimm_counters(self._dimm, channel, ctypes.byref(counters))
            found.append({name: getattr(counters, name) for name, *_ in _Counters._fields_})
        return found

    def give(
        self, channel: int, command: Command, *, rank: int | None = None, **coordinates: int
    ) -> None:
        """Make the host's memory controller issue MRS, ZQCS or ZQCL to a rank of a channel, or to
        all ranks, before the next access; see `nearstep_spec.dram.command.encode`.

        Raises
        ------
        ArgumentError : another command, or no such channel or rank.
        """
        if command not in (Command.MRS, Command.ZQCS, Command.ZQCL):
            raise ArgumentError(f"command must be MRS, ZQCS or ZQCL, not {command!r}")
        if not 0 <= channel < self.config.channels:
            raise ArgumentError(f"channel must be below {self.config.channels}, not {channel}")
        ranks = self.config.ranks
        if rank is not None and not 0 <= rank < ranks:
            raise ArgumentError(f"rank must be below {ranks}, not {rank}")
        self._flush()
        pins = encode(command, **coordinates)
        for each in range(ranks) if rank is None else (rank,):
            self._lib.dimm_give(self._dimm, channel * ranks + each, pins.address, pins.bg, pins.ba)

    def read_register(self, address: int) -> int:
        self._flush()
        line, offset = self._place(address)
        words = self._read_lines(line, 1, f"register read at {address:#x}").view(np.uint32)
        saw_register(self, self.family, self.config, address, int(words[offset]))
        return int(words[offset])

    def write_register(self, address: int, value: int) -> None:
        line, offset = self._place(address)
        if self._line is not None and (line != self._line or offset in self._words):
            self._flush()
        self._line = line
        self._words[offset] = value

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        self._flush()
        self._check_range("memory read", address, out.size)
        if not out.size:
            return
        first, last = address // LINE_BYTES, (address + out.size - 1) // LINE_BYTES
        what = f"read of {out.size} bytes at {address:#x}"
        lines = last - first + 1
        if lines * LINE_BYTES == out.size and out.flags.c_contiguous:
            self._check(self._carry_out(self._lib.dimm_read, first, out.ctypes.data, lines), what)
            return
        skip = address % LINE_BYTES
        out[:] = self._read_lines(first, lines, what)[skip : skip + out.size]

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self._flush()
        self._check_range("memory write", address, data.size)
        if not data.size:
            return
        end = address + data.size
        first, last = address // LINE_BYTES, (end - 1) // LINE_BYTES
        what = f"write of {data.size} bytes at {address:#x}"
        head, tail = address - first * LINE_BYTES, (last + 1) * LINE_BYTES - end
        if head or tail:
            whole = np.empty((last - first + 1) * LINE_BYTES, np.uint8)
            for line in {first} if not tail else {last} if not head else {first, last}:
                at = (line - first) * LINE_BYTES
                whole[at : at + LINE_BYTES] = self._old(line)
            whole[head : whole.size - tail] = data
            data = whole
        data = np.ascontiguousarray(data)
        lines = last - first + 1
        self._check(self._carry_out(self._lib.dimm_write, first, data.ctypes.data, lines), what)

    def submit_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        whole = address % LINE_BYTES == 0 and out.size % LINE_BYTES == 0
        if not out.size or not whole or not out.flags.c_contiguous:
            self._wait_for_transfers()
            return super().submit_read(address, out)
        return self._submit(address, out, f"read of {out.size} bytes at {address:#x}", writes=False)

    def submit_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        """Submit whole lines; write parts of lines at once, after all earlier transfers."""
        whole = address % LINE_BYTES == 0 and data.size % LINE_BYTES == 0
        if not data.size or not whole:
            self._wait_for_transfers()
            return super().submit_write(address, data)
        data = np.ascontiguousarray(data)
        what = f"write of {data.size} bytes at {address:#x}"
        return self._submit(address, data, what, writes=True)

    def advance(self, max_cycles: int, polls: Sequence[Poll] = ()) -> None:
        self._flush()
        array = (CPoll * len(polls))(*((p.address, p.mask, p.value) for p in polls))
        end = self._lib.dimm_cycle(self._dimm) + max_cycles
        self._lib.dimm_threads(self._dimm, shared(self._threads))
        status = self._carry_out(self._lib.dimm_advance, array, len(polls), end)
        self._check(status, "advance")

    def look_at_transfers(self) -> None:
        """Complete the transfers that have ended; no error is raised and no time passes."""
        while self._transfers and (cycle := self._lib.dimm_next_end(self._dimm)):
            self._transfers.popleft().end(cycle, None)

    def withdraw(self) -> None:
        """Abandon the transfers that have not ended."""
        self.look_at_transfers()
        self._lib.dimm_withdraw(self._dimm)
        while self._transfers:
            transfer = self._transfers.popleft()
            transfer.end(0, DeviceError(f"{transfer.what} was given up"))

    def _submit(
        self, address: int, data: NDArray[np.uint8], what: str, *, writes: bool
    ) -> DimmTransfer:
        self._flush()
        self._check_range(what, address, data.size)
        base, size = next(r for r in reversed(self.regions) if r[0] <= address)
        if address + data.size > base + size:
            raise OutOfBoundsError(what, address, address + data.size, base + size)
        line, lines = address // LINE_BYTES, data.size // LINE_BYTES
        begun = self._lib.dimm_cycle(self._dimm)
        self._lib.dimm_submit(self._dimm, line, data.ctypes.data, lines, int(writes))
        transfer = DimmTransfer(self, what, begun, data)
        self._transfers.append(transfer)
        return transfer

    def _wait_for_transfers(self) -> None:
        while self._transfers:
            self._transfers[-1].wait()

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        self._flush()
        array = (CPoll * len(polls))(*((p.address, p.mask, p.value) for p in polls))
        end = self._lib.dimm_cycle(self._dimm) + max_cycles
        self._lib.dimm_threads(self._dimm, shared(self._threads))

        def look(dimm: int) -> int:
            left = max(0, end - self._lib.dimm_cycle(dimm))
            return int(self._lib.dimm_wait(dimm, array, len(polls), left))

        status = self._carry_out(look)
        self._check(status, "wait")
        if status == TIMEOUT:
            raise WaitTimeoutError(
                " or ".join(map(str, polls)), max_cycles, transactions=self.transactions()
            )

    def reset(self) -> None:
        """Request normal mode and reset the kernel of each channel through its arbiter, as a host.

        Violations of a kernel before the reset are ignored.
        """
        self._line, self._words = None, {}
        self._lib.dimm_watch(self._dimm, 0)
        try:
            self._reset_channels()
        finally:
            self._lib.dimm_watch(self._dimm, 1)

    def _reset_channels(self) -> None:
        for name, (base, block) in self.config.maps().items():
            if not name.startswith("arbiter"):
                continue
            mode, _ = block.lookup("mode.acceleration")
            control, pulse = block.lookup("control.kernel_reset")
            status, normal = block.lookup("status.normal")
            self.write_register(base + mode.offset, 0)
            self.write_register(base + control.offset, pulse.mask)
            self.wait(
                [Poll(address=base + status.offset, mask=normal.mask, value=normal.mask)],
                RESET_CYCLES,
            )

    def close(self) -> None:
        self._transfers.clear()
        self._simulation.close()

    def transactions(self) -> Sequence[str]:
        text = ctypes.create_string_buffer(HISTORY_BYTES)
        self._lib.dimm_history(self._dimm, text, HISTORY_BYTES)
        return tuple(text.value.decode().splitlines())

    def protect(self, address: int, nbytes: int) -> None:
        self._mark(address, nbytes, _GUARD)

    def claim(self, address: int, nbytes: int) -> None:
        self._mark(address, nbytes, _UNWRITTEN)

    def inject(self, injection: Injection) -> None:
        """Withhold read data (`never`) and all later ones until the kernel is reset.

        A DDR4 channel has no error responses.

        Raises
        ------
        ArgumentError : another kind of misbehaviour.
        """
        injection.check_kernels()
        if injection.kind != "never" or injection.write:
            raise ArgumentError(
                "a DDR4 channel can only lose read data (kind never, write False), "
                f"not {injection.kind} with write {injection.write}"
            )
        self._lib.dimm_inject(self._dimm, ctypes.byref(CInjection.of(injection)))

    def heal(self) -> None:
        self._lib.dimm_heal(self._dimm)

    def _flush(self) -> None:
        """Flush the pending line of registers, with its unwritten words."""
        if self._line is None:
            return
        line, words = self._line, self._words
        self._line, self._words = None, {}
        what = f"register write at {line * LINE_BYTES:#x}"
        data = self._read_lines(line, 1, what).view(np.uint32)
        for offset, value in words.items():
            data[offset] = value
        self._check(self._carry_out(self._lib.dimm_write, line, data.ctypes.data, 1), what)

    def _old(self, line: int) -> NDArray[np.uint8]:
        """Return the contents of a partly written line; poison if never written."""
        if self._lib.dimm_state(self._dimm, line) != _WRITTEN:
            return np.full(LINE_BYTES // WORD_BYTES, POISON, np.uint32).view(np.uint8)
        return self._read_lines(line, 1, f"read of the line at {line * LINE_BYTES:#x}")

    def _read_lines(self, first: int, lines: int, what: str) -> NDArray[np.uint8]:
        out = np.empty(lines * LINE_BYTES, np.uint8)
        self._check(self._carry_out(self._lib.dimm_read, first, out.ctypes.data, lines), what)
        return out

    def _place(self, address: int) -> tuple[int, int]:
        """Return the line of a register and the number of its word in the line."""
        self._check_range("register", address, WORD_BYTES)
        return address // LINE_BYTES, address % LINE_BYTES // WORD_BYTES

    def _mark(self, address: int, nbytes: int, state: int) -> None:
        self._check_range("mark", address, nbytes)
        first, limit = address // LINE_BYTES, -(-(address + nbytes) // LINE_BYTES)
        self._lib.dimm_mark(self._dimm, first, limit - first, state)

    def _check_range(self, what: str, address: int, nbytes: int) -> None:
        if address < 0 or address + nbytes > self._limit:
            raise OutOfBoundsError(what, address, address + nbytes, self._limit)

    @property
    def _dimm(self) -> int:
        return self._simulation.handle

    def _carry_out(self, call: Callable[..., int], *arguments: object) -> int:
        """As `nearstep_sim.verilate.harness.Simulation.carry_out`."""
        return self._simulation.carry_out(call, *arguments)

    def _check(self, status: int, action: str) -> None:
        if status == HUNG:
            raise DeviceError(
                f"{action}: the host's memory controller made no progress",
                transactions=self.transactions(),
            )
        if status == FAULTED:
            fault = FaultRecord()
            self._lib.dimm_fault(self._dimm, ctypes.byref(fault))
            raise fault.error(self.transactions())
