"""`nearstep axdimm`: the AXDIMM runtime for programs in C."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Annotated

import typer

import nearstep.axdimm
from nearstep.cli.outcome import FAILED, group
from nearstep_spec.compiler import compiler

SOURCES = Path(nearstep.axdimm.__file__).parent
FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-pthread")

app = group("The AXDIMM runtime for programs in C.")


@app.command()
def library(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.")],
) -> None:
    """Build libaxdimm.so, and write axdimm.h beside it.

    The library runs in the Python environment of this command. Exit status 1 if it cannot be built.
    """
    include = Path(sysconfig.get_path("include"))
    shared = sysconfig.get_config_var("INSTSONAME") or ""
    if not (include / "Python.h").exists():
        _fail(f"there is no {include}/Python.h; on Debian the package python3-dev has it")
    if ".so" not in shared:
        _fail(f"Python at {sys.prefix} has no shared library: build it with --enable-shared")
    folder = sysconfig.get_config_var("LIBDIR")
    defined = {"AXDIMM_PYTHON": sys.executable, "AXDIMM_LIBPYTHON": shared}
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output) as made:
            target = Path(made) / "libaxdimm.so"
            words = [
                *(*compiler(), "-shared", *FLAGS, f"-I{include}", "-o", str(target)),
                *(f"-D{name}={json.dumps(text)}" for name, text in defined.items()),
                *("-x", "c", str(SOURCES / "libaxdimm.c"), "-x", "none", f"-L{folder}"),
                *(f"-lpython{sysconfig.get_config_var('LDVERSION')}", f"-Wl,-rpath,{folder}"),
                "-ldl",
            ]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                _fail(f"{words[0]} cannot build libaxdimm.so:\n{done.stderr.strip()}")
            os.replace(target, output / target.name)
        shutil.copy(SOURCES / "axdimm.h", output)
    except ValueError as error:
        _fail(f"CXX is no command: {error}")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {output}: {error.strerror}") from None
    typer.echo(f"{output}/libaxdimm.so, {output}/axdimm.h")


def _fail(why: str) -> None:
    typer.echo(f"error: {why}", err=True)
    raise typer.Exit(FAILED)
