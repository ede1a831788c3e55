"""Builds the card with its PCIe endpoint; the host's driver uses it below a root complex."""

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from amaranth.lib.wiring import Component

from nearstep_hw.boards.nitefury import CARD, project
from nearstep_hw.smartssd.pcie_card import PcieCard
from nearstep_hw.smartssd.series7_card import Series7Card
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_pcie import STALLS
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.smartssd.library import PCIE_TOP, shipped_verilog
from nearstep_sim.smartssd.library import TOP as PORTS_TOP
from nearstep_sim.verilate.build import verilog_of
from nearstep_spec.boards.nitefury import UPDATER_OPTIONS as NITEFURY_OPTIONS
from nearstep_spec.boards.nitefury import NitefuryConfig
from nearstep_spec.smartssd.config import UPDATER_OPTIONS, SmartssdConfig
from nearstep_spec.updater.config import UpdateKernelConfig

SERIES7_TOP = "smartssd_series7_card"
TOP = "pcie_card"
HERE = Path(__file__).parent
KERNEL = {
    "lanes": 4,
    "functional_units": 1,
    "block_bytes": 512,
    "address_width": 17,
    "scan": True,
    "compression": ("fused",),
    "windows": 5,
}
SMALL_UPDATER = {
    "rules": ("adam", "sgd", "sgd_momentum", "adagrad"),
    "compression": ("fused", "scatter"),
    "windows": 8,
}
"""As of the card that is shipped."""
UNIT = "smartssd_fu"
CHECKS = re.compile(r"(\w+): (\d+) checks")
BENCHES = {
    "updates_are_those_of_the_golden_rule/mode=free",
    "updates_are_those_of_the_golden_rule/mode=source",
    "updates_are_those_of_the_golden_rule/mode=sink",
    "updates_are_those_of_the_golden_rule/mode=both",
    "pairs_and_scans",
    "a_run_that_fails_interrupts_too",
    "a_peer_moves_subgroups_while_runs_go_on/mode=free",
    "a_peer_moves_subgroups_while_runs_go_on/mode=both",
    "nothing_is_beyond_the_memory",
}
OTHER_MODES = {f"updates_are_those_of_the_golden_rule/mode={mode}" for mode in ("source", "sink")}
OTHER_MODES |= {"a_peer_moves_subgroups_while_runs_go_on/mode=free"}
SHORTEST = {"pairs_and_scans", "a_run_that_fails_interrupts_too"}


def small(**kernel: object) -> SmartssdConfig:
    """A card of few bytes, so that a bench can look at all of its memory."""
    return SmartssdConfig(
        kernel=UpdateKernelConfig(**{**KERNEL, **kernel}),
        memory_bytes=1 << 16,
        subgroup_elements=1024,
    )


def bench(
    *,
    seed: int,
    width: int = 128,
    crossed: bool = False,
    series7: bool = False,
    benches: Collection[str] = BENCHES,
    **kernel: object,
) -> int:
    """Run benches on a card; the number of checks that were made."""
    config = small(**kernel)

    def card() -> Component:
        if series7:
            return Series7Card(config, crossed=crossed, bar_bytes=2 * config.memory_bytes)
        return PcieCard(config, width=width, crossed=crossed)

    verilog = verilog_of(
        f"{TOP} {width} {crossed} {series7} {config!r}", lambda: to_verilog(card(), TOP)
    )
    options: dict[str, object] = {"kernel": KERNEL | kernel}
    options |= {"width": width, "crossed": crossed, "series7": series7}
    return run(TOP, verilog, config, options, seed=seed, benches=benches)


def run(
    top: str,
    verilog: Path,
    config: SmartssdConfig,
    options: dict[str, object],
    *,
    seed: int,
    benches: Collection[str],
    blocks: Sequence[str] = (),
) -> int:
    """Run benches on Verilog of a card; the number of checks that were made."""
    without = {"ports": False, "width": 128, "crossed": False, "series7": False}
    options = (
        without
        | options
        | {
            "memory_bytes": config.memory_bytes,
            "subgroup_elements": config.subgroup_elements,
        }
    )
    result = run_cocotb(
        top=top,
        verilog=verilog,
        test_module=HERE / "cocotb_pcie_card.py",
        testcase=",".join(sorted(benches)),
        env={"NEARSTEP_CONFIG": json.dumps(options), "NEARSTEP_SEED": str(seed)},
        seed=seed,
        blocks=blocks,
    )
    made = {name: int(count) for name, count in CHECKS.findall(result.log.read_text())}
    print(f"seed {seed}: {len(result.tests)} benches passed, checks {made}")
    assert set(result.tests) == set(benches)
    assert len(made) == len(benches)
    assert all(made.values())
    return sum(made.values())


@pytest.mark.cocotb
@pytest.mark.deep
def test_a_driver_uses_the_card_below_a_root_complex():
    assert bench(seed=1, benches=SHORTEST) > 0


@pytest.mark.cocotb
@pytest.mark.deep
def test_the_driver_runs_on_the_card_below_a_root_complex():
    assert bench(seed=1) > 0


@pytest.mark.cocotb
@pytest.mark.deep
@pytest.mark.parametrize(
    "options",
    [
        {"lanes": 16},
        {"crossed": True},
        {"width": 256, "lanes": 16, "functional_units": 2},
        {"width": 512, "lanes": 16, "crossed": True},
        {"width": 64, "lanes": 2},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_other_shapes(options):
    assert bench(seed=2, benches=BENCHES - OTHER_MODES, **options) > 0


@pytest.mark.cocotb
@pytest.mark.deep
@pytest.mark.parametrize("crossed", [False, True], ids=["one_clock", "crossed"])
def test_the_driver_runs_on_a_card_behind_the_7_series_block(crossed):
    assert bench(seed=3, series7=True, crossed=crossed) > 0


SHIPPED = {f"every_rule_with_whole_gradients_and_with_pairs/mode={mode}" for mode in STALLS}


@pytest.mark.cocotb
@pytest.mark.deep
@pytest.mark.parametrize("top", [PORTS_TOP, PCIE_TOP, SERIES7_TOP])
def test_the_driver_runs_on_the_card_as_it_is_shipped(top):
    """What `nearstep rtl` writes: 16 lanes, four rules, both forms of pairs."""
    config = SmartssdConfig()
    options = {
        "kernel": dict(UPDATER_OPTIONS),
        "ports": top == PORTS_TOP,
        "series7": top == SERIES7_TOP,
    }
    verilog = shipped_verilog(top, config)
    made = run(top, verilog, config, options, seed=4, benches=SHIPPED, blocks=[UNIT])
    assert config.kernel.lanes == config.kernel.units == 16
    assert made > 12 * 4 * 333


@pytest.mark.cocotb
@pytest.mark.deep
def test_the_driver_runs_on_the_card_of_the_nitefury_project():
    """As the project has it: Adam with one unit, whole gradients, crossed clocks."""
    config = NitefuryConfig().card
    verilog = verilog_of("card of nitefury", lambda: project()[f"{CARD}.v"])
    options = {"kernel": dict(NITEFURY_OPTIONS), "series7": True, "crossed": True}
    benches = {f"updates_are_those_of_the_golden_rule/mode={mode}" for mode in STALLS}
    assert run(CARD, verilog, config, options, seed=7, benches=benches, blocks=[UNIT]) > 0


@pytest.mark.cocotb
@pytest.mark.deep
def test_a_small_card_at_its_ports():
    """As `nearstep rtl smartssd_card` writes it with fewer lanes and one unit."""
    config = small(**SMALL_UPDATER)
    options = {"kernel": KERNEL | SMALL_UPDATER, "ports": True}
    verilog = shipped_verilog(PORTS_TOP, config)
    assert run(PORTS_TOP, verilog, config, options, seed=6, benches=SHIPPED) > 0


@pytest.mark.cocotb
@pytest.mark.deep
def test_every_rule_and_pairs_on_a_small_card():
    """The same bench, where it takes a minute."""
    assert bench(seed=5, benches=SHIPPED, **SMALL_UPDATER) > 0


def test_streams_wider_than_a_beat_of_memory_are_refused():
    with pytest.raises(ValueError, match="at most the 64 bits of a beat of memory, not 128"):
        PcieCard(small(lanes=2))
    with pytest.raises(ValueError, match="must be one of"):
        PcieCard(small(lanes=16), width=96)
