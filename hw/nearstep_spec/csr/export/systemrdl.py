"""Register maps as SystemRDL 2.0."""

from collections.abc import Iterator, Mapping

from nearstep_spec.csr.export.names import enumerations
from nearstep_spec.csr.model import (
    WORD_BITS,
    Access,
    Field,
    Kind,
    NamedValue,
    RegisterMap,
    RegisterMapError,
)

# fmt: off
KEYWORDS = frozenset((
    "abstract", "accesstype", "addressingtype", "addrmap", "alias", "all", "bit", "boolean",
    "bothedge", "compact", "component", "componentwidth", "constraint", "default", "encode",
    "enum", "external", "false", "field", "fullalign", "hw", "inside", "internal", "level",
    "longint", "mem", "na", "negedge", "nonsticky", "number", "onreadtype", "onwritetype",
    "posedge", "property", "r", "rclr", "ref", "reg", "regalign", "regfile", "rset", "ruser",
    "rw", "rw1", "signal", "string", "struct", "sw", "this", "true", "type", "unsigned", "w", "w1",
    "wclr", "woclr", "woset", "wot", "wr", "wset", "wuser", "wzc", "wzs", "wzt",
))
"""Reserved words; as a name, each is written with a backslash."""
# fmt: on

ACCESS = {
    Access.CONSTANT: "sw = r; hw = na;",
    Access.MAP_HASH: "sw = r; hw = na;",
    Access.STATUS: "sw = r; hw = w;",
    Access.COUNTER: "sw = r; hw = w;",
    Access.REFUSED: "sw = r; hw = w;",
    Access.CONFIG: "sw = rw; hw = r;",
    Access.PULSE: "sw = w; hw = r; singlepulse;",
}

LOCKED, BINARY32 = "Locked: writes are refused while the block is busy.", "A binary32."
"""Properties unknown to SystemRDL, at the end of a `desc`."""


def to_systemrdl(register_map: RegisterMap) -> str:
    """The map as a SystemRDL 2.0 `addrmap`.

    The `desc` states that a register is locked while the block is busy, and that a field is
    binary32: a user-defined property may be declared only once, so two files with such a property
    could not be compiled together.
    """
    return "\n".join(_lines(register_map)) + "\n"


def to_systemrdl_space(name: str, doc: str, blocks: Mapping[str, tuple[int, RegisterMap]]) -> str:
    """Write all register blocks of a design as SystemRDL 2.0: an `addrmap` `name` that declares
    their maps and places each block at its address.

    Spaces of different names can be compiled together.

    Parameters
    ----------
    name, doc : of the address space.
    blocks : name of a block to its address in bytes and its map.

    Raises
    ------
    RegisterMapError : two maps of one name differ, or a map has the name of the space.
    """
    maps: dict[str, RegisterMap] = {}
    for block, (_, each) in blocks.items():
        if each.name == name:
            raise RegisterMapError(f"{block}: its map has the name of the address space, {name!r}")
        if maps.setdefault(each.name, each).hash() != each.hash():
            raise RegisterMapError(f"{block}: there is another map of the name {each.name!r}")
    lines = [f"addrmap {_rdl_name(name)} {{"]
    lines += [f"  name = {_rdl_text(name)};", f"  desc = {_rdl_text(doc)};"]
    lines += [f"  {line}" for each in maps.values() for line in _lines(each)]
    for block, (address, each) in blocks.items():
        lines.append(f"  {_rdl_name(each.name)} {_rdl_name(block)} @ {address:#x};")
    return "\n".join([*lines, "};"]) + "\n"


def _rdl_name(name: str) -> str:
    return f"\\{name}" if name in KEYWORDS else name


def _rdl_text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _lines(register_map: RegisterMap) -> Iterator[str]:
    yield f"addrmap {_rdl_name(register_map.name)} {{"
    yield f"  name = {_rdl_text(register_map.name)};"
    yield f"  desc = {_rdl_text(register_map.doc)};"
    yield "  littleendian;"
    yield f"  default accesswidth = {WORD_BITS};"
    names = {values: name for name, values in enumerations(register_map).items()}
    for values, name in names.items():
        yield f"  enum {name}_values {{"
        for member in values:
            yield f"    {_rdl_name(member.name.lower())} = {int(member)};"
        yield "  };"
    for register in register_map:
        yield "  reg {"
        yield f"    desc = {_rdl_text(_described(register.doc, LOCKED * register.locked))};"
        yield f"    regwidth = {register.width};"
        for field in register.fields:
            properties = _rdl_properties(field, names)
            yield f"    field {{ {properties} }} {_rdl_place(register_map, field)};"
        yield f"  }} {_rdl_name(register.name)} @ {register.offset:#x};"
    yield "};"


def _described(doc: str, note: str) -> str:
    return " ".join(filter(None, (doc, note)))


def _rdl_properties(field: Field, names: dict[type[NamedValue], str]) -> str:
    text = ACCESS[field.access]
    if doc := _described(field.doc, BINARY32 * (field.kind is Kind.FLOAT32)):
        text += f" desc = {_rdl_text(doc)};"
    if field.values is not None:
        text += f" encode = {names[field.values]}_values;"
    return text


def _rdl_place(register_map: RegisterMap, field: Field) -> str:
    place = f"{_rdl_name(field.name)}[{field.msb}:{field.lsb}]"
    if field.access in (Access.STATUS, Access.COUNTER, Access.REFUSED):
        return place
    return f"{place} = {field.width}'h{register_map.reset_value(field):x}"
