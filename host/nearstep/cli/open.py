"""`nearstep open`: opens a device and describes it."""

from dataclasses import asdict
from typing import Any

import typer

from nearstep.backends.options import DeviceUrl
from nearstep.cli.devices import DeviceName, families_of
from nearstep.cli.outcome import AsJson, print_json, print_table, reported, table_of, working
from nearstep.device import backend_of, open_device
from nearstep_spec.codec import to_json, to_text


def manifest(url: str) -> dict[str, Any]:
    """Open the device named `url`, compare its registers with the driver's maps, and describe it
    for `json.dumps`.

    `device` is the shortest name of an equal device, `options` has every option with its value,
    `memory_bytes` is the memory for arrays, `registers` has address and map hash of each block, and
    `board` is a board's manifest.
    """
    name = DeviceUrl.parse(url)
    with open_device(url) as device:
        options = families_of(backend_of(name))[name.target].parse(name.options)
        query = "&".join(f"{key}={text}" for key, text in to_text(options).items())
        board = getattr(device.backend, "manifest", None)
        return {
            "device": "?".join(filter(None, (f"{name.backend}:{name.target}", query))),
            "family": device.backend.family,
            "options": to_json(options),
            **({} if board is None else {"board": asdict(board)}),
            "memory_bytes": device.capacity_bytes,
            "registers": {
                name: {"address": block.base, "map_hash": f"{block.map.hash():#010x}"}
                for name, block in device.blocks.items()
            },
        }


def command(
    url: DeviceName,
    as_json: AsJson = False,
) -> None:
    """Open a device, and describe it. The first time, its simulator is built."""
    with reported(), working(f"opening {url}"):
        found = manifest(url)
    if as_json:
        print_json(found)
        return
    columns = ("block", "address", "hash of the map")
    blocks = found["registers"].items()
    rows = [(block, f"{row['address']:#x}", row["map_hash"]) for block, row in blocks]
    print_table(table_of(columns, rows, found["device"], title_justify="left"))
    if "board" in found:
        board = found["board"]
        typer.echo(f"{board['board']}, made by nearstep {board['package']}, {board['family']}")
    typer.echo(f"{found['memory_bytes']} bytes of memory; --json prints every option")
