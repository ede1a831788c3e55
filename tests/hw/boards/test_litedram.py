"""LiteDRAM's cores: the same bytes each time, and what is said where they cannot be made."""

import importlib.util
import json
import re

import pytest

from nearstep_hw.boards import litedram
from nearstep_hw.boards.litedram import PADS, LiteDramError, core_of
from nearstep_spec.boards.board import BOARDS

WIDTHS = {"data_width": 64, "id_width": 5}


@pytest.mark.parametrize("board", list(BOARDS))
def test_a_core_has_its_pads_and_no_trace_of_when_it_was_made(board: str) -> None:
    core = core_of(BOARDS[board], **WIDTHS)
    header = core.verilog[: core.verilog.index(");")]
    kind = BOARDS[board].memory
    prefix = {"sdr": "sdram", "ddr3": "ddram"}[kind]
    ports = set(re.findall(r"\b(\w+)(?:,|$)", header, re.M))
    assert {f"{prefix}_{pad}" for pad in PADS[kind]} <= ports
    assert not re.search(r"20\d\d-\d\d|/tmp|/home|sha1", core.verilog)
    known = {address for address, _ in core.registers.values()}
    assert {step.address for step in (*core.steps, *core.last_steps)} <= known
    assert len(core.steps) > 20


def test_an_sdram_is_refreshed_no_later_than_it_must() -> None:
    board = BOARDS["ulx3s_85f"]
    core = core_of(board, **WIDTHS)
    assert core.timing["tREFI"] / board.system_hz <= 64e-3 / 8192
    assert core.cas_latency == 2
    modes = [
        step.value
        for before, step in zip(core.steps, core.steps[1:], strict=False)
        if step.address == core.registers["sdram_dfii_pi0_address"][0] and step.value & 0x3FF
    ]
    assert modes == [0x20]  # the only load of the mode register has no reserved bit


@pytest.mark.deep
def test_a_core_is_the_same_bytes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(litedram, "_core", asked.append)
    for board in BOARDS.values():
        core_of(board, **WIDTHS)
    assert len(asked) == len(BOARDS)
    for request in asked:
        assert litedram._generated(request) == litedram._generated(request)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "litex" else found(name)
    )
    litedram._core.cache_clear()
    with pytest.raises(
        LiteDramError, match=r"litex cannot be found: pip install 'nearstep\[fpga\]'"
    ):
        core_of(BOARDS["ulx3s_85f"], **WIDTHS)


def test_a_generator_that_fails_says_why() -> None:
    request = json.dumps(
        {"module": "NO_SUCH_CHIP", "phy": "GENSDRPHY", "options": {}, "late_reads": 0}
    )
    with pytest.raises(LiteDramError, match="NO_SUCH_CHIP"):
        litedram._generated(request)
