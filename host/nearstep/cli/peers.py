"""`nearstep peers`: optimizers of other projects on this machine, beside `host:`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from nearstep.cli.outcome import AsJson, print_json, print_table, reported, table_of, working
from nearstep.errors import ArgumentError
from nearstep_spec.blockwise import GROUP

if TYPE_CHECKING:
    from nearstep.measure.peers import PeerResult

COLUMNS = (
    "optimizer", "of", ">million parameters a second", ">of the stream", ">bytes a parameter",
    ">ulp from fp64", ">not torch's",
)  # fmt: skip


def command(
    parameters: Annotated[int, typer.Option(help="Parameters of each.", min=1)] = 100_000_000,
    tensors: Annotated[int, typer.Option(help="Equal tensors of these.", min=1)] = 50,
    steps: Annotated[int, typer.Option(help="Measured steps, after one that is not.", min=1)] = 7,
    only: Annotated[str, typer.Option(help="Part of the names of the optimizers to run.")] = "",
    as_json: AsJson = False,
) -> None:
    """Measure AdamW of torch, DeepSpeed, torchao and bitsandbytes on the CPU, beside `host:`.

    Each step runs beside a stream of the same processor: torch's own reads and writes of the arrays
    of AdamW in fp32, by processor time. The last columns are the mean distance of parameters from
    those of steps in fp64, and the share of those whose bits are not torch's, both after ten steps.
    A project that is not installed is a row that says how to install it. Tensors are of whole
    groups of 256 elements, but for smaller ones.
    """
    with reported(), working("import of torch") as report:
        from nearstep.measure.peers import PEERS, peer_results  # torch is an extra

        chosen = [each for each in PEERS if only in each.name]
        if not chosen:
            names = ", ".join(dict.fromkeys(each.name for each in PEERS))
            raise ArgumentError(f"--only must be part of one of {names}, not {only!r}")
        size = max(1, parameters // tensors)
        if size >= GROUP:  # torchao keeps the state of tensors of other sizes in fp32
            size -= size % GROUP
        sizes = [size] * tensors
        rows = list(peer_results(sizes, steps, chosen, report))
    if as_json:
        print_json([asdict(each) for each in rows])
        return
    print_table(table_of(COLUMNS, map(_row, rows), f"AdamW of {sum(sizes):,} parameters"))
    for each in rows:
        if each.problem is not None:
            typer.echo(f"{each.name}: {each.problem}")


def _row(row: PeerResult) -> list[str]:
    name = row.name if row.version is None else f"{row.name} ({row.version})"
    shares = [row.of_stream, row.not_torch]
    stream, others = ("" if each is None else f"{100 * each:.1f} %" for each in shares)
    wide = "" if row.ulps is None else f"{row.ulps:.2g}"
    rate = "" if row.parameters_per_s is None else f"{row.parameters_per_s / 1e6:.0f}"
    nbytes = "" if row.bytes_per_parameter is None else f"{row.bytes_per_parameter:.1f}"
    return [name, row.dtype, rate, stream, nbytes, wide, others]
