"""Plans of bitstreams: pins, clocks, and the same bytes each time."""

import re
from collections.abc import Mapping
from itertools import product

import pytest

from nearstep_hw.boards.clock import ClockError, Ecp5Pll, PllClock
from nearstep_hw.boards.plan import plan, platform_of
from nearstep_hw.boards.tool_options import ROUTING, SYNTHESIS
from nearstep_hw.boards.top import BoardTop
from nearstep_hw.verilog import netlist
from nearstep_spec.boards.board import BOARDS
from nearstep_spec.boards.coarse_board import CoarseBoardConfig
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.coarse.config import PORTS
from nearstep_spec.coarse.lanes import PINS
from nearstep_spec.codec import from_text

SMALL = {"memory": "blockram", "rules": "sgd", "copy_out_formats": "", "compression": ""}
SITES = {
    "ulx3s_85f": {"clk25_0__io": "G2", "uart_0__rx__io": "M1", "uart_0__tx__io": "L4"},
    "orangecrab_85f": {"clk_0__io": "A9", "uart_0__rx__io": "N17", "uart_0__tx__io": "M18"},
}


def text_of(content: str | bytes) -> str:
    return content if isinstance(content, str) else content.decode()


@pytest.mark.deep
@pytest.mark.parametrize("board", ["ulx3s_85f", "orangecrab_85f"])
def test_plan_has_the_pins_the_simulated_top_and_no_folder_of_this_machine(board: str) -> None:
    check_plan(from_text(BoardConfig, {"board": board, **SMALL}), SITES[board])


LINK_SITES = {
    "link_0__o__io[0]": "B11",  # GP0: the strobe out
    "link_0__i__io[0]": "C11",  # GN0: in
    "link_0__o__io[9]": "A2",  # GP9: the highest bit of data
    "link_1__o__io[0]": "H18",  # GP18
    "link_1__i__io[9]": "E13",  # GN27
}
"""Of the header of an ULX3S, constraints/ulx3s_v20.lpf of the board's makers."""


@pytest.mark.deep
def test_plan_of_a_coarse_board_has_the_pins_of_its_links() -> None:
    config = CoarseBoardConfig()
    lpf = check_plan(config, SITES["ulx3s_85f"] | LINK_SITES)
    pads = re.findall(r'IOBUF PORT "link_(\d)__([io])__io\[(\d)\]" (.*);', lpf)
    assert len(set(pads)) == 2 * PORTS * PINS
    for _, way, _, settings in pads:
        assert "IO_TYPE=LVCMOS33" in settings
        assert ("PULLMODE=DOWN" in settings) == (way == "i")
    sites = re.findall(r'LOCATE COMP "link_\S+" SITE "(\w+)";', lpf)
    assert len(set(sites)) == 2 * PORTS * PINS
    assert plan(config).files == plan(config).files


def check_plan(config: BoardConfig | CoarseBoardConfig, sites: Mapping[str, str]) -> str:
    """Whether the plan of a board is what is simulated, with these pins, and the same wherever it
    is made; its constraints."""
    files = {name: text_of(content) for name, content in plan(config, seed=7).files.items()}
    for port, site in sites.items():
        assert f'LOCATE COMP "{port}" SITE "{site}";' in files["top.lpf"]
    assert re.search(
        rf'^FREQUENCY PORT "\w+" {config.described.input_hz:.1f} HZ;$', files["top.lpf"], re.M
    )
    assert "--seed 7 " in files["build_top.sh"]
    assert ROUTING in files["build_top.sh"]
    assert f"synth_ecp5 {SYNTHESIS} " in files["top.ys"]
    for name, text in files.items():
        assert not re.search(r'"/[^/*]', text), name
    assert "nearstep_hw/boards/ecp5.py" in files["top.il"]

    built = modules(files["top.il"], "top.top")
    simulated = modules(netlist(BoardTop(config), "board_top"), "board_top")
    assert len(built) > 50
    assert built.keys() == simulated.keys()
    assert [name for name in built if built[name] != simulated[name]] == []
    return files["top.lpf"]


def modules(text: str, top: str) -> dict[str, list[str]]:
    """Lines of each module of RTLIL below `top`, in one order, without the numbers that Amaranth
    gives to names and ports as it comes to them, and without places in sources."""
    found = {}
    for name, body in re.findall(r"^module \\(\S+)\n(.*?)^end$", text, re.M | re.S):
        if name != top and not name.startswith(f"{top}."):
            continue
        body = re.sub(r"^ *attribute \\src .*\n", "", body, flags=re.M)
        body = re.sub(r"\$\d+", "", body).replace(f"\\{top}", "\\@")
        body = re.sub(r"\b(input|output|inout) \d+ ", "", body)
        found[name.removeprefix(top)] = sorted(
            line.strip() for line in body.splitlines() if line.strip()
        )
    return found


@pytest.mark.deep
def test_plan_is_the_same_bytes_twice_and_each_has_its_memory_controller() -> None:
    checks = 0
    for board, memory in product(BOARDS, ("dram", "blockram")):
        config = from_text(BoardConfig, {"board": board, **SMALL, "memory": memory})
        first, again = plan(config).files, plan(config).files
        assert first == again
        assert ("litedram_core.v" in first) == (memory == "dram")
        checks += 1
    assert checks == 4


def test_pll_that_cannot_be_made() -> None:
    for clocks, what in (
        ((PllClock(hz=97_000_001),), "97000001 Hz at 0 degrees of 25000000 Hz"),
        ((PllClock(hz=100_000_000), PllClock(hz=100_000_000, phase=1)), "at 1 degrees"),
        ((PllClock(hz=100_000_000, phase=90),), "the first at 0"),
    ):
        with pytest.raises(ClockError, match=what):
            Ecp5Pll(input_hz=25_000_000, clocks=clocks)


def test_every_clock_of_a_pll_is_what_its_dividers_make() -> None:
    checks = 0
    for board in BOARDS.values():
        input_hz = int(platform_of(board).default_clk_frequency)
        for clock, phase in product(board.clocks, (0, 90, 180, 270)):
            clocks = (PllClock(hz=clock.hz), PllClock(hz=clock.hz, phase=phase))
            pll = Ecp5Pll(input_hz=input_hz, clocks=clocks)
            oscillator = input_hz // pll.input_divider * pll.feedback_divider * pll.dividers[0]
            assert 400e6 <= oscillator <= 800e6
            assert [oscillator / each for each in pll.dividers] == [clock.hz] * 2
            checks += 1
    assert checks == 4 * sum(len(board.clocks) for board in BOARDS.values())
