"""The namespace of Computational Programs: the update rules and decompressors of a card.

Each rule of the card is a device-defined program: its index is that of the rule in the card's
configuration, counted from `Choice.FIRST_PROGRAM`, and its identifier (PID) the digest of the
rule's arithmetic. Behind the rules each form of compressed gradients has programs, of each rule:
their identifier is the beginning of SHA-256 of the rule's digest, a blank, and the form (of a
user's decompressor its digest). A host loads nothing; it activates a program, writes arrays to the
local memory, and executes.

**Arguments of Execute.** Memory ranges, in a set or inline, are the rule's arrays in their order
(of Adam p, g, m, v), of equal size, fp32; with compressed gradients two ranges of one size stand
for g: indices, then values, see `nearstep.updater.pairs.Pairs`. The *argument block* has the
contents of the rule's registers: 64 bytes, little-endian::

    0   version, 1
    4   number of registers that follow
    8   registers in the rule's order: scalars as binary32, then switches as 0 or 1; then zeros

It is the data of the command behind inline ranges. Linux cannot set DLEN, so 0 stands for the
ranges alone, or for the block alone if there are none. A block may be in local memory instead: the
range behind the arrays. CPARAM1 and CPARAM2 are 0. DW0 and DW1 of the completion are the number of
elements that were updated.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nearstep.buffer import Buffer
from nearstep.linux.nvme.memory import MemoryNamespace
from nearstep.linux.nvme.namespace import Namespace, Run
from nearstep.linux.nvme.standard import (
    Admin,
    Choice,
    CommandSet,
    Program,
    Status,
    StatusError,
    dlen,
    require,
)
from nearstep.linux.nvme.transfer import Command
from nearstep.updater.arguments import RuleArguments
from nearstep.updater.pairs import Pairs
from nearstep_spec.rule.optimizer import Form

BLOCK_VERSION = 1
RANGE = struct.Struct("<IIQ16x")
DEVICE_DEFINED, ACTIVE, PUID = 2, 1 << 2, 1 << 3
INDEX, VALUE = "index", "value"


@dataclass(frozen=True)
class MemoryRange:
    """A memory range: bytes of a memory namespace."""

    namespace: int
    nbytes: int
    start: int

    def overlaps(self, other: MemoryRange) -> bool:
        """Whether two ranges share bytes."""
        begin, end = max(self.start, other.start), self.start + self.nbytes
        return self.namespace == other.namespace and begin < min(end, other.start + other.nbytes)


@dataclass(eq=False)
class RuleProgram:
    """A rule as a program, with gradients as they are or in a compressed form.

    Attributes
    ----------
    compression : form of the gradients as of `Pairs`; empty: an element for each of p.
    identifier : PID, 8 bytes.
    arrays : names of the memory ranges.
    """

    form: Form
    compression: str = ""
    decompressor: str = ""
    is_active: bool = False
    running: int = 0

    @property
    def identifier(self) -> bytes:
        digest = self.form.digest
        if not self.compression:
            return bytes.fromhex(digest)
        named = f"{digest} {self.decompressor or self.compression}"
        return hashlib.sha256(named.encode()).digest()[:8]

    @property
    def arrays(self) -> Sequence[str]:
        names = self.form.rule.arrays_in
        at = names.index("g") if self.compression else len(names)
        return [*names[:at], *((INDEX, VALUE) if self.compression else ()), *names[at + 1 :]]


@dataclass(eq=False)
class RangeSet:
    """A memory range set, and how many commands use it."""

    ranges: Sequence[MemoryRange]
    running: int = 0


class ProgramNamespace(Namespace):
    """Programs of a card, on its memory.

    Parameters
    ----------
    memory : namespace of the local memory.
    """

    command_set = CommandSet.PROGRAMS

    def __init__(self, memory: MemoryNamespace) -> None:
        self._memory = memory
        config = memory.card.kernel_config
        optimizers = zip(config.rule_set.names, config.rule_set.optimizers, strict=True)
        forms = [optimizer.by_rule[name].ordered(config.order) for name, optimizer in optimizers]
        known = config.decompressors or ("",) * len(config.compression)
        kinds = [("", ""), *zip(config.compression, known, strict=True)]
        self.programs = [RuleProgram(form, *kind) for kind in kinds for form in forms]
        self._sets: dict[int, RangeSet] = {}
        self._lock = threading.Lock()

    @property
    def commands(self) -> Mapping[int, Run]:
        return {Program.EXECUTE: self._execute}

    @property
    def admin_commands(self) -> Mapping[int, Run]:
        return {Admin.LOAD_PROGRAM: self._load, Admin.ACTIVATE_PROGRAM: self._activate,
                Admin.MANAGE_RANGES: self._manage_ranges}  # fmt: skip

    @property
    def logs(self) -> Mapping[int, Callable[[], bytes]]:
        return {0x82: self._program_list, 0x83: lambda: bytes(32), 0x84: self._range_sets}

    @property
    def identification(self) -> bytes:
        return struct.pack("<HHHBxQB", len(self.programs), Choice.SETS, Choice.RANGE_GRANULARITY,
                           Choice.SET_RANGES, 0, 0)  # fmt: skip

    def reset(self) -> None:
        if Choice.RESET_FORGETS:
            with self._lock:
                self._sets.clear()
                for each in self.programs:
                    each.is_active = False

    def close(self) -> None:
        """Nothing: the memory's namespace has the card."""

    def _program_list(self) -> bytes:
        with self._lock:
            entries = [
                struct.pack("<BB6x8s48x", DEVICE_DEFINED | PUID | (ACTIVE if each.is_active else 0),
                            0, each.identifier)
                for each in self.programs
            ]  # fmt: skip
        return struct.pack("<I60x", len(entries)) + b"".join(entries)

    def _range_sets(self) -> bytes:
        with self._lock:
            return b"".join(
                struct.pack("<HH28x", number, len(each.ranges))
                + b"".join(RANGE.pack(e.namespace, e.nbytes, e.start) for e in each.ranges)
                for number, each in sorted(self._sets.items())
            )

    def _program(self, index: int) -> RuleProgram:
        position = index - Choice.FIRST_PROGRAM
        require(0 <= position < len(self.programs), Status.INVALID_PROGRAM_INDEX)
        return self.programs[position]

    def _load(self, command: Command) -> None:
        """Refuse: every index has a program of the device."""
        self._program(command.bits(10, 15))
        raise StatusError(Status.NOT_DOWNLOADABLE)

    def _activate(self, command: Command) -> None:
        with self._lock:
            program, select = self._program(command.bits(10, 15)), command.bits(10, 19, 16)
            require(select in (0, 1))
            activates = select == Choice.ACTIVATES
            require(activates or not program.running, Status.PROGRAM_IN_USE)
            program.is_active = activates

    def _manage_ranges(self, command: Command) -> int:
        select, number = command.bits(10, 3), command.bits(10, 31, 16)
        require(select in (0, 1))
        if select == 1:
            with self._lock:
                require(number in self._sets, Status.INVALID_RANGE_SET_ID)
                require(not self._sets[number].running, Status.RANGE_SET_IN_USE)
                del self._sets[number]
            return 0
        count = command.bits(11, 7)
        require(number == 0 and count > 0)
        require(count <= Choice.SET_RANGES, Status.TOO_MANY_RANGES)
        ranges = self._ranges(command.fetch(RANGE.size * count))
        with self._lock:
            require(len(self._sets) < Choice.SETS, Status.TOO_MANY_RANGE_SETS)
            number = next(n for n in range(1, Choice.SETS + 1) if n not in self._sets)
            self._sets[number] = RangeSet(ranges)
        return number

    def _ranges(self, table: bytes) -> list[MemoryRange]:
        """Check memory range descriptors."""
        ranges = [MemoryRange(*each) for each in RANGE.iter_unpack(table)]
        for number, each in enumerate(ranges):
            require(each.namespace == self._memory.number, Status.INVALID_MEMORY_NAMESPACE)
            require(each.nbytes > 0, Status.INVALID_RANGE_SET)
            self._memory.words(each.start, each.nbytes, Status.INVALID_RANGE_SET)
            clear = not any(each.overlaps(other) for other in ranges[:number])
            require(clear, Status.OVERLAPPING_RANGES)
        return ranges

    def _execute(self, command: Command) -> int:
        index, number, inline = command.bits(2, 15), command.bits(2, 31, 16), command.dwords[3]
        require(not (number and inline) and (number or inline))
        require(command.dwords[10:14] == (0, 0, 0, 0))
        require(inline <= Choice.SET_RANGES, Status.TOO_MANY_RANGES)
        nbytes = dlen(command.dwords[4], inline, RANGE.size)
        require(nbytes >= RANGE.size * inline)
        with self._lock:
            program = self._program(index)
            require(program.is_active, Status.PROGRAM_NOT_ACTIVATED)
            require(not number or number in self._sets, Status.INVALID_RANGE_SET_ID)
            used = self._sets[number] if number else RangeSet(())
            program.running += 1
            used.running += 1
        try:
            return self._run(program, used, command, inline, nbytes)
        finally:
            with self._lock:
                program.running -= 1
                used.running -= 1

    def _run(
        self, program: RuleProgram, used: RangeSet, command: Command, inline: int, nbytes: int
    ) -> int:
        names = program.arrays
        in_memory = len(used.ranges) + inline == len(names) + 1
        data = b"" if in_memory and not inline else command.fetch(nbytes)
        split = RANGE.size * inline
        ranges = [*used.ranges, *self._ranges(data[:split])]
        require(len(ranges) == len(names) + in_memory, Status.INVALID_RANGE_SET)
        block = data[split:]
        if in_memory:
            require(not block and ranges[-1].nbytes == Choice.ARGUMENT_BYTES)
            words = self._memory.words(ranges[-1].start, Choice.ARGUMENT_BYTES)
            block = self._memory.on_card(words.read).tobytes()
        arguments = _arguments(program.form, block)
        arrays: dict[str, Buffer | Pairs] = {
            name: self._memory.words(
                each.start, each.nbytes, dtype=np.uint32 if name == INDEX else np.float32
            )
            for name, each in zip(names, ranges, strict=False)
        }
        if program.compression:
            index, value = arrays.pop(INDEX), arrays.pop(VALUE)
            assert isinstance(index, Buffer)
            assert isinstance(value, Buffer)
            arrays["g"] = Pairs(index, value, program.compression)
        card = self._memory.card
        return self._memory.on_card(lambda: card.run_rule(arguments, arrays).wait().committed)


def _arguments(form: Form, block: bytes) -> RuleArguments:
    """The contents of a rule's registers in an argument block."""
    require(len(block) == Choice.ARGUMENT_BYTES)
    rule = form.rule
    version, count = struct.unpack_from("<II", block)
    scalars, switches = len(rule.scalars), len(rule.switches)
    require(version == BLOCK_VERSION and count == scalars + switches)
    values: list[float | int] = [*struct.unpack_from(f"<{scalars}f{switches}I", block, 8)]
    require(all(each in (0, 1) for each in values[scalars:]))
    require(not any(block[8 + 4 * count :]))
    names = (*rule.scalars, *rule.switches)
    return RuleArguments(
        rule=rule.name, form=form, scalars=dict(zip(names, values, strict=True)),
        given="the argument block",
    )  # fmt: skip
