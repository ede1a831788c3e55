# amaranth: UnusedElaboratable=no
"""`nearstep rtl`: what it lists is what it writes, and other tools can read it."""

import json
import re
import subprocess
import sys
from itertools import zip_longest

import pytest
import typer
from typer.testing import CliRunner

from nearstep_hw.generate import GENERATORS, build, command, describe, modules
from nearstep_hw.verilog import netlist
from nearstep_sim.verilate.build import tool_environment, verilator_root, verilog_of
from nearstep_spec.codec import CodecError, entries
from nearstep_spec.updater.config import UpdateKernelConfig

from .event_driven import STANDARDS, blind, combinational_blocks, output_bench, simulate

WHOLE = [
    *("axdimm_channel", "axdimm_module", "smartssd_card", "smartssd_pcie_card"),
    *("smartssd_series7_card", "adam_kernel", "coarse_device"),
]
IN_DEPTH = [
    *(*WHOLE, "general_updater", "general_fu", "smartssd_fu", "coarse_sync_core"),
    *("pcie_endpoint", "nvme_card", "serial_endpoint", "adam_fu", "axpby"),
]
"""What takes a second or more in each test, and is made of what the others show."""

BLOCKS = [
    pytest.param(name, marks=pytest.mark.deep) if name in IN_DEPTH else name for name in GENERATORS
]
SLOW_TO_ELABORATE = [*WHOLE, "general_updater"]
"""Icarus takes seconds for these, and a minute for a card."""

UNIT_INSTANCES = {
    "axpby": 16,
    "general_updater": 16,
    "adam_kernel": 16,
    "axdimm_channel": 16,
    "axdimm_module": 32,
    "smartssd_card": 16,
    "smartssd_pcie_card": 16,
    "smartssd_series7_card": 16,
}
WAIVED = [f"-Wno-{rule}" for rule in ("WIDTH", "CASEINCOMPLETE", "CMPCONST", "ASCRANGE")]
"""Of Verilator's default rules, those that Yosys's text breaks by its form."""

PORT = re.compile(r"^\s*(input|output)\s+(?:\[(\d+):0\]\s+)?(\w+);", re.M)


@pytest.fixture
def cli():
    app = typer.Typer()
    app.command(context_settings=command.context_settings)(command)
    return lambda *arguments: CliRunner().invoke(app, [str(x) for x in arguments])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file that the command writes for a block, written once for all tests and processes."""
    app = typer.Typer()
    app.command(context_settings=command.context_settings)(command)
    folder = tmp_path_factory.mktemp("verilog")

    def write(name):
        def generate():
            path = folder / f"{name}.v"
            result = CliRunner().invoke(app, [name, "-o", str(path)])
            assert result.exit_code == 0, result.output
            return path.read_text()

        return verilog_of(f"generator {name}", generate)

    return write


def _ports(verilog: str, top: str) -> set[tuple[str, str, int]]:
    body = re.search(rf"^module {top}\(.*?^endmodule", verilog, re.M | re.S).group()
    return {(name, direction, int(high or 0) + 1) for direction, high, name in PORT.findall(body)}


def test_the_list_holds_every_block(cli):
    rows = json.loads(cli("--list", "--json").stdout)
    assert [row["name"] for row in rows] == list(GENERATORS)
    assert {"fp32_add", "fp32_sub", "fp32_mul", "fp32_fma", "fp32_div", "fp32_sqrt"} < set(
        GENERATORS
    )
    by_name = {row["name"]: row for row in rows}
    fma = by_name["fp32_fma"]
    assert [port["name"] for port in fma["ports"]] == (
        ["clk", "rst", "i_valid", "i_a", "i_b", "i_c", "o_valid", "o_z", "o_flags"]
    )
    assert fma["latency"] >= 1
    text = cli("--list").stdout
    assert all(name in text for name in GENERATORS)


@pytest.mark.parametrize("name", BLOCKS)
def test_verilog_has_the_listed_ports_and_lints(written, name):
    path = written(name)
    listed = {(p["name"], p["direction"], p["width"]) for p in describe(name)["ports"]}
    assert _ports(path.read_text(), name) == listed
    lint = subprocess.run(
        [verilator_root() / "bin" / "verilator_bin", "--lint-only", "-Wno-fatal", *WAIVED,
         "--top-module", name, path],
        env=tool_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (lint.returncode, lint.stderr) == (0, "")
    instances = re.findall(r"^  (?:adam|axpby|general|smartssd)_fu \w+ \($", path.read_text(), re.M)
    assert len(instances) == UNIT_INSTANCES.get(name, 0)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_combinational_block_waits_for_something(written, name):
    text = written(name).read_text()
    bodies = combinational_blocks(text)
    assert len(bodies) == text.count("always @*") > 0
    assert not list(filter(blind, bodies))
    assert all(body.startswith(r"    if (\$start ) begin end") for body in bodies)


@pytest.mark.parametrize("name", BLOCKS)
def test_outputs_are_known_from_reset_on(written, tmp_path, name):
    cycles = 80 if name in SLOW_TO_ELABORATE else 400
    bench = tmp_path / "bench.v"
    ports = [(p["name"], p["direction"], p["width"]) for p in describe(name)["ports"]]
    bench.write_text(output_bench(name, ports, cycles))
    outputs = sum(direction == "output" for _, direction, _ in ports)
    for standard in STANDARDS:
        said = simulate([bench, written(name)], "bench", tmp_path, standard)
        looked, unknown = map(int, re.search(r"looked (\d+) unknown (\d+)", said).groups())
        print(f"{name}, {standard}: {looked} values of {outputs} outputs")
        assert unknown == 0, said
        assert looked >= cycles


def test_the_list_may_be_of_one_block(cli):
    text = cli("--list", "fp32_fma", "--depth", "5").stdout
    lines = text.splitlines()
    assert lines[0].split()[:3] == ["fp32_fma", "5", "cycles"]
    options = [line.split()[0] for line in lines[2:] if line.startswith("  --")]
    assert options == ["--depth", "--flags"]
    assert len(lines) == 2 + 2 * len(options)
    assert [row["name"] for row in json.loads(cli("fp32_add", "--json").stdout)] == ["fp32_add"]


def test_depth_and_no_flags(cli, tmp_path):
    path = tmp_path / "unit.v"
    assert cli("fp32_add", "-o", path, "--depth", 9, "--no-flags").exit_code == 0
    assert "o_flags" not in path.read_text()
    assert describe("fp32_add", depth=9, flags=False)["latency"] == 9


def test_a_block_takes_the_options_of_its_configuration(cli, tmp_path):
    path = tmp_path / "kernel.v"
    arguments = "--lanes 4 --functional-units=2 --block-bytes 512 --rules sgd --no-scan"
    assert cli("adam_kernel", "-o", path, *arguments.split()).exit_code == 0
    text = path.read_text()
    beat = {(name, width) for name, _, width in _ports(text, "adam_kernel")}
    assert ("m_axi__rdata", 32 * 4) in beat
    assert len(re.findall(r"^  adam_fu \w+ \($", text, re.M)) == 2
    assert ("i_v", 32) not in {(name, width) for name, _, width in _ports(text, "adam_fu")}


def test_verilog_goes_to_standard_output_and_repeats(cli):
    first, second = cli("fp32_to_bf16").stdout, cli("fp32_to_bf16").stdout
    assert "module fp32_to_bf16(" in first
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fp32_foo"], "no 'fp32_foo'; there are fp32_add"),
        (["fp32_add", "--depth", 0], "integer from 1 to 256, not 0"),
        (["fp32_add", "--depth", 257], "integer from 1 to 256, not 257"),
        (["fp32_add", "--depth", "x"], "option depth='x': must be a whole number"),
        (["fp32_add", "--depth"], "option depth='': a value must follow"),
        (["fp32_add", "--depth", 3, "--depth=4"], "option depth='4': is given twice"),
        (["adam_fu", "--depth", 3], "option depth='3': there is no such option; valid: lanes"),
        (["adam_kernel", "--lanes", 3], "lanes must be one of (1, 2, 4, 8, 16), not 3"),
        (["adam_kernel", "--order", "fast"], "no such choice; valid: default, paper"),
        (["fp32_add", "-o", "/dev/null/x.v"], "cannot write /dev/null/x.v"),
        ([], "give the name of a block"),
        (["--list", "nosuch"], "no 'nosuch'; there are fp32_add"),
        (["--json", "nosuch"], "no 'nosuch'; there are fp32_add"),
        (["--list", "adam_fu", "--depth", 3], "option depth='3': there is no such option"),
        (["--list", "--no-flags"], "no '--no-flags'"),
        (["--list", "-o", "x.txt"], "--output is for the Verilog"),
    ],
)
def test_wrong_arguments_are_named(cli, arguments, message):
    result = cli(*arguments)
    assert result.exit_code == 2
    text = re.sub(r"[\s│]+", " ", result.output)
    assert message in text


OTHERS = {
    "alus": 4,
    "chunks_ahead": 3,
    "compression": ("fused",),
    "block_bytes": 1024,
    "chunk_bytes": 1024,
    "depth": 9,
    "exact": ("fp32",),
    "flags": False,
    "functional_units": 2,
    "gradient_formats": ("fp32", "bf16"),
    "copy_out_formats": ("bf16",),
    "groups": 1,
    "lanes": 8,
    "manifest": "{}",
    "mapping": "bankgroup-bank-row-column",
    "rules": ("sgd_momentum",),
    "vectors": 2,
    "address_width": 40,
    "windows": 8,
    "wire_formats": ("fp32", "fp16"),
    "data_width": 256,
}
"""Of options a value that is not their default; of others half of it, the opposite, another one of
their choices."""

KERNEL = {each.name for each in entries(UpdateKernelConfig)} - {"block_bytes"}
ELSEWHERE = {
    "axdimm_channel": KERNEL,
    "axdimm_module": {*GENERATORS["axdimm_channel"].options},
    "smartssd_card": KERNEL,
    "smartssd_pcie_card": {*GENERATORS["smartssd_card"].options},
    "smartssd_series7_card": {*GENERATORS["smartssd_card"].options},
    "coarse_device": {*GENERATORS["coarse_sync_core"].options},
}
"""Options of a block inside, which is asked about them."""

SMALL_CARD = {"lanes": 4, "functional_units": 1, "chunk_bytes": 512, "compression": ()}
SMALL = {
    "adam_kernel": {"lanes": 2, "functional_units": 1, "block_bytes": 512, "state_format": "bf16"},
    "dram_controller": {"ranks": 2},
    "axdimm_channel": {"functional_units": 1, "ranks": 2},
    "axdimm_module": {"functional_units": 1},
    "smartssd_card": SMALL_CARD,
    "smartssd_pcie_card": SMALL_CARD,
    "smartssd_series7_card": SMALL_CARD,
    "coarse_sync_core": {"alus": 8},
    "coarse_device": {"alus": 4, "groups": 2},
}
"""Configurations that are elaborated sooner than those by default; with the ranks that
`interleave` is about."""

ELABORATED_SOON = ("fp32_add", "axpby")
SAME = [name for name in GENERATORS if GENERATORS[name].config.__name__ == "UnitConfig"][1:]
"""Units with the options of the first one."""


def _texts(name, **options):
    """Of the block and of each module in it, when it is asked for: a unit takes seconds."""
    parts = {name: build(name, **options)} | modules(name, **options)
    return (netlist(part, each) for each, part in parts.items())


@pytest.mark.parametrize(
    "name",
    [
        name if name in ELABORATED_SOON else pytest.param(name, marks=pytest.mark.deep)
        for name in GENERATORS
        if name not in SAME and GENERATORS[name].options
    ],
)
def test_every_option_changes_the_block(name):
    generator, base, changed = GENERATORS[name], SMALL.get(name, {}), []
    as_it_is = list(_texts(name, **base))
    for each in entries(generator.config):
        if each.name in generator.options and each.name not in ELSEWHERE.get(name, ()):
            given = base.get(each.name, each.default)
            half = given // 2 if type(given) is int else not given
            choices = each.literals or each.option.choices
            other = next((value for value in choices if value != given), half)
            options = base | {each.name: OTHERS.get(each.name, other)}
            pairs = zip_longest(_texts(name, **options), as_it_is)
            assert any(other != text for other, text in pairs), options
            changed.append(each.name)
    print(f"{name}: changed by {', '.join(changed)}")
    assert set(changed) | ELSEWHERE.get(name, set()) >= set(generator.options)


def test_options_that_would_change_nothing_are_refused(cli):
    refused = 0
    for name, generator in GENERATORS.items():
        for each in {each.name for each in entries(generator.config)} - {*generator.options}:
            said = cli(name, f"--{each}", "8")
            assert said.exit_code == 2
            assert "changes nothing here" in re.sub(r"[\s│]+", " ", said.output)
            refused += 1
    assert refused >= 30, refused


def test_a_block_is_written_without_a_warning(tmp_path):
    """In a process of its own: Amaranth warns of unused components when they are collected."""
    words = [sys.executable, "-m", "nearstep", "rtl", "general_updater", "-o", tmp_path / "unit.v"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_unknown_options_are_errors():
    with pytest.raises(CodecError, match="option lanes='3': there is no such option; valid: depth"):
        build("fp32_add", lanes=3)
