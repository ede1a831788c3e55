"""Register maps as a header for C11 and C++11."""

from collections.abc import Iterator

from nearstep_spec.csr.export.names import enumerations
from nearstep_spec.csr.model import WORD_BYTES, Access, RegisterMap


def to_c_header(register_map: RegisterMap) -> str:
    """The map as a header for C11 and C++11: offsets, masks, named values and a struct.

    The compiler checks the struct against the offsets. Headers of blocks with different names can
    be included together; two of one name only if they are equal, otherwise the compiler stops.
    """
    return "\n".join(_lines(register_map)) + "\n"


def _lines(register_map: RegisterMap) -> Iterator[str]:
    block = f"nearstep_{register_map.name}"
    prefix = block.upper()
    yield f"/* {register_map.doc} */"
    digest = f"{register_map.hash():#010x}"
    yield f"#ifdef {prefix}_H"
    yield f"#if {prefix}_HASH != {digest}"
    yield f'#error "two register maps are called {register_map.name}: this is {digest}"'
    yield "#endif"
    yield "#else"
    yield f"#define {prefix}_H"
    yield ""
    for header in ("assert", "stddef", "stdint"):
        yield f"#include <{header}.h>"
    yield ""
    yield f"#define {prefix}_HASH UINT32_C({digest})"
    yield f"#define {prefix}_SIZE {register_map.size}"
    for register in register_map:
        yield ""
        yield f"/* {register.doc} */"
        for index, name in enumerate(register.word_names()):
            offset = register.offset + index * WORD_BYTES
            yield f"#define {prefix}_{name.upper()}_OFFSET {offset:#06x}"
        constant = f"UINT{register.width}_C"
        for field in register.fields:
            name = f"{prefix}_{register.name}_{field.name}".upper()
            yield f"#define {name}_SHIFT {field.lsb}"
            yield f"#define {name}_MASK {constant}({field.mask:#x})"
            if field.access in (Access.CONSTANT, Access.MAP_HASH):
                yield f"#define {name}_CONSTANT {constant}({register_map.reset_value(field):#x})"
    for name, values in enumerations(register_map).items():
        yield ""
        for member in values:
            yield f"#define {prefix}_{name}_{member.name} {int(member)}".upper().replace(
                "#DEFINE", "#define"
            )
    yield ""
    yield from _c_struct(register_map, block)
    yield ""
    yield f"#endif /* {prefix}_H */"


def _c_struct(register_map: RegisterMap, block: str) -> Iterator[str]:
    yield f"struct {block} {{"
    end = 0
    for register in register_map:
        if register.offset > end:
            yield f"  uint32_t reserved_{end:x}[{(register.offset - end) // WORD_BYTES}];"
        for name in register.word_names():
            yield f"  volatile uint32_t {name};"
        end = register.end
    if register_map.size > end:
        yield f"  uint32_t reserved_{end:x}[{(register_map.size - end) // WORD_BYTES}];"
    yield "};"
    yield ""
    for register in register_map:
        for name in register.word_names():
            offset = f"{block}_{name}_offset".upper()
            yield f'static_assert(offsetof(struct {block}, {name}) == {offset}, "{name}");'
    yield f'static_assert(sizeof(struct {block}) == {block.upper()}_SIZE, "size");'
