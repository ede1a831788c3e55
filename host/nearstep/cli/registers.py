"""`nearstep registers`: the register map of a block, for other tools and languages."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import device_map, sync_core_map
from nearstep_spec.codec import CodecError, from_text, texts_of, to_text
from nearstep_spec.csr.export import FORMATS
from nearstep_spec.csr.model import RegisterMap
from nearstep_spec.smartssd.config import SmartssdConfig
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import adam_kernel_map

BLOCKS: dict[str, tuple[type[Any], Callable[[Any], RegisterMap]]] = {
    "axdimm": (UpdateKernelConfig, adam_kernel_map),
    "axdimm-arbiter": (DimmConfig, lambda dimm: dimm.maps()["arbiter0"][1]),
    "smartssd": (SmartssdConfig, lambda card: card.maps()["updater0"][1]),
    "coarse": (CoarseConfig, device_map),
    "coarse-sync": (CoarseConfig, sync_core_map),
}
"""Register blocks, each with its kind of configuration and function of its map."""


def command(
    context: typer.Context,
    block: Annotated[
        str,
        typer.Argument(
            help=f"Kernel, arbiter, card or pool, one of: {', '.join(BLOCKS)}; followed by its "
            f"options, as in nearstep devices: axdimm --lanes 4.",
            autocompletion=lambda: list(BLOCKS),
        ),
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help=f"One of: {', '.join(FORMATS)}.",
            autocompletion=lambda: list(FORMATS),
        ),
    ] = "md",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; standard output if none.")
    ] = None,
) -> None:
    """Write the register map as JSON, SystemRDL, a C header or a page of documentation."""
    if block not in BLOCKS:
        raise typer.BadParameter(f"must be one of {', '.join(BLOCKS)}, not {block!r}")
    if form not in FORMATS:
        raise typer.BadParameter(f"--format must be one of {', '.join(FORMATS)}, not {form!r}")
    kind, map_of = BLOCKS[block]
    try:
        registers = _map(kind, map_of, context.args)
    except ValueError as error:
        raise typer.BadParameter(f"{block}: {error}") from None
    _write(FORMATS[form](registers), output)


# Options unknown to Typer are options of the block.
cast(Any, command).context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}


def _map(
    kind: type[Any], map_of: Callable[[Any], RegisterMap], arguments: Sequence[str]
) -> RegisterMap:
    """Make the map of a configuration; an option without an effect on the map is an error."""
    texts = texts_of(kind, arguments)
    config = from_text(kind, texts)
    whole = map_of(config)
    for name, text in to_text(config).items():
        if name not in texts:
            continue
        rest = {other: said for other, said in texts.items() if other != name}
        try:
            without = map_of(from_text(kind, rest))
        except ValueError:
            continue  # the others need it
        if without.hash() == whole.hash():
            raise CodecError(name, text, "changes nothing in this map")
    return whole


def _write(text: str, output: Path | None) -> None:
    """Write to a file, or to standard output."""
    if output is None:
        typer.echo(text, nl=False)
    else:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"cannot write {output}: {error.strerror}") from None
