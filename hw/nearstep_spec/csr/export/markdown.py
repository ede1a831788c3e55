"""Register maps as a page of documentation."""

from collections.abc import Iterator

from nearstep_spec.csr.export.names import enumerations
from nearstep_spec.csr.model import (
    LINE_BYTES,
    Access,
    Field,
    Kind,
    Register,
    RegisterMap,
    lone_field,
)

ACCESS = {
    Access.CONSTANT: "constant",
    Access.MAP_HASH: "constant",
    Access.STATUS: "read-only",
    Access.COUNTER: "read-only, captured",
    Access.REFUSED: "read-only, sticky",
    Access.CONFIG: "read-write",
    Access.PULSE: "write 1 for a pulse",
}

PREFACE = (
    "Words of 32 bits, little endian. A register of 64 bits is a pair of words, the low one first. "
    "Reads have no side effects. A register marked *locked* refuses writes while the block is "
    "busy: nothing changes, the bus answers with an error, and a sticky bit is set. Counters are "
    "captured together, when a run ends and on command; a read returns the captured value. "
    "Accesses to part of a word or to an unlisted address, and writes to a read-only register are "
    "answered with an error. A DDR4 bus has no responses: there such writes change nothing."
)


def to_markdown(register_map: RegisterMap) -> str:
    """The map as a page of documentation."""
    return "\n".join(_lines(register_map)) + "\n"


def _lines(register_map: RegisterMap) -> Iterator[str]:
    yield f"# Registers of `{register_map.name}`"
    yield ""
    yield register_map.doc
    yield ""
    yield PREFACE
    yield ""
    yield f"Size {register_map.size} bytes, map hash `{register_map.hash():#010x}`."
    yield ""
    yield "| offset | register | bits | access | reset | |"
    yield "|---|---|---|---|---|---|"
    line = -1
    for register in register_map:
        offset = f"`{register.offset:#05x}`"
        if register.offset // LINE_BYTES != line:
            line = register.offset // LINE_BYTES
            offset = f"**{offset}**"
        yield f"| {offset} | `{register.name}` | {_summary(register_map, register)} |"
    yield ""
    yield f"Offsets in bold start a line of {LINE_BYTES} bytes."
    for register in register_map:
        if not lone_field(register):
            yield from _fields(register_map, register)
    for name, values in enumerations(register_map).items():
        yield ""
        yield f"## Values of `{name}`"
        yield ""
        yield "| value | name | |"
        yield "|---|---|---|"
        for member in values:
            yield f"| {int(member)} | `{member.name.lower()}` | {_cell(member.doc)} |"


def _summary(register_map: RegisterMap, register: Register) -> str:
    first = register.fields[0]
    bits = f"{register.width}, binary32" if first.kind is Kind.FLOAT32 else f"{register.width}"
    access = "; ".join(dict.fromkeys(ACCESS[field.access] for field in register.fields))
    if register.locked:
        access += ", *locked*"
    reset = _reset(register_map, first) if lone_field(register) else ""
    return " | ".join((bits, access, reset, _cell(register.doc)))


def _fields(register_map: RegisterMap, register: Register) -> Iterator[str]:
    yield ""
    yield f"## `{register.name}` at `{register.offset:#05x}`"
    yield ""
    yield "| bits | field | access | reset | |"
    yield "|---|---|---|---|---|"
    for field in register.fields:
        bits = f"{field.msb}:{field.lsb}" if field.width > 1 else f"{field.lsb}"
        yield (
            f"| {bits} | `{field.name}` | {ACCESS[field.access]} "
            f"| {_reset(register_map, field)} | {_cell(field.doc)} |"
        )


def _reset(register_map: RegisterMap, field: Field) -> str:
    if field.access in (Access.STATUS, Access.PULSE):
        return ""
    return f"`{register_map.reset_value(field):#x}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
