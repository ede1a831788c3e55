"""`nearstep registers`: the register map of a block, for other tools and languages."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import device_map, sync_core_map
from nearstep_spec.csr.export import FORMATS
from nearstep_spec.smartssd.config import UPDATER
from nearstep_spec.updater.config import AdamKernelConfig, ConfigError
from nearstep_spec.updater.registers import adam_kernel_map

BLOCKS = ("axdimm", "axdimm-arbiter", "smartssd", "coarse", "coarse-sync")
COARSE_MAPS = {"coarse": device_map, "coarse-sync": sync_core_map}

KERNEL = ("lanes", "functional_units", "block_bytes", "address_width", "order", "windows")
SHAPED_BY = {
    "axdimm": KERNEL,
    "axdimm-arbiter": (*KERNEL, "density", "width", "mapping"),
    "smartssd": KERNEL,
    "coarse": (),
    "coarse-sync": (),
}
"""Options that shape the map of each block."""

DEFAULT = AdamKernelConfig()
DIMM = DimmConfig()


def command(
    context: typer.Context,
    block: Annotated[
        str,
        typer.Argument(
            help=f"Kernel, arbiter, card or pool; one of: {', '.join(BLOCKS)}.",
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
    lanes: Annotated[int, typer.Option(help="FP32 elements in a memory beat.")] = DEFAULT.lanes,
    functional_units: Annotated[
        int | None, typer.Option(help="Functional units; as many as lanes if not given.")
    ] = None,
    block_bytes: Annotated[
        int, typer.Option(help="Bytes of a block of one array.")
    ] = DEFAULT.block_bytes,
    address_width: Annotated[
        int, typer.Option(help="Bits of a memory address.")
    ] = DEFAULT.address_width,
    order: Annotated[str, typer.Option(help="Order of the arithmetic.")] = DEFAULT.order,
    windows: Annotated[
        int | None, typer.Option(help="Address windows; the usual ones if not given.")
    ] = None,
    density: Annotated[str, typer.Option(help="DRAM chips, of an arbiter.")] = DIMM.density,
    width: Annotated[str, typer.Option(help="DRAM chips, of an arbiter.")] = DIMM.width,
    mapping: Annotated[str, typer.Option(help="Address bits, of an arbiter.")] = DIMM.mapping,
) -> None:
    """Write the register map as JSON, SystemRDL, a C header or a page of documentation."""
    if block not in BLOCKS:
        raise typer.BadParameter(f"must be one of {', '.join(BLOCKS)}, not {block!r}")
    if form not in FORMATS:
        raise typer.BadParameter(f"--format must be one of {', '.join(FORMATS)}, not {form!r}")
    _check_used(context, block)
    if block in COARSE_MAPS:
        _write(FORMATS[form](COARSE_MAPS[block](CoarseConfig())), output)
        return
    try:
        usual = UPDATER if block == "smartssd" else DEFAULT
        config = replace(
            usual,
            lanes=lanes,
            functional_units=functional_units,
            block_bytes=block_bytes,
            address_width=address_width,
            order=order,
            windows=usual.windows if windows is None else windows,
        )
        registers = adam_kernel_map(config)
        if block == "axdimm-arbiter":
            dimm = DimmConfig(kernel=config, density=density, width=width, mapping=mapping)
            _, registers = dimm.maps()["arbiter0"]
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    _write(FORMATS[form](registers), output)


def _check_used(context: typer.Context, block: str) -> None:
    """Refuse options that were given and do not shape the block's map."""
    shapes = {name for names in SHAPED_BY.values() for name in names}
    for name in context.params:
        source = context.get_parameter_source(name)
        given = source is not None and source.name != "DEFAULT"
        if name in shapes and given and name not in SHAPED_BY[block]:
            blocks = ", ".join(each for each, names in SHAPED_BY.items() if name in names)
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} does not shape {block}; it shapes {blocks}"
            )


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
