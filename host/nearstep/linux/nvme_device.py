"""A device with the command sets for computational storage, behind Linux's NVMe driver."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Poll
from nearstep.buffer import Buffer
from nearstep.errors import ArgumentError, DeviceError, MismatchError
from nearstep.linux.nvme.programs import BLOCK_VERSION, PUID, RANGE
from nearstep.linux.nvme.standard import (
    PAGE_BYTES,
    Admin,
    Choice,
    CommandSet,
    Memory,
    Program,
    Status,
)
from nearstep.linux.passthrough import CommandStatusError, Node, PassedCommand
from nearstep.storage.aligned import aligned_bytes
from nearstep.updater.arguments import RuleArguments
from nearstep.updater.buffers import common_channel
from nearstep.updater.direct import DirectDevice, EndedRun
from nearstep.updater.formats import CopyOut, Gradient
from nearstep.updater.pairs import Pairs
from nearstep.updater.rounding import Drawn
from nearstep_spec.rule.rules import BY_RULE
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig

Bytes = NDArray[np.uint8]

CLASS = Path("sys/class/nvme-generic")
PROGRAM_LIST = 0x82
ENTRY = struct.Struct("<BB6x8s48x")
CHUNK_BYTES = 256 * 1024
"""Most bytes of one transfer: scattered pages of it fit in Linux's 128 segments."""

WORD_BYTES, LINE_BYTES = 4, 64
MOST_BYTES = 1 << 48
"""No local memory is assumed to be larger."""


def find_siblings(path: Path, root: Path = Path("/")) -> dict[Path, tuple[int, int]]:
    """NSID and command set of each node of the controller of a node, from /sys.

    Parameters
    ----------
    path : such as /dev/ng0n3; any namespace of the controller.
    root : in which /sys is.

    Raises
    ------
    MismatchError : it is no node of a namespace, or Linux (before 6.8) does not say what it is.
    """
    nodes = root / CLASS
    if not (nodes / path.name).exists():
        known = sorted(each.name for each in nodes.glob("*"))
        raise MismatchError(str(path), f"a generic node of a namespace ({known})", "another file")
    controller = (nodes / path.name / "device").resolve()
    found = {}
    for each in sorted(nodes.iterdir()):
        if (each / "device").resolve() == controller:
            disk = controller / each.name.replace("ng", "nvme", 1)
            try:
                nsid, command_set = (int((disk / name).read_text()) for name in ("nsid", "csi"))
            except FileNotFoundError as error:
                raise MismatchError(
                    str(each), "described in /sys (Linux 6.8)", f"without {error.filename}"
                ) from None
            found[path.with_name(each.name)] = nsid, command_set
    return found


def choose(
    siblings: Mapping[Path, tuple[int, int]], given: Path, wanted: CommandSet
) -> tuple[Path, int]:
    """The namespace with a command set: the given one, or the only one; and its NSID.

    Raises
    ------
    MismatchError : there is none, or there are several.
    """
    of_set = {path: nsid for path, (nsid, kind) in siblings.items() if kind == wanted}
    if given in of_set:
        return given, of_set[given]
    if len(of_set) != 1:
        listed = [f"{path}: {kind}" for path, (_, kind) in siblings.items()]
        raise MismatchError(
            f"controller of {given}",
            f"with one namespace of command set {wanted} ({wanted.name})",
            f"with {len(of_set)} ({', '.join(listed)})",
        )
    return next(iter(of_set.items()))


class LocalMemory(Backend):
    """Local memory and programs of a controller.

    Parameters
    ----------
    programs, memory : nodes of their namespaces; closed with the device.
    rules : names of the rules to use, as in `rules=` of a card. None: those of nearstep that are
        among the programs.
    order : of the arithmetic.
    inline : whether Execute has its ranges in its data, and its arguments in local memory, instead
        of a memory range set.

    Attributes
    ----------
    config : rules among the programs.

    Raises
    ------
    MismatchError : a rule is not among the programs, or none is; or ranges of memory have a
        granularity above 4 bytes.
    ArgumentError : a rule cannot be one of a kernel.
    NodeError, CommandStatusError
    """

    family = "nvme"
    config: UpdateKernelConfig

    def __init__(
        self,
        programs: Node,
        memory: Node,
        *,
        rules: Sequence[str] | None = None,
        order: str = "default",
        inline: bool = False,
    ) -> None:
        self._programs, self._memory, self._inline = programs, memory, inline
        self._lock = threading.RLock()
        self._sets: dict[bytes, int] = {}
        self._active: list[int] = []
        limits = self._identify(0x05, programs.number, CommandSet.PROGRAMS)
        granularity, self._most_ranges = struct.unpack_from("<HB", limits.tobytes(), 4)
        if 1 << granularity > WORD_BYTES:
            raise MismatchError(
                f"ranges of {programs.path}", f"multiples of {WORD_BYTES} bytes", 1 << granularity
            )
        shift = int(self._identify(0x01)[77])
        self._chunk = min(CHUNK_BYTES, PAGE_BYTES << shift) if shift else CHUNK_BYTES
        listed = self._listed()
        self.config, digests = _config(str(programs.path), listed, rules, order)
        self._index = {
            name: listed.index(digest) + Choice.FIRST_PROGRAM for name, digest in digests.items()
        }
        size = self._size()
        self._block = size - LINE_BYTES  # of arguments, with inline ranges
        self.capacity_bytes = self._block if inline else size

    @property
    def cycles(self) -> None:
        return None

    def read_memory(self, address: int, out: Bytes) -> None:
        first, last = address % WORD_BYTES, -(address + out.size) % WORD_BYTES
        if first or last:  # the device has words alone
            words = np.empty(first + out.size + last, np.uint8)
            self._transfer(Memory.READ, address - first, words)
            out[:] = words[first : first + out.size]
        else:
            self._transfer(Memory.READ, address, out)

    def write_memory(self, address: int, data: Bytes) -> None:
        first, last = address % WORD_BYTES, -(address + data.size) % WORD_BYTES
        if first or last:
            words = np.empty(first + data.size + last, np.uint8)
            self._transfer(Memory.READ, address - first, words)
            words[first : first + data.size] = data
            address, data = address - first, words
        self._transfer(Memory.WRITE, address, data)

    def execute(self, arguments: RuleArguments, ranges: Sequence[tuple[int, int]]) -> int:
        """Execute a rule once.

        Parameters
        ----------
        ranges : address and bytes of each array, in the rule's order.

        Returns
        -------
        int : elements that were updated, as the device says.

        Raises
        ------
        MismatchError : the device takes fewer ranges.
        NodeError
        CommandStatusError : 198h or 18Dh if the controller was reset since the program was
            activated; `reset` prepares the device again.
        """
        if 0 < self._most_ranges < len(ranges) + self._inline:
            raise MismatchError(
                f"ranges of {self._programs.path}",
                f"at least {len(ranges) + self._inline}, for {arguments.rule}",
                self._most_ranges,
            )
        with self._lock:
            return self._execute(arguments, ranges)

    def _execute(self, arguments: RuleArguments, ranges: Sequence[tuple[int, int]]) -> int:
        index = self._index[arguments.rule]
        self._activate(index)
        table, block = [*ranges], pack_block(arguments)
        if self._inline:
            self.write_memory(self._block, np.frombuffer(block, np.uint8))
            table.append((self._block, len(block)))
        packed = b"".join(RANGE.pack(self._memory.number, size, start) for start, size in table)
        number = 0 if self._inline else self._range_set(packed, len(table))
        command = PassedCommand(
            name=f"Execute of program {index}",
            opcode=Program.EXECUTE,
            namespace=self._programs.number,
            data=self._page(packed if self._inline else block),
            cdw2=index | number << 16,
            cdw3=len(table) if self._inline else 0,
        )
        return self._programs.run(command)

    def reset(self) -> None:
        """Prepare the device again after a failed command, or a reset of the controller.

        Memory range sets are deleted, and programs inactive until they are used. Memory is kept.
        """
        with self._lock:
            for number in self._sets.values():
                with contextlib.suppress(CommandStatusError):  # gone with a reset
                    self._delete_set(number)
            self._sets.clear()
            self._active.clear()

    def close(self) -> None:
        """Delete memory range sets, deactivate programs, and close the nodes."""
        try:
            active = [*self._active]
            self.reset()
            for each in active:
                self._select(each, 1 - Choice.ACTIVATES)
        except DeviceError:
            pass  # the device has gone, or was reset
        finally:
            self._sets.clear()
            self._active.clear()
            self._programs.close()
            self._memory.close()

    def read_register(self, address: int) -> NoReturn:
        raise ArgumentError("an NVMe namespace has no registers")

    def write_register(self, address: int, value: int) -> NoReturn:
        raise ArgumentError("an NVMe namespace has no registers")

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        """Return: a command has ended when the call that sends it returns."""

    def _transfer(self, opcode: Memory, address: int, data: Bytes) -> None:
        commands = [
            PassedCommand(
                name=f"{'Memory Read' if opcode == Memory.READ else 'Memory Write'} at {start:#x}",
                opcode=opcode,
                namespace=self._memory.number,
                data=data[at : at + self._chunk],
                cdw10=start & 0xFFFFFFFF,
                cdw11=start >> 32,
                cdw12=min(self._chunk, data.size - at),
            )
            for at in range(0, data.size, self._chunk)
            for start in (address + at,)
        ]
        self._memory.run(*commands)

    def _page(self, data: bytes) -> Bytes:
        """Data of a small command, in memory that no earlier one uses."""
        page = aligned_bytes(PAGE_BYTES)[: len(data)]
        page[:] = np.frombuffer(data, np.uint8)
        return page

    def _identify(self, structure: int, namespace: int = 0, command_set: int = 0) -> Bytes:
        data = aligned_bytes(PAGE_BYTES)
        self._programs.admin(
            PassedCommand(
                name=f"Identify {structure:02x}h",
                opcode=Admin.IDENTIFY,
                namespace=namespace,
                data=data,
                cdw10=structure,
                cdw11=command_set << 24,
            )
        )
        return data

    def _listed(self) -> Sequence[str | None]:
        """Identifiers of the programs by position; None for an empty one, or another kind."""
        nbytes = ENTRY.size
        while True:
            data = aligned_bytes(nbytes)
            words = nbytes // 4 - 1
            self._programs.admin(
                PassedCommand(
                    name="Get Log Page 82h",
                    opcode=Admin.GET_LOG,
                    namespace=self._programs.number,
                    data=data,
                    cdw10=PROGRAM_LIST | (words & 0xFFFF) << 16,
                    cdw11=words >> 16,
                )
            )
            wanted = ENTRY.size * (1 + int(data[:4].view("<u4")[0]))
            if wanted <= nbytes:
                break
            nbytes = wanted
        return [
            identifier.hex() if flags & 3 and flags & 0x38 == PUID else None
            for flags, _, identifier in ENTRY.iter_unpack(data[ENTRY.size : wanted].tobytes())
        ]

    def _size(self) -> int:
        """Bytes of the local memory: no field of Identify is known to say it, so reads of a word
        find the end."""
        low, high = 0, MOST_BYTES // WORD_BYTES
        word = self._page(bytes(WORD_BYTES))
        while low < high:
            middle = (low + high) // 2
            try:
                self._transfer(Memory.READ, middle * WORD_BYTES, word)
            except CommandStatusError as error:
                if error.actual not in (Status.INVALID_FIELD, Status.LBA_OUT_OF_RANGE):
                    raise
                high = middle
            else:
                low = middle + 1
        return low * WORD_BYTES // LINE_BYTES * LINE_BYTES

    def _activate(self, index: int) -> None:
        if index not in self._active:
            self._select(index, Choice.ACTIVATES)
            self._active.append(index)

    def _select(self, index: int, select: int) -> None:
        self._programs.admin(
            PassedCommand(
                name=f"Program Activation Management of program {index}",
                opcode=Admin.ACTIVATE_PROGRAM,
                namespace=self._programs.number,
                cdw10=index | select << 16,
            )
        )

    def _range_set(self, table: bytes, count: int) -> int:
        """Number of the set with these ranges; if the device has no room, the oldest is deleted."""
        create = PassedCommand(
            name="Memory Range Set Management: create",
            opcode=Admin.MANAGE_RANGES,
            namespace=self._programs.number,
            data=self._page(table),
            cdw11=count,
        )
        while table not in self._sets:
            try:
                self._sets[table] = self._programs.admin(create)
            except CommandStatusError as error:
                if error.actual != Status.TOO_MANY_RANGE_SETS or not self._sets:
                    raise
                self._delete_set(self._sets.pop(next(iter(self._sets))))
        return self._sets[table]

    def _delete_set(self, number: int) -> None:
        self._programs.admin(
            PassedCommand(
                name=f"Memory Range Set Management: delete set {number}",
                opcode=Admin.MANAGE_RANGES,
                namespace=self._programs.number,
                cdw10=1 | number << 16,
            )
        )


class NvmeDevice(DirectDevice):
    """A device with programs of update rules on its local memory.

    A run is an Execute command, and has ended when the call that starts it returns.
    """

    backend: LocalMemory

    def __init__(self, backend: Backend, url: str) -> None:
        if not isinstance(backend, LocalMemory):
            raise MismatchError("device", "with local memory", type(backend).__name__)
        super().__init__(backend, url, backend.config)

    def _update(  # type: ignore[override]  # other runs read registers
        self,
        arguments: RuleArguments,
        states: Mapping[str, Buffer],
        g: Buffer | Pairs,
        gradient: Gradient,
        copy_out: CopyOut,
        drawn: Drawn | None,
    ) -> EndedRun:
        buffers = self._check_update(arguments, states, g, gradient, copy_out)
        arguments.check()
        common_channel(buffers, self.channel_of)
        count = states["p"].size
        ordered = [buffers[name] for name in arguments.form.rule.arrays_in]
        if count:
            spans = [(each.address, each.nbytes) for each in ordered]
            updated = self.backend.execute(arguments, spans)
            if updated != count:
                raise MismatchError(f"elements that {arguments.rule} updated", count, updated)
        return EndedRun(count)


def pack_block(arguments: RuleArguments) -> bytes:
    """The argument block of Execute, as `nearstep.linux.nvme.programs` reads it."""
    rule, values = arguments.form.rule, arguments.scalars
    scalars, switches = rule.scalars, rule.switches
    most = (Choice.ARGUMENT_BYTES - 8) // 4
    if len(scalars) + len(switches) > most:
        count = len(scalars) + len(switches)
        raise MismatchError(f"registers of {rule.name}", f"at most {most}, of a block", count)
    return struct.pack(
        f"<II{len(scalars)}f{len(switches)}I",
        BLOCK_VERSION,
        len(scalars) + len(switches),
        *(float(values[name]) for name in scalars),
        *(int(values.get(name, 0)) for name in switches),
    ).ljust(Choice.ARGUMENT_BYTES, b"\0")


def _config(
    node: str, listed: Sequence[str | None], rules: Sequence[str] | None, order: str
) -> tuple[UpdateKernelConfig, dict[str, str]]:
    """The rules among the programs, and the identifier of each by its name."""
    found = [each or "none" for each in listed]
    forms = {name: optimizer.by_rule[name] for name, optimizer in BY_RULE.items()}
    known = {
        name: form.ordered(order).digest
        for name, form in forms.items()
        if not BY_RULE[name].orders or order == "default" or order in form.orders
    }
    have = [name for name in known if known[name] in listed]
    wanted = sorted(have, key=lambda name: listed.index(known[name])) if rules is None else rules
    if not wanted:
        raise MismatchError(f"programs of {node}", f"one of {known}, or named in rules=", found)
    try:
        config = UpdateKernelConfig(rules=tuple(wanted), order=order, address_width=64)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ArgumentError(f"rules of {node}: {error}; rules= names those to use") from error
    digests = dict(zip(config.rule_set.names, config.programs, strict=True))
    for name, digest in digests.items():
        if digest not in listed:
            raise MismatchError(f"programs of {node}", f"{digest}, for rule {name}", found)
    return config, digests
