"""A campaign: mutants of a component that its tests notice, and a test that notices none."""

import ast
import contextlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from amaranth import Module, Mux, Signal
from amaranth.back import rtlil

from .__main__ import BLOCKS, ROOT, SELECTOR, WIDTH, Campaign, Design, Mutant, recorded, score
from .python import changes

COUNT = 12
CAMPAIGN = """
import sys
from pathlib import Path
from tests.mutation.__main__ import campaign
table = {"modules": "^stream_slice", "tests": [sys.argv[1]]}
mutants = campaign(table, count=int(sys.argv[2]), seed=1, folder=Path(sys.argv[3]))
print(*(each.outcome for each in mutants))
"""
WEAK = """
from amaranth.hdl import unsigned
from nearstep_hw.stream.slice import StreamSlice
from nearstep_sim.bench.stream_bench import StreamBench

def test_nothing():
    assert StreamBench(StreamSlice(unsigned(32)), name="stream_slice", key="32").library
"""


PYTHON = """
def late(self, a: int = 3) -> bool:
    \"\"\"Docstring.\"\"\"
    if a < 1 and not self.open:
        raise ValueError(f"{a + 1}")
    self.a = a * 2
    self.flush()
    return a in zip((), strict=True)
"""


def outcomes(tests: object, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CAMPAIGN, str(tests), str(COUNT), str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1].split()


@pytest.mark.deep
def test_tests_of_a_component_notice_its_mutants_and_one_that_checks_nothing_none(
    tmp_path: Path,
) -> None:
    found = outcomes("tests/hw/stream/test_slice.py", tmp_path / "strong")
    (tmp_path / "test_weak.py").write_text(WEAK)
    missed = outcomes(tmp_path / "test_weak.py", tmp_path / "weak")
    assert len(found) == len(missed) == COUNT
    assert {*missed} == {"survived"}
    assert found.count("killed") >= COUNT - 1


@pytest.mark.parametrize("stalls", [False, True])
def test_of_a_pipeline_what_no_stage_can_have_is_proven_not_to_tell(
    stalls: bool, tmp_path: Path
) -> None:
    m = Module()
    a, held, z = (Signal(3, name=name) for name in ("a", "held", "z"))
    ready = Signal()
    with m.If(ready | (not stalls)):
        m.d.sync += [held.eq(a - (a == 7)), z.eq(Mux(held == 7, 1, held))]
    netlist = rtlil.convert(m, name="stages", ports=[a, z, ready])
    (cell,) = re.findall(r"cell \$mux (\S+)", netlist)
    where = f"-module stages -cell {cell} -port S -portbit 0 -src /hw/nearstep_hw/fp/x.py:1"
    equal, other = (
        Mutant(1, f"mutate -ctrl {SELECTOR} {WIDTH} 1 -mode {mode} {where}")
        for mode in ("const0", "const1")
    )
    running = ["ready"] * stalls
    pipeline = Design("^stages$", 2, 1, tmp_path, flushed=2, running=running, netlist=netlist)
    assert pipeline.is_equivalent(equal)
    assert not pipeline.is_equivalent(other)
    if stalls:
        pipeline.running = ()
    else:
        pipeline.flushed = 1  # the last stage is not replaced yet
    assert not pipeline.is_equivalent(equal)


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_what_no_output_reads_does_not_tell(levels: int, tmp_path: Path) -> None:
    inner = Module()
    a, z, count = Signal(3), Signal(2), Signal(3)
    inner.d.sync += count.eq(a)
    inner.d.comb += z.eq(count - 1)
    m = inner
    for level in range(levels):
        m, within = Module(), m
        m.submodules[f"at{level}"] = within
    netlist = rtlil.convert(m, name="counts", ports=[a, z])
    (cell,) = re.findall(r"cell \$dff (\S+)", netlist)
    name = re.findall(r"^module \\(\S+)", netlist, flags=re.MULTILINE)[-1]
    design = Design("^counts", 2, 1, tmp_path, netlist=netlist)
    command = f"mutate -ctrl {SELECTOR} {WIDTH} 1 -mode inv -module {name} -cell {cell} -port D"
    unread, read = (Mutant(1, f"{command} -portbit {bit}") for bit in (2, 1))
    assert design.is_equivalent(unread)
    assert not design.is_equivalent(read)


def test_a_proof_that_takes_too_long_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = Module()
    a, z = Signal(), Signal()
    m.d.comb += z.eq(~a & ~a)
    netlist = rtlil.convert(m, name="both", ports=[a, z])
    cell = re.findall(r"cell \$and (\S+)", netlist)[0]
    where = f"-module both -cell {cell} -port A -portbit 0"
    equal = Mutant(1, f"mutate -ctrl {SELECTOR} {WIDTH} 1 -mode const1 {where}")
    design = Design("^both$", 1, 1, tmp_path, netlist=netlist)
    assert design.is_equivalent(equal)
    monkeypatch.setattr("tests.mutation.__main__.PROOF_S", 0)
    assert not design.is_equivalent(equal)


def test_a_campaign_that_was_stopped_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def run(_: Campaign, session: object, number: int, took: object) -> tuple[str, str]:
        ran.append(number)
        if ran == [1, 2, 3]:
            raise KeyboardInterrupt
        return ("", "") if number == 2 else ("killed", "test")

    main = "tests.mutation.__main__"
    monkeypatch.setattr(f"{main}.Campaign._run", run)
    monkeypatch.setattr(f"{main}.Design.is_equivalent", lambda *_: True)
    monkeypatch.setattr(f"{main}.identity", lambda: "a")
    record = tmp_path / "record"
    for earlier, how in enumerate([pytest.raises(KeyboardInterrupt), contextlib.nullcontext()]):
        mutants = [Mutant(number, str(number)) for number in range(1, 5)]
        assert recorded(record, "tests") == 2 * earlier
        with how:
            Campaign(Design("", 4, 1, tmp_path, mutants=mutants), record).judge(SimpleNamespace())
    assert ran == [1, 2, 3, 3, 4]
    assert [each.outcome for each in mutants] == ["killed", "equivalent", "killed", "killed"]
    record.write_text(record.read_text()[:-1])  # the last line was not written whole
    assert recorded(record, "tests") == 3
    assert recorded(record, "other tests") == 0
    monkeypatch.setattr(f"{main}.identity", lambda: "b")
    assert recorded(record, "other tests") == 0


def test_changes_of_a_function() -> None:
    made = []
    for number, (line, label, _) in enumerate(changes(ast.parse(PYTHON))):
        tree = ast.parse(PYTHON)
        [*changes(tree)][number][2]()
        text = ast.unparse(ast.fix_missing_locations(tree))
        made.append((line, label, text))
    assert [(line, label) for line, label, _ in made] == [
        (6, "without `self.a = a * 2`"),
        (7, "without `self.flush()`"),
        (4, "not"),
        (5, "without `raise ValueError(f'{a + 1}')`"),
        (4, "And to Or"),
        (4, "Lt to LtE"),
        (4, "1 to 2"),
        (6, "Mult to FloorDiv"),
        (6, "2 to 3"),
        (8, "In to NotIn"),
    ]
    assert len({text for *_, text in made} | {ast.unparse(ast.parse(PYTHON))}) == len(made) + 1


def test_equivalent_mutants_count_for_nothing() -> None:
    each = [*["killed"] * 6, "hung", "survived", "equivalent", "equivalent"]
    counts, share = score([Mutant(n, "", outcome) for n, outcome in enumerate(each)])
    assert (counts["killed"], share) == (6, 7 / 8)


def test_a_block_has_tests_that_exist() -> None:
    tests = [re.split(r"::|\[", test) for table in BLOCKS.values() for test in table["tests"]]
    assert len(tests) >= len(BLOCKS) >= 6
    for file, *function in tests:
        text = (ROOT / file).read_text("utf-8")
        assert not function or f"\ndef {function[0]}(" in text, (file, function)
