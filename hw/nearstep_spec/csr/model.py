"""Register maps as plain data: the one declaration that hardware, host and documents share.

A `RegisterMap` describes one block: up to 4 KiB of 32-bit words. `nearstep_hw.csr.bank` turns it
into hardware, `nearstep.registers` into Python objects, `nearstep_spec.csr.export` into JSON,
SystemRDL, a C header and a page of documentation. This module does not import Amaranth.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import cached_property
from typing import Any, Self

from nearstep_spec.errors import NearstepError

WORD_BITS = 32
WORD_BYTES = 4
LINE_BYTES = 64  # a DDR4 burst of eight and a cache line: the smallest write of a DIMM host
BLOCK_BYTES = 4096  # address space of one block: a page, so that a board can map blocks apart
ADDRESS_WIDTH = 12  # log2(BLOCK_BYTES)
LONE_FIELD = "value"  # name of the field that is all of its register
HANDLE_NAMES = frozenset({"address", "bits", "get", "name", "poll", "set"})
"""Attributes of every register in host code, and therefore invalid names of fields."""

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


class RegisterMapError(NearstepError, ValueError):
    """A register map that contradicts itself; the message names the register."""


class Access(Enum):
    """The source of a field's value, and permitted accesses of software."""

    CONSTANT = "constant"  # fixed when the hardware is generated
    MAP_HASH = "map_hash"  # fixed: `RegisterMap.hash()`
    STATUS = "status"  # read-only, follows the hardware
    COUNTER = "counter"  # read-only, all counters of a block captured in one cycle
    REFUSED = "refused"  # read-only, set when the bank refuses a write because the block is busy
    CONFIG = "config"  # read and write, held for the hardware
    PULSE = "pulse"  # reads 0; writing 1 gives the hardware a pulse of one cycle

    @property
    def writable(self) -> bool:
        return self in (Access.CONFIG, Access.PULSE)

    @property
    def software(self) -> str:
        """`ro`, `rw` or `wo`, as register tools write it."""
        return {Access.CONFIG: "rw", Access.PULSE: "wo"}.get(self, "ro")


class NamedValue(IntEnum):
    """A value of a field with a name and a sentence: `WINDOW = 3, "outside the windows"`."""

    doc: str

    def __new__(cls, value: int, doc: str = "") -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.doc = doc
        return member


class Kind(Enum):
    """Interpretation of a field's bits."""

    UINT = "uint"
    FLOAT32 = "float32"  # IEEE 754 binary32


@dataclass(frozen=True, kw_only=True)
class Field:
    """A run of bits within a register.

    Parameters
    ----------
    name : lower snake case. `value` marks the only field of a register.
    lsb, width : position in bits.
    access, kind : see `Access` and `Kind`. A `FLOAT32` field is 32 bits wide.
    reset : value after reset (`CONFIG`), or for good (`CONSTANT`).
    values : named values, or None.
    doc : one sentence.
    """

    name: str
    access: Access
    lsb: int = 0
    width: int = 1
    kind: Kind = Kind.UINT
    reset: int = 0
    values: type[NamedValue] | None = None
    doc: str = ""

    @property
    def mask(self) -> int:
        """Ones at the field's bits of the register."""
        return ((1 << self.width) - 1) << self.lsb

    @property
    def msb(self) -> int:
        return self.lsb + self.width - 1


@dataclass(frozen=True, kw_only=True)
class Register:
    """One or two consecutive words.

    Parameters
    ----------
    name : lower snake case.
    fields : in order of their lowest bit.
    width : 32, or 64 for a pair of words, the low one first.
    offset : of the first word, in bytes from the start of the block.
    locked : a write is refused while the block is busy.
    doc : one sentence.
    path : position among similar registers in hardware, such as `("window", 0, "base")`; default:
        its name.
    """

    name: str
    fields: tuple[Field, ...]
    width: int = WORD_BITS
    offset: int = 0
    locked: bool = False
    doc: str = ""
    path: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path or (self.name,))

    @property
    def words(self) -> int:
        return self.width // WORD_BITS

    @cached_property
    def writable(self) -> bool:
        return any(field.access.writable for field in self.fields)

    @cached_property
    def kept_mask(self) -> int:
        """Mask of the bits that keep a written value."""
        return sum(field.mask for field in self.fields if field.access is Access.CONFIG)

    @property
    def end(self) -> int:
        """Offset of the first byte after the register."""
        return self.offset + self.width // 8

    def word_names(self) -> tuple[str, ...]:
        """The name of each word: the register's, with `_lo` and `_hi` for two."""
        return (self.name,) if self.words == 1 else (f"{self.name}_lo", f"{self.name}_hi")

    def field(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(f"{self.name} has no field {name!r}")


@dataclass(frozen=True, kw_only=True)
class RegisterMap:
    """The registers of one block.

    Parameters
    ----------
    name : lower snake case; the block's name in exports.
    registers : in order of their offset.
    doc : one paragraph.
    busy : `register.field` of the `STATUS` bit that locks the `locked` registers.
    latch : `register.field` of the `PULSE` that captures the counters. Counters are also captured
        in the first cycle in which `busy` is low again.
    clear : `register.field` of the `PULSE` that clears every `REFUSED` field.

    Raises
    ------
    RegisterMapError : overlap, misalignment, bad name, a field that does not fit, a missing role.
    """

    name: str
    registers: tuple[Register, ...]
    doc: str = ""
    busy: str | None = None
    latch: str | None = None
    clear: str | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, "block")
        end = 0
        seen: set[str] = set()
        for register in self.registers:
            _check_register(register)
            for name in (register.name, *register.word_names()):
                if name in seen and name != register.name:
                    raise RegisterMapError(f"word {name} of {register.name} is there twice")
            if register.name in seen:
                raise RegisterMapError(f"register {register.name} is declared twice")
            seen.update((register.name, *register.word_names()))
            if register.offset < end:
                raise RegisterMapError(
                    f"register {register.name} at {register.offset:#x} overlaps or precedes the "
                    f"register that ends at {end:#x}"
                )
            end = register.end
        if end > BLOCK_BYTES:
            raise RegisterMapError(f"block {self.name} takes {end} bytes, more than {BLOCK_BYTES}")
        nested((register.path, register) for register in self.registers)
        self._check_ports()
        self._check_roles()

    def _check_ports(self) -> None:
        ports: dict[str, str] = {}
        for register, field in self.fields():
            name, path = port_name(register, field), f"{register.name}.{field.name}"
            if name is not None and ports.setdefault(name, path) != path:
                raise RegisterMapError(f"{path} and {ports[name]} both want the port {name}")

    def _check_roles(self) -> None:
        kinds = {field.access for _, field in self.fields()}
        needs = {
            "busy": any(r.locked for r in self.registers) or Access.COUNTER in kinds,
            "latch": Access.COUNTER in kinds,
            "clear": Access.REFUSED in kinds,
        }
        for role, needed in needs.items():
            path: str | None = getattr(self, role)
            if path is None:
                if needed:
                    raise RegisterMapError(f"block {self.name} needs the role {role!r}")
                continue
            wanted = Access.STATUS if role == "busy" else Access.PULSE
            try:
                _, field = self.lookup(path)
            except KeyError as error:
                raise RegisterMapError(f"role {role!r} of block {self.name}: {error}") from None
            if field.access is not wanted or field.width != 1:
                raise RegisterMapError(f"role {role!r}: {path} is not one bit of {wanted.value}")

    def __iter__(self) -> Iterator[Register]:
        return iter(self.registers)

    def __getitem__(self, name: str) -> Register:
        for register in self.registers:
            if register.name == name:
                return register
        raise KeyError(f"block {self.name} has no register {name!r}")

    def fields(self) -> Iterator[tuple[Register, Field]]:
        """Every field with its register, in order of address."""
        for register in self.registers:
            for field in register.fields:
                yield register, field

    def lookup(self, path: str) -> tuple[Register, Field]:
        """The register and field of `register.field`.

        Raises
        ------
        KeyError : no such register or field.
        """
        register_name, _, field_name = path.partition(".")
        register = self[register_name]
        return register, register.field(field_name)

    @property
    def size(self) -> int:
        """Bytes up to the end of the last register, in whole lines."""
        end = max((register.end for register in self.registers), default=0)
        return -(-end // LINE_BYTES) * LINE_BYTES

    def reset_value(self, field: Field) -> int:
        """Value of a field after reset; `MAP_HASH` fields give the hash."""
        return self.hash() if field.access is Access.MAP_HASH else field.reset

    def hash(self) -> int:
        """Hash all properties visible to software, without the prose, to 32 bits."""
        text = json.dumps(self._structure(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

    def to_json(self) -> str:
        """The whole map, prose and hash included, as a JSON document that ends in a newline."""
        document = {"format": "nearstep-register-map", "format_version": 1, "hash": self.hash()}
        return json.dumps({**document, **self._structure(prose=True)}, indent=2) + "\n"

    def _structure(self, *, prose: bool = False) -> dict[str, Any]:
        def doc(item: Field | Register | RegisterMap) -> dict[str, str]:
            return {"doc": item.doc} if prose else {}

        return {
            "name": self.name,
            **doc(self),
            "word_bytes": WORD_BYTES,
            "size": self.size,
            "busy": self.busy,
            "latch": self.latch,
            "clear": self.clear,
            "registers": [
                {
                    "name": register.name,
                    **doc(register),
                    "offset": register.offset,
                    "width": register.width,
                    "locked": register.locked,
                    "fields": [
                        {
                            "name": field.name,
                            **doc(field),
                            "lsb": field.lsb,
                            "width": field.width,
                            "access": field.access.value,
                            "kind": field.kind.value,
                            "reset": field.reset,
                            "enum": _enum_values(field),
                        }
                        for field in register.fields
                    ],
                }
                for register in self.registers
            ],
        }


def nested(leaves: Iterable[tuple[Sequence[str | int], Any]]) -> dict[str | int, Any]:
    """Convert leaves by path to dictionaries of dictionaries: `nested(...)["window"][0]["base"]`.

    Raises
    ------
    RegisterMapError : two leaves have one path, or one has part of another's.
    """
    top: dict[str | int, Any] = {}
    for path, leaf in leaves:
        here = top
        for key in path[:-1]:
            here = here.setdefault(key, {})
            if not isinstance(here, dict):
                raise RegisterMapError(f"a register stands at a part of the path {path}")
        if path[-1] in here:
            raise RegisterMapError(f"two registers stand at the path {path}")
        here[path[-1]] = leaf
    return top


def port_name(register: Register, field: Field) -> str | None:
    """Return the name of a field's hardware port, without direction; None if there is no port.

    The register's name, then `_` and the field's unless that is `value`. In `CsrBank` the port is
    `i_<name>` for `STATUS` and `COUNTER`, `o_<name>` for `CONFIG` and `PULSE`.
    """
    if field.access in (Access.CONSTANT, Access.MAP_HASH, Access.REFUSED):
        return None
    stem = register.name if lone_field(register) else f"{register.name}_{field.name}"
    return f"{'o' if field.access.writable else 'i'}_{stem}"


def lone_field(register: Register) -> bool:
    """Whether the register is one field called `value`, accessed by the register's name."""
    return register.fields[0].name == LONE_FIELD


def place(lines: Sequence[Sequence[Register]]) -> tuple[Register, ...]:
    """Assign offsets to registers: each inner sequence starts a line and fills it in order.

    A pair of words is aligned to its size. A sequence longer than a line continues in the next.
    """
    placed = []
    offset = 0
    for line in lines:
        offset = -(-offset // LINE_BYTES) * LINE_BYTES
        for register in line:
            size = register.width // 8
            offset = -(-offset // size) * size
            placed.append(replace(register, offset=offset))
            offset += size
    return tuple(placed)


def _enum_values(field: Field) -> dict[str, int] | None:
    if field.values is None:
        return None
    return {member.name.lower(): int(member) for member in field.values}


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise RegisterMapError(f"{what} name must be lower snake case, not {name!r}")


def _check_register(register: Register) -> None:
    name = register.name
    _check_name(name, "register")
    if register.width not in (WORD_BITS, 2 * WORD_BITS):
        raise RegisterMapError(f"register {name} must be 32 or 64 bits wide, not {register.width}")
    if register.offset < 0 or register.offset % (register.width // 8):
        raise RegisterMapError(f"register {name} at {register.offset:#x} is not aligned")
    if not register.fields:
        raise RegisterMapError(f"register {name} has no fields")
    end = 0
    seen = set()
    for field in register.fields:
        path = f"{name}.{field.name}"
        _check_name(field.name, f"field of {name}:")
        if field.name in seen:
            raise RegisterMapError(f"field {path} is declared twice")
        seen.add(field.name)
        if field.width < 1 or field.lsb < end or field.lsb + field.width > register.width:
            raise RegisterMapError(
                f"field {path} at bits {field.msb}:{field.lsb} overlaps a field, "
                f"is out of order, or exceeds {register.width} bits"
            )
        end = field.lsb + field.width
        if field.reset < 0 or field.reset >> field.width:
            raise RegisterMapError(f"reset {field.reset:#x} of {path} exceeds {field.width} bits")
        if field.kind is Kind.FLOAT32 and field.width != WORD_BITS:
            raise RegisterMapError(f"field {path} is binary32 but {field.width} bits wide")
        if field.access is Access.PULSE and field.width != 1:
            raise RegisterMapError(f"pulse {path} must be one bit wide, not {field.width}")
        if field.values is not None and any(m < 0 or m >> field.width for m in field.values):
            raise RegisterMapError(f"a named value of {path} exceeds {field.width} bits")
    if len({field.access.writable for field in register.fields}) > 1:
        raise RegisterMapError(f"register {name} mixes writable and read-only fields")
    if LONE_FIELD in seen and len(seen) > 1:
        raise RegisterMapError(f"register {name} has fields beside {LONE_FIELD!r}")
    if clash := seen & HANDLE_NAMES:
        raise RegisterMapError(
            f"register {name} has a field called {clash.pop()!r}, which is taken"
        )
