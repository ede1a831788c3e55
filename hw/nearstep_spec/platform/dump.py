"""A machine as TOML, which `nearstep_spec.platform.load` reads back."""

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from nearstep_spec.platform.load import PARTS
from nearstep_spec.platform.machine import Figure, Platform


def dump(platform: Platform) -> str:
    """Write the text of a description, with a source at each figure."""
    lines = [f"name = {_text(platform.name)}", f"title = {_text(platform.title)}"]
    if platform.switches:
        lines.append(f"switches = [{', '.join(map(_text, platform.switches))}]")
    for table in PARTS:
        for name, part in getattr(platform, table).items():
            lines += ["", f"[{table}.{_text(name)}]", *_entries(part)]
    return "\n".join(lines) + "\n"


def _entries(part: Any) -> Iterator[str]:
    for each in fields(part):
        value = getattr(part, each.name)
        if isinstance(value, Figure):
            yield f"{each.name} = {_figure(value)}"
        elif isinstance(value, str):
            yield f"{each.name} = {_text(value)}"
        elif each.name == "ends":
            yield f"ends = [{', '.join(map(_text, value))}]"
        elif each.name == "flops":
            yield from (f"flops.{dtype} = {_figure(one)}" for dtype, one in value.items())


def _figure(figure: Figure) -> str:
    value, source = repr(figure.value), _text(figure.source)
    return f"{{ value = {value}, origin = {_text(figure.origin)}, source = {source} }}"


def _text(text: str) -> str:
    """A basic string: its escapes are those of JSON, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
