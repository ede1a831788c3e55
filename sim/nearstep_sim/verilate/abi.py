"""Structures and functions that C++ and Python share, declared once: in C++."""

import ctypes
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nearstep_sim.verilate.build import INCLUDES, included
from nearstep_spec.errors import NearstepError

__all__ = ["AbiError", "load", "structure", "values"]

NOTHING: Mapping[str, Any] = MappingProxyType({})

SCALARS: Mapping[str, type] = MappingProxyType(
    {
        "bool": ctypes.c_bool,
        "char": ctypes.c_char,
        "float": ctypes.c_float,
        "double": ctypes.c_double,
        "int": ctypes.c_int,
        "unsigned": ctypes.c_uint,
        "size_t": ctypes.c_size_t,
        **{
            f"{sign}int{bits}_t": getattr(ctypes, f"c_{sign}int{bits}")
            for sign in ("", "u")
            for bits in (8, 16, 32, 64)
        },
    }
)
MEMBER = re.compile(r"(?:const )?(?P<type>[\w:]+)(?P<pointer>\*?) (?P<names>\w.*)")
NAME = re.compile(r"(?P<name>\w+)(?P<sizes>(?:\[[\w:]+\])*)(?:\{\}| = [^,]+)?")

FUNCTION = re.compile(
    r"^(?:const )?(?P<result>[\w:]+)(?P<pointer>\*?) (?P<name>\w+)\((?P<given>[^()]*)\) \{", re.M
)
"""A function, at the beginning of a line."""
PARAMETER = re.compile(r"(?:const )?(?P<type>[\w:]+)(?P<pointers>(?:\*| const\b)*)(?: \w+)?")
LINKAGE = 'extern "C" '


class AbiError(NearstepError, ValueError):
    """A declaration in C++ that is missing, or that has no structure of ctypes."""


def structure(
    source: str,
    name: str,
    *,
    types: Mapping[str, type] = NOTHING,
    sizes: Mapping[str, int] = NOTHING,
) -> type[ctypes.Structure]:
    """A structure of ctypes with the members of a `struct`, in their order.

    Members are numbers, `char`, pointers, enumerations with an underlying type, other such
    structures, and arrays of these. Constants and functions of the structure are ignored.

    Parameters
    ----------
    source : file in the package that declares the structure, itself or in an included file.
    name : of the structure.
    types : of members, by their name in C++; others are found by their declaration.
    sizes : of arrays, by name; others are numbers, or found as `constexpr int`.

    Raises
    ------
    AbiError
    """
    return _found(INCLUDES / source, name, types, sizes)


def load(library: Path, *sources: Path | str) -> ctypes.CDLL:
    """Load a library, and set the declared types of its functions.

    Pointers are `c_void_p`, but for text. Functions that a build leaves out are ignored.

    Parameters
    ----------
    sources : files with its functions of C, or that include such files; in the package or as
        absolute paths.

    Raises
    ------
    AbiError : a type is not known, or there is no function.
    """
    loaded = ctypes.CDLL(str(library))
    found = {name: types for source in sources for name, types in _functions(INCLUDES / source)}
    if not found:
        raise AbiError(f"{', '.join(map(str, sources))}: no function is declared {LINKAGE.strip()}")
    for name, (result, given) in found.items():
        function = getattr(loaded, name, None)
        if function is not None:
            function.restype, function.argtypes = result, given
    return loaded


def values(filled: ctypes.Structure) -> dict[str, Any]:
    """The members of a structure by name."""
    return {name: getattr(filled, name) for name, *_ in filled._fields_}


def _frozen(mapping: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(mapping.items(), key=lambda each: each[0]))


def _found(
    source: Path, name: str, types: Mapping[str, type], sizes: Mapping[str, int]
) -> type[ctypes.Structure]:
    return _made(*_declaration(source, name), name, _frozen(types), _frozen(sizes))


@cache
def _made(
    place: Path,
    body: str,
    name: str,
    types: tuple[tuple[str, Any], ...],
    sizes: tuple[tuple[str, Any], ...],
) -> type[ctypes.Structure]:
    """The structure of one declaration: the same wherever it is named."""
    fields = [
        (member, _type(place, kind, pointer, lengths, dict(types), dict(sizes)))
        for kind, pointer, member, lengths in _members(place, name, body)
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields, "__doc__": f"`{name}` of C++."})


@cache
def _texts(source: Path) -> tuple[tuple[Path, str], ...]:
    """A file and all that it includes, without comments."""
    return tuple(
        (path, re.sub(r"//[^\n]*", "", path.read_text())) for path in (source, *included([source]))
    )


def _declaration(source: Path, name: str) -> tuple[Path, str]:
    """Return the file that declares a structure, and the text between its braces."""
    for path, text in _texts(source):
        found = re.search(rf"^ *struct {name} \{{\n(.*?)^ *\}};$", text, re.M | re.S)
        if found:
            return path, found[1]
    raise AbiError(f"{source} and what it includes declare no struct {name}")


@cache
def _functions(source: Path) -> tuple[tuple[str, tuple[type | None, list[type]]], ...]:
    """Name, type of the result and types of the parameters of each function of C."""
    found = []
    for place, text in _texts(source):
        for part in text.split(LINKAGE)[1:]:
            block = part.removeprefix("{\n")  # of many functions, or one that begins there
            for each in FUNCTION.finditer(block):
                if block is part and each.start():
                    break
                given = [one for one in each["given"].split(",") if one.strip()]
                parameters = [PARAMETER.fullmatch(" ".join(one.split())) for one in given]
                if not all(parameters):
                    raise AbiError(f"{place}: parameters of {each['name']} are not understood")
                types = [_passed(place, one["type"], "*" in one["pointers"]) for one in parameters]
                nothing = each["result"] == "void" and not each["pointer"]
                result = None if nothing else _passed(place, each["result"], bool(each["pointer"]))
                found.append((each["name"], (result, types)))
    return tuple(found)


def _passed(place: Path, kind: str, pointer: bool) -> type:
    """The type of a parameter or a result in ctypes."""
    return _type(place, kind, pointer, [], {}, {})


def _members(place: Path, name: str, body: str) -> Iterator[tuple[str, bool, str, list[str]]]:
    """Type, whether it is a pointer, name and sizes of each member."""
    for statement in _statements(body):
        if statement.startswith("static constexpr "):
            continue
        member = MEMBER.fullmatch(statement)
        names = [] if member is None else [NAME.fullmatch(n) for n in member["names"].split(", ")]
        if member is None or not all(names):
            raise AbiError(f"{place}: a member of {name} is not understood: {statement}")
        for each in names:
            lengths = re.findall(r"[\w:]+", each["sizes"])
            yield member["type"], bool(member["pointer"]), each["name"], lengths


def _statements(body: str) -> Iterator[str]:
    """Declarations of a structure; functions, which end with a brace, are left out."""
    words, depth = "", 0
    for part in re.split(r"([{};])", body):
        if depth or (part == "{" and words.rstrip().endswith((")", "const", "noexcept"))):
            depth += (part == "{") - (part == "}")
            words = ""
        elif part == ";":
            if "operator" not in words:
                yield " ".join(words.split())
            words = ""
        else:
            words += part


def _type(
    place: Path,
    kind: str,
    pointer: bool,
    lengths: list[str],
    types: dict[str, type],
    sizes: dict[str, int],
) -> type:
    """The type of a member in ctypes."""
    if pointer:
        found: type = ctypes.c_char_p if kind == "char" else ctypes.c_void_p
    elif kind in types:
        found = types[kind]
    elif kind.removeprefix("std::") in SCALARS:
        found = SCALARS[kind.removeprefix("std::")]
    else:
        found = _underlying(place, kind) or _found(place, kind, types, sizes)
    for length in reversed(lengths):
        found = found * (sizes[length] if length in sizes else _size(place, length))
    return found


def _underlying(place: Path, kind: str) -> type | None:
    """Return the underlying type of an enumeration; None for other names."""
    for _, text in _texts(place):
        found = re.search(rf"^ *enum (?:class )?{kind} : ([\w:]+) \{{", text, re.M)
        if found:
            return SCALARS[found[1].removeprefix("std::")]
    return None


def _size(place: Path, length: str) -> int:
    length = length.rpartition("::")[2]
    if length.isdecimal():
        return int(length)
    for _, text in _texts(place):
        found = re.search(rf"constexpr int (?:\w+ = [^;,]+, )*{length} = (\d+)[,;]", text)
        if found:
            return int(found[1])
    raise AbiError(f"{place}: the size {length} is no number: it has to be given")
