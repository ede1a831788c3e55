"""Names of sources: in a plan without folders of this machine, and for what a netlist has."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

__all__ = ["block_of", "portable", "source_of"]

_SRC = re.compile(r'(attribute \\src ")([^"]*)(")')
_FOREIGN = ("/share/", "amaranth/")
"""Of the cells of Yosys, and of the library in which signals of interfaces are made: no source of
what a design does."""


def portable(rtlil: str, roots: Iterable[str] | None = None) -> str:
    """RTLIL whose attributes `src` name files from where Python imports them: the same in every
    checkout.

    Parameters
    ----------
    rtlil : of Amaranth.
    roots : folders that files are imported from; those of this Python unless given.
    """
    given = sys.path if roots is None else roots
    folders = sorted({Path(each).resolve() for each in given if each}, key=_depth, reverse=True)
    known: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        text = match[2]
        if text not in known:
            known[text] = "|".join(_relative(each, folders) for each in text.split("|"))
        return match[1] + known[text] + match[3]

    return _SRC.sub(named, rtlil)


def _depth(folder: Path) -> int:
    return len(folder.parts)


def _relative(source: str, folders: list[Path]) -> str:
    path, colon, line = source.rpartition(":")
    if not path.startswith("/"):
        return source
    for folder in folders:
        if Path(path).is_relative_to(folder):
            return f"{Path(path).relative_to(folder).as_posix()}{colon}{line}"
    return f"{PurePosixPath(path).name}{colon}{line}"


def source_of(sources: Iterable[str]) -> str:
    """File and line of the first of these that is a source of the design; empty if none is."""
    for each in sources:
        for one in each.split("|"):
            if one and not one.startswith(_FOREIGN):
                return one
    return ""


def block_of(name: str) -> tuple[str, ...]:
    """The blocks that a cell or net of a flat netlist lies in, from the outermost one.

    Of what tools have added for the whole chip, as clock buffers, there are none.
    """
    flat = re.sub(r"^(\$flatten)?\\|(?<=\.)\\", "", name)
    flat = re.sub(r"^\$(glbnet|gbuf)\$", "", flat)
    *blocks, _ = flat.split(".")
    return () if any(each.startswith("$") for each in blocks) else tuple(blocks)
