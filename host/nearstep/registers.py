"""Registers of an opened device, as objects made from its register maps.

    regs = Registers(backend, device_maps(config))
    regs.adam0.count.value = 1_000_000
    regs.adam0.eps.value = 1e-8           # rounded once to binary32
    regs.adam0.eps.bits                   # 0x322bcc77
    regs.adam0.mode.set(decoupled=1, m_from_g=0)
    regs.adam0.start.go = 1
    regs.adam0.error.cause                # ErrorCause.NONE

Names are those of the map: a wrong name is an error before the device is touched.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from rich.table import Table

from nearstep.backends.base import Poll
from nearstep.errors import (
    ArgumentError,
    BusError,
    BusyError,
    Fielded,
    MismatchError,
    NearstepError,
)
from nearstep_spec.csr.model import (
    WORD_BITS,
    WORD_BYTES,
    Access,
    Field,
    Kind,
    Register,
    RegisterMap,
    lone_field,
)

WORD_MASK = (1 << WORD_BITS) - 1
EXACT_INTEGERS = 1 << 53
"""Integers up to this one are exact in binary64: only the conversion to binary32 rounds."""


class UnknownRegisterError(NearstepError, AttributeError):
    """A block, register or field that the map does not have.

    Attributes
    ----------
    name : what was asked for.
    near : tuple[str, ...]. Similar names that exist; all names if none is similar.
    """

    def __init__(self, kind: str, owner: str, name: str, known: Iterable[str]) -> None:
        names = tuple(known)
        self.near = tuple(difflib.get_close_matches(name, names, n=5, cutoff=0.5)) or names
        super().__init__(f"{owner} has no {kind} {name!r}; there is {', '.join(self.near)}")
        self.name = name


class ReadOnlyFieldError(Fielded, ArgumentError, AttributeError):
    """An assignment to a field that software cannot write. Nothing has been sent."""

    template = "{field} is read-only ({access.value})"
    field: str
    access: Access


class FieldValueError(Fielded, ArgumentError):
    """A value that the field cannot hold. Nothing has been sent."""

    template = "{field} must be {expected}, not {actual!r}"
    field: str
    expected: str
    actual: object


class RefusedWriteError(BusyError):
    """The block refused a write because it was busy; nothing was changed."""

    def __init__(self, register: str, value: int, registers: Mapping[str, int]) -> None:
        self.register = register
        self.value = value
        super().__init__(
            f"write of {value:#x} to {register} was refused: the block is busy",
            registers=registers,
        )


class RegisterBus(Protocol):
    """What registers use of a backend."""

    def read_register(self, address: int) -> int: ...

    def write_register(self, address: int, value: int) -> None: ...


class RegisterHandle:
    """One register of a device; its fields are attributes.

    Reading a field reads the register, once for each word. A `FLOAT32` field is a float, a field
    with named values a member of its enumeration, or an integer if the value has no name. Assigning
    to a field keeps the other configuration fields of the register. Words of a pair are read and
    written low word first. The bus of a DIMM with arbiters has no error responses: there, writes
    that are refused change nothing, and those of locked registers set `status.refused`.

    Raises
    ------
    UnknownRegisterError : no such field.
    ReadOnlyFieldError, FieldValueError : before the device is touched.
    RefusedWriteError : the block is busy and the register is locked.
    BusError : the device answered with an error for another reason.
    """

    def __init__(self, block: BlockRegisters, register: Register) -> None:
        set_slot = super().__setattr__
        set_slot("_block", block)
        set_slot("_register", register)

    _block: BlockRegisters
    _register: Register

    @property
    def address(self) -> int:
        """Address of the first word, in bytes."""
        return self._block.base + self._register.offset

    @property
    def name(self) -> str:
        return f"{self._block.name}.{self._register.name}"

    @property
    def bits(self) -> int:
        """The whole register, as an integer."""
        words = (
            self._block.bus.read_register(self.address + i * WORD_BYTES)
            for i in range(self._register.words)
        )
        return sum(word << (i * WORD_BITS) for i, word in enumerate(words))

    @bits.setter
    def bits(self, value: int) -> None:
        if not self._register.writable:
            raise ReadOnlyFieldError(self.name, self._register.fields[0].access)
        self._send(unsigned(self.name, value, self._register.width))

    def get(self) -> dict[str, Any]:
        """Every readable field, from one access of the register."""
        bits = self.bits
        return {
            field.name: _decode(field, bits)
            for field in self._register.fields
            if field.access is not Access.PULSE
        }

    def set(self, **values: object) -> None:
        """Set several fields in one access; configuration fields not named keep their value."""
        bits = mask = 0
        for field, value in [(self._find(name), value) for name, value in values.items()]:
            path = f"{self.name}.{field.name}"
            if not field.access.writable:
                raise ReadOnlyFieldError(path, field.access)
            bits |= _encode(path, field, value) << field.lsb
            mask |= field.mask
        kept = self._register.kept_mask & ~mask
        self._send(bits | (self.bits & kept if kept else 0))

    def poll(self, **values: object) -> Poll:
        """The condition that fields have these values, for `Backend.wait`.

        Raises
        ------
        ArgumentError : the fields are not within one word.
        """
        value = mask = 0
        for name, wanted in values.items():
            field = self._find(name)
            value |= _encode(f"{self.name}.{name}", field, wanted) << field.lsb
            mask |= field.mask
        for index in range(self._register.words):
            shift = index * WORD_BITS
            if mask and not mask & ~(WORD_MASK << shift):
                return Poll(
                    address=self.address + index * WORD_BYTES,
                    mask=mask >> shift,
                    value=value >> shift,
                )
        raise ArgumentError(f"a poll of {self.name} must be of fields in one word, not {values}")

    def _find(self, name: str) -> Field:
        for field in self._register.fields:
            if field.name == name:
                return field
        names = [field.name for field in self._register.fields]
        raise UnknownRegisterError("field", self.name, name, names)

    def _send(self, bits: int) -> None:
        for index in range(self._register.words):
            word = (bits >> (index * WORD_BITS)) & WORD_MASK
            try:
                self._block.bus.write_register(self.address + index * WORD_BYTES, word)
            except BusError:
                if self._register.locked and self._block.take_refused():
                    raise RefusedWriteError(self.name, bits, self._block.dump()) from None
                raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        field = self._find(name)
        return _decode(field, self.bits)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "bits":
            super().__setattr__(name, value)
        else:
            self.set(**{name: value})

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(field.name for field in self._register.fields)]

    def __repr__(self) -> str:
        return f"<register {self.name} at {self.address:#x}>"


class BlockRegisters:
    """The registers of one block of a device, as attributes.

    Attributes
    ----------
    name : name of the block on its device, such as `adam0`.
    base : address of its first register, in bytes.
    """

    def __init__(self, bus: RegisterBus, name: str, base: int, register_map: RegisterMap) -> None:
        set_slot = super().__setattr__
        set_slot("bus", bus)
        set_slot("name", name)
        set_slot("base", base)
        set_slot("map", register_map)
        set_slot("_registers", {each.name: each for each in register_map})

    bus: RegisterBus
    name: str
    base: int
    map: RegisterMap
    _registers: dict[str, Register]

    def check_identity(self) -> None:
        """Make sure that the hardware has this register map.

        Raises
        ------
        MismatchError : ID, VERSION or MAP_HASH differ; the first that does is named.
        """
        for name in ("id", "version", "map_hash"):
            register = self.map[name]
            expected = sum(self.map.reset_value(f) << f.lsb for f in register.fields)
            actual = self[name].bits
            if actual != expected:
                raise MismatchError(f"{self.name}.{name}", f"{expected:#010x}", f"{actual:#010x}")

    def take_refused(self) -> bool:
        """Whether a write was refused since the last call; clears the record."""
        paths = [
            (register.name, field.name)
            for register, field in self.map.fields()
            if field.access is Access.REFUSED
        ]
        refused = any(getattr(self[register], field) for register, field in paths)
        if refused and self.map.clear is not None:
            register, _, field = self.map.clear.partition(".")
            self[register].set(**{field: 1})
        return refused

    def dump(self) -> dict[str, int]:
        """Bits of every readable field, by name; registers that answer with an error are left out.

        A field called `value` has the name of its register: `adam0.count`.
        """
        values = {}
        for register, field, bits in self._read_all():
            if bits is not None:
                values[self._label(register, field)] = (bits & field.mask) >> field.lsb
        return values

    def table(self) -> Table:
        """The dump as a table: values as numbers and names."""
        table = Table("address", "field", "bits", "value", title=f"{self.name} ({self.map.name})")
        for register, field, bits in self._read_all():
            found = "bus error" if bits is None else f"{(bits & field.mask) >> field.lsb:#x}"
            table.add_row(
                f"{self.base + register.offset:#06x}",
                self._label(register, field),
                found,
                "" if bits is None else _text(_decode(field, bits)),
            )
        return table

    def _read_all(self) -> Iterator[tuple[Register, Field, int | None]]:
        for register in self.map:
            fields = [field for field in register.fields if field.access is not Access.PULSE]
            if not fields:
                continue
            bits: int | None = None
            try:
                bits = self[register.name].bits
            except BusError:
                bits = None
            for field in fields:
                yield register, field, bits

    def _label(self, register: Register, field: Field) -> str:
        name = f"{self.name}.{register.name}"
        return name if lone_field(register) else f"{name}.{field.name}"

    def __getitem__(self, name: str) -> RegisterHandle:
        """A register by a name that is only known at run time, such as that of a scalar."""
        try:
            register = self._registers[name]
        except KeyError:
            raise UnknownRegisterError("register", self.name, name, self._registers) from None
        return RegisterHandle(self, register)  # not kept: a cycle would keep the device, too

    def __iter__(self) -> Iterator[RegisterHandle]:
        return (self[name] for name in self._registers)

    def __getattr__(self, name: str) -> RegisterHandle:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        handle = self[name]
        fields = ", ".join(field.name for field in self.map[name].fields)
        raise ArgumentError(f"assign to a field of {handle.name} ({fields}), not to the register")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._registers]

    def __repr__(self) -> str:
        return f"<block {self.name} at {self.base:#x}, {len(self._registers)} registers>"


class Registers:
    """The blocks of a device, as attributes.

    Parameters
    ----------
    maps : base address in bytes and register map of each block.

    Raises
    ------
    MismatchError : the hardware of a block has another register map.
    """

    def __init__(self, bus: RegisterBus, maps: Mapping[str, tuple[int, RegisterMap]]) -> None:
        blocks = {
            name: BlockRegisters(bus, name, base, each) for name, (base, each) in maps.items()
        }
        super().__setattr__("_blocks", blocks)
        for block in self._blocks.values():
            block.check_identity()

    _blocks: dict[str, BlockRegisters]

    def dump(self) -> dict[str, int]:
        """Bits of every readable field of every block, such as `adam0.status.busy`."""
        return {k: v for block in self for k, v in block.dump().items()}

    def __iter__(self) -> Iterator[BlockRegisters]:
        return iter(self._blocks.values())

    def __getitem__(self, name: str) -> BlockRegisters:
        try:
            return self._blocks[name]
        except KeyError:
            raise UnknownRegisterError("block", "device", name, self._blocks) from None

    def __getattr__(self, name: str) -> BlockRegisters:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        block = self[name]
        registers = ", ".join(register.name for register in block.map)
        raise ArgumentError(f"assign to a field of a register of {name} ({registers})")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._blocks]

    def __repr__(self) -> str:
        return f"<registers of {', '.join(self._blocks)}>"


def unsigned(path: str, value: Any, width: int) -> int:
    """`value` as an integer of `width` bits; raises `FieldValueError`."""
    try:
        number = int(value) if isinstance(value, np.bool_) else operator.index(value)
    except TypeError:
        raise FieldValueError(path, "an integer", value) from None
    if number < 0 or number >> width:
        raise FieldValueError(path, f"from 0 to {(1 << width) - 1:#x}", value)
    return number


def _float32_bits(path: str, value: Any) -> int:
    exact = isinstance(value, float | np.floating) or (
        isinstance(value, int | np.integer) and abs(int(value)) <= EXACT_INTEGERS
    )
    if not exact:
        raise FieldValueError(path, "a float, or an integer of at most 2**53", value)
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.float32(value)
    if np.isinf(rounded) and not np.isinf(float(value)):
        raise FieldValueError(path, "within the range of binary32", value)
    return int(rounded.view(np.uint32))


def _encode(path: str, field: Field, value: object) -> int:
    if field.kind is Kind.FLOAT32:
        return _float32_bits(path, value)
    return unsigned(path, value, field.width)


def _decode(field: Field, bits: int) -> int | float:
    number = (bits & field.mask) >> field.lsb
    if field.kind is Kind.FLOAT32:
        return float(np.uint32(number).view(np.float32))
    if field.values is not None and number in list(field.values):
        return field.values(number)
    return number


def _text(value: int | float) -> str:
    name = getattr(value, "name", None)
    return str(value) if name is None else f"{value} {name.lower()}"
