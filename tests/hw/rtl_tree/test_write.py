"""`nearstep rtl --all`: the folder that it writes, what other tools make of it, what it refuses."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nearstep_hw import generate
from nearstep_hw.generate import GENERATORS, command
from nearstep_hw.rtl_tree import write
from nearstep_hw.rtl_tree.constraints import PARTS
from nearstep_hw.rtl_tree.fusesoc import core_name
from nearstep_hw.rtl_tree.waivers import WAIVERS, waiver_file
from nearstep_hw.rtl_tree.write import INDEX, TEXT, TreeError, write_tree
from nearstep_sim.verilate.build import tool_environment, verilator_root
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.csr.export import html as export

from ...ended import ends
from ..event_driven import needs_icarus

SCRIPTS = Path(sys.executable).parent
FEW = {
    "fp16_to_fp32": GENERATORS["fp16_to_fp32"],
    "bf16_to_fp32": replace(GENERATORS["bf16_to_fp32"], maps=lambda _: DimmConfig().maps()),
}
"""Two small tops; one is given the registers of a module."""


class Here:
    """Stands for the processes: makes a top where it is asked to."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def shutdown(self, **_: object) -> None:
        pass

    def submit(self, make, name):
        future: Future = Future()
        try:
            future.set_result(make(name))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(write, "ProcessPoolExecutor", Here)


def small(folder, **options):
    return write_tree(folder, FEW, generate._made, **options)


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def cli():
    app = typer.Typer()
    app.command(context_settings=command.context_settings)(command)
    return lambda *arguments: CliRunner().invoke(app, [str(x) for x in arguments])


def lint(*arguments):
    done = subprocess.run(
        [verilator_root() / "bin" / "verilator_bin", "--lint-only", "-Wall", *arguments],
        env=tool_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_the_index_lists_every_file_with_its_digest(here, tmp_path):
    index = small(tmp_path / "new" / "tree")
    files = contents(tmp_path / "new" / "tree")
    assert json.loads(files.pop(INDEX)) == index
    assert {name: row["sha256"] for name, row in index["files"].items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in files.items()
    }
    assert list(index["tops"]) == list(FEW)
    for name, top in index["tops"].items():
        assert f"module {name}(".encode() in files[top["verilog"]]
        assert name in files[TEXT].decode()
        assert f"{name}.core" in files
        assert all(files[path] for path in top["constraints"].values())
    blocks = index["tops"]["bf16_to_fp32"]["registers"]
    maps = DimmConfig().maps()
    assert {name: row["address"] for name, row in blocks.items()} == {
        name: address for name, (address, _) in maps.items()
    }
    for name, row in blocks.items():
        assert json.loads(files[row["files"]["json"]])["name"] == maps[name][1].name
        assert row["hash"].encode() in files[row["files"]["c"]]
        assert f"  {row['map']} {name} @ ".encode() in files["registers/bf16_to_fp32/space.rdl"]
    page = files[index["html"]].decode()
    assert "<html" in page
    data = b"".join(text for name, text in files.items() if name.startswith("html/data"))
    assert b"bf16_to_fp32_registers" in data
    assert b"stall_write_space" in data


def test_the_same_sources_give_the_same_bytes_and_leave_nothing_else(here, tmp_path):
    small(tmp_path / "first")
    first = contents(tmp_path / "first")
    assert len(first) > 80
    small(tmp_path / "other")
    assert contents(tmp_path / "other") == first
    small(tmp_path / "first", html=False)  # over what is there
    again = contents(tmp_path / "first")
    assert not any(name.startswith("html") for name in again)
    assert {name for name in first if not name.startswith("html")} == set(again)
    assert not (tmp_path / "first" / "html").exists()


def test_folders_that_are_not_ours_stay_as_they_are(here, tmp_path):
    refused = 0
    for name, content, message in (
        ("notes.txt", "mine", r"it is not empty \(notes.txt\), and has no index.json"),
        (INDEX, "{}", r"it is not empty \(index.json\), and has no index.json of"),
        (INDEX, "no JSON", "has no index.json of"),
        (INDEX, '{"writer": "another", "files": {}}', "has no index.json of"),
    ):
        folder = tmp_path / str(refused)
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(TreeError, match=message):
            small(folder)
        assert contents(folder) == {name: content.encode()}
        refused += 1
    assert refused == 4


def test_files_that_a_user_filled_in_are_not_lost(here, tmp_path):
    small(tmp_path, html=False)
    stub = tmp_path / "constraints" / "bf16_to_fp32_ku15p.xdc"
    text = stub.read_text()
    stub.write_text(text.replace("<ns>", "1.0"))
    before = contents(tmp_path)
    with pytest.raises(TreeError, match=f"{stub.name} was changed since `nearstep rtl --all`; mov"):
        small(tmp_path, html=False)
    assert contents(tmp_path) == before
    stub.write_text(text)
    (tmp_path / "rtl" / "mine.v").write_text("module mine; endmodule\n")
    with pytest.raises(TreeError, match=r"rtl/mine.v is not of `nearstep rtl --all`"):
        small(tmp_path, html=False)
    (tmp_path / "rtl" / "mine.v").unlink()
    small(tmp_path, html=False)
    assert contents(tmp_path).keys() == before.keys()


def test_a_top_that_cannot_be_made_leaves_no_folder(here, tmp_path):
    def fails(name):
        raise RuntimeError("no Yosys")

    with pytest.raises(RuntimeError, match="no Yosys"):
        write_tree(tmp_path / "tree", FEW, fails)
    assert not (tmp_path / "tree").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError, match="no Yosys"):
        write_tree(tmp_path / "empty", FEW, fails)
    assert contents(tmp_path) == {}


INTERRUPTED = """
import os, subprocess, sys
from dataclasses import replace
from pathlib import Path
from nearstep_hw.generate import GENERATORS
from nearstep_hw.rtl_tree.write import write_tree

def make(name):
    tool = subprocess.Popen(["sleep", "600"])
    Path(name + ".tmp").write_text(f"{os.getpid()} {tool.pid}")
    os.replace(name + ".tmp", name + ".pids")
    tool.wait()

if __name__ == "__main__":
    names = ("fp16_to_fp32", "bf16_to_fp32")
    write_tree(Path("out"), {name: GENERATORS[name] for name in names}, make, html=False, jobs=2)
"""


def test_an_interrupt_ends_the_processes_and_their_tools_and_leaves_no_folder(tmp_path):
    (tmp_path / "write.py").write_text(INTERRUPTED)
    writes = subprocess.Popen(
        [sys.executable, "write.py"], cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True
    )
    while len(list(tmp_path.glob("*.pids"))) < 2 and writes.poll() is None:
        time.sleep(0.05)
    os.kill(writes.pid, signal.SIGINT)
    assert b"KeyboardInterrupt" in writes.communicate(timeout=60)[1]
    numbers = [number for path in tmp_path.glob("*.pids") for number in path.read_text().split()]
    assert len(numbers) == 4
    assert [number for number in numbers if not ends(int(number))] == []
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named_before_anything_is_written(monkeypatch, cli, tmp_path):
    monkeypatch.setitem(export.PACKAGES, "no_such_module", "peakrdl-html")
    folder = tmp_path / "tree"
    said = cli("--all", "-o", folder)
    assert said.exit_code == 1
    text = re.sub(r"[\s│]+", " ", said.output)
    assert "need the package peakrdl-html, which is not installed: pip install" in text
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--all"], "--all needs --output"),
        (["fp32_add", "--all", "-o", "x"], "fp32_add is for one block"),
        (["--all", "-o", "x", "--lanes", 4], "--lanes 4 is for one block"),
        (["--all", "-o", "x", "--list"], "--list and --json list them"),
        (["--all", "-o", "x", "--json"], "--list and --json list them"),
        (["fp32_add", "--no-html"], "--no-html is for --all"),
        (["--all", "-o", "/dev/null/x"], "cannot write to /dev/null/x: Not a directory"),
        (["--all", "-o", "/dev/null"], "cannot write to /dev/null: File exists"),
    ],
)
def test_wrong_arguments_are_named(cli, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    said = cli(*arguments)
    assert said.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", said.output)
    assert contents(tmp_path) == {}


def test_stubs_have_a_clock_and_no_pins(here, tmp_path):
    small(tmp_path, html=False)
    stubs = sorted((tmp_path / "constraints").iterdir())
    assert len(stubs) == len(FEW) * len(PARTS)
    periods = {"ku15p": "4.000", "zu19eg": "5.000"}
    for path in stubs:
        lines = path.read_text().splitlines()
        given = [line for line in lines if line and not line.startswith("#")]
        period = periods[path.stem.rpartition("_")[2]]
        assert given == [f"create_clock -name clk -period {period} [get_ports clk]"]
        for port in ("rst", "i_a", "i_valid", "o_z"):
            assert sum(f"[get_ports {{{port}}}]" in line for line in lines) == 2


FAULTS = {
    "LATCH": "always @* if (i) o = 1'h1;",
    "MULTIDRIVEN": "always @(posedge clk) o <= i; always @(negedge clk) o <= ~i;",
    "UNDRIVEN": "wire hidden; always @* o = hidden & i;",
    "BLKSEQ": "always @(posedge clk) o = i;",
    "IMPLICIT": "assign other = i; always @* o = other;",
}


@pytest.mark.parametrize("rule", FAULTS)
def test_the_waivers_hide_no_fault(tmp_path, rule):
    (tmp_path / "waivers.vlt").write_text(waiver_file())
    source = f"module unit(input clk, input i, output reg o);\n{FAULTS[rule]}\nendmodule\n"
    (tmp_path / "unit.v").write_text(source)
    status, said = lint(tmp_path / "waivers.vlt", tmp_path / "unit.v")
    assert status != 0
    assert f"-{rule}:" in said


@pytest.fixture(scope="module")
def whole(cli, tmp_path_factory):
    """The folder that the command writes: minutes."""
    folder = tmp_path_factory.mktemp("whole") / "tree"
    said = cli("--all", "-o", folder)
    assert said.exit_code == 0, said.output
    print(said.output)
    return folder


@pytest.mark.deep
def test_every_top_is_clean_in_verilator_and_every_waiver_is_needed(whole):
    rules, clean = set(), 0
    for name in GENERATORS:
        verilog = ["--top-module", name, whole / "rtl" / f"{name}.v"]
        assert lint(whole / "lint" / "verilator.vlt", *verilog) == (0, "")
        if rules < set(WAIVERS):  # else no other rule is left: the top is clean
            rules |= set(re.findall(r"%Warning-(\w+):", lint("-Wno-fatal", *verilog)[1]))
        clean += 1
    print(f"{clean} tops are clean; without waivers: {', '.join(sorted(rules))}")
    assert clean == len(GENERATORS) == len(list((whole / "rtl").iterdir()))
    assert rules == set(WAIVERS)


@pytest.mark.deep
def test_icarus_reads_every_top(whole):
    needs_icarus()
    paths = sorted((whole / "rtl").iterdir())
    assert len(paths) == len(GENERATORS)
    for path in paths:
        done = subprocess.run(
            ["iverilog", "-g2012", "-t", "null", path], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), path


def fusesoc(folder, *arguments):
    """What FuseSoC prints, of the cores in `tree` and elsewhere in a folder."""
    path = os.pathsep.join(map(str, (verilator_root() / "bin", SCRIPTS, os.environ["PATH"])))
    done = subprocess.run(
        [SCRIPTS / "fusesoc", "--cores-root", folder, *arguments], cwd=folder,
        env={**tool_environment(), "PATH": path, "HOME": str(folder)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


DEPENDS = """CAPI=2:
name: my:own:top:1.0
filesets:
  rtl: {files: [top.v], file_type: verilogSource-2005, depend: ["nearstep:rtl:bf16_to_fp32"]}
targets:
  default:
    filesets: [rtl]
    toplevel: top
    flow: lint
    flow_options: {tool: verilator}
"""


def test_fusesoc_builds_a_core_by_itself_and_in_another_one(here, tmp_path):
    index = small(tmp_path / "tree", html=False)
    (tmp_path / "mine.core").write_text(DEPENDS)
    ports = "input clk, input v, input [15:0] a, output w, output [31:0] z, output [4:0] f"
    unit = ".clk(clk), .rst(v), .i_valid(v), .i_a(a), .o_valid(w), .o_z(z), .o_flags(f)"
    text = f"module top({ports});\nbf16_to_fp32 unit({unit});\nendmodule\n"
    (tmp_path / "top.v").write_text(text)
    for core in (index["tops"]["bf16_to_fp32"]["core"], "my:own:top"):
        assert "Verilator: Built from" in fusesoc(tmp_path, "run", core)


@pytest.mark.deep
def test_fusesoc_reads_every_core_and_runs_lint(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "tree")

    index = json.loads((whole / INDEX).read_text())
    listed = fusesoc(tmp_path, "core", "list")
    for name, top in index["tops"].items():
        assert top["core"] == core_name(name, index["version"])
        assert top["core"] in listed
    assert "Verilator: Built from" in fusesoc(
        tmp_path, "run", index["tops"]["axdimm_channel"]["core"]
    )
    for name in ("fp32_fma", "adam_fu", "pcie_endpoint"):
        core = index["tops"][name]["core"]
        for target in ("default", "lint"):
            assert "Verilator: Built from" in fusesoc(tmp_path, "run", "--target", target, core)
        for target in ("synth", *(f"synth_{part.name}" for part in PARTS)):
            fusesoc(tmp_path, "run", "--setup", "--target", target, core)
    scripts = "".join(path.read_text() for path in tmp_path.rglob("*.tcl"))
    for part in PARTS:
        assert scripts.count(f"set_property part {part.part} ") == 3
    assert scripts.count("synth_xilinx -family xcup -flatten") == 3
