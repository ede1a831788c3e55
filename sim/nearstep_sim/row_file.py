"""Files of rows, one for each block and valid as long as the block and the tools are unchanged."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amaranth.lib import wiring

from nearstep_hw.verilog import netlist

__all__ = ["Row", "digest_of", "digest_of_texts", "read_rows", "write_rows"]

DIGEST_DIGITS = 16
Row = dict[str, Any]


def digest_of(component: wiring.Component, name: str) -> str:
    """Return the digest of a netlist before Yosys, deterministic for the sources.

    Equal netlists result in equal Verilog from equal tools, and are made in a fraction of the time.
    """
    return digest_of_texts([netlist(component, name)])


def digest_of_texts(texts: Sequence[str]) -> str:
    """Digest of texts in their order."""
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:DIGEST_DIGITS]


def read_rows(path: Path) -> tuple[dict[str, str], dict[str, Row]]:
    """Return tools and rows of the file; empty without a file."""
    if not path.exists():
        return {}, {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["tools"], content["blocks"]


def write_rows(path: Path, tools: Mapping[str, str], rows: Mapping[str, Row]) -> None:
    """Write the file, one line a row."""
    body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    partly = path.with_suffix(".partial")
    partly.write_text(
        f'{{"tools": {json.dumps(tools)},\n "blocks": {{\n{body}\n }}}}\n', encoding="utf-8"
    )
    os.replace(partly, path)
