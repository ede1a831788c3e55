"""Options of emulated pools of COARSE devices, as they stand in a device name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from nearstep.backends.options import Family, Option, Variant, check_bounds
from nearstep_sim.models.link.faults import LinkOptionError, LinkOptions
from nearstep_sim.updater.options import names
from nearstep_sim.verilate.options import Memory, SimulationOptions
from nearstep_spec.coarse.config import MAX_DEVICES, WIRE_FORMATS, CoarseConfig

Chance = Annotated[float, Option(meaning="chance of it for every frame on a link", low=0, high=1)]


@dataclass(frozen=True, kw_only=True)
class CoarseOptions:
    """Options that every emulated pool of COARSE devices has."""

    devices: Annotated[
        int, Option(meaning="memory devices, joined to a ring", low=2, high=MAX_DEVICES)
    ] = 4
    groups: Annotated[
        int,
        Option(
            meaning="sync cores of a device, each of a ring of its own",
            allowed="a power of two from 1 to 4",
        ),
    ] = CoarseConfig.groups
    alus: Annotated[
        int, Option(meaning="fp32 lanes of a sync core", allowed="a power of two from 4 to 16")
    ] = CoarseConfig.alus
    entry_phits: Annotated[
        int,
        Option(
            meaning="payload of an entry, in phits of 16 bytes",
            allowed="a power of two from 4 to 256",
        ),
    ] = CoarseConfig.entry_phits
    buffer_entries: Annotated[
        int,
        Option(
            meaning="entries of each RecvBuf and SendBuf", allowed="a power of two from 2 to 32"
        ),
    ] = CoarseConfig.buffer_entries
    local_beats: Annotated[
        int,
        Option(
            meaning="beats of each LocalBuf, 64 bytes each",
            allowed="a power of two from 32 to 1024",
        ),
    ] = CoarseConfig.local_beats
    chunks_ahead: Annotated[
        int,
        Option(
            meaning="chunks that take turns, so that a link need not wait",
            allowed="1 to 2 buffer_entries - 2",
        ),
    ] = CoarseConfig.chunks_ahead
    queue_jobs: Annotated[
        int,
        Option(meaning="jobs that wait for each sync core", allowed="a power of two from 1 to 256"),
    ] = CoarseConfig.queue_jobs
    snapshot_pages: Annotated[
        int,
        Option(
            meaning="most pages of a snapshot, 4 KiB each, on each device",
            allowed="a power of two from 1 to 2**20",
        ),
    ] = CoarseConfig.snapshot_pages
    memory_bytes: Annotated[
        int,
        Option(
            meaning="of each device; the host's is taken as it is used",
            allowed="a power of two from 4096 to 2**40",
        ),
    ] = 16 << 20
    wire_formats: Annotated[
        str,
        Option(
            meaning="formats of elements on a link",
            choices=tuple(WIRE_FORMATS),
            several=True,
            allowed="fp32 the first",
        ),
    ] = ",".join(CoarseConfig.wire_formats)

    def __post_init__(self) -> None:
        check_bounds(self)
        self.config()

    def config(self) -> CoarseConfig:
        """Configuration of each device.

        Raises
        ------
        nearstep_spec.updater.config.ConfigError
        """
        return CoarseConfig(
            groups=self.groups,
            alus=self.alus,
            entry_phits=self.entry_phits,
            buffer_entries=self.buffer_entries,
            local_beats=self.local_beats,
            chunks_ahead=self.chunks_ahead,
            queue_jobs=self.queue_jobs,
            snapshot_pages=self.snapshot_pages,
            memory_bytes=self.memory_bytes,
            wire_formats=names(self.wire_formats),
        )


@dataclass(frozen=True, kw_only=True)
class VerilatedPoolOptions(SimulationOptions, CoarseOptions):
    """Options of ``sim:coarse``, those of :class:`CoarseOptions` among them.

    ``memory``, ``latency``, ``stall`` and ``seed`` are of the local DRAM of each device.
    """

    memory: Memory = "halfduplex"
    fu: Annotated[Literal["rtl"], Option(meaning="units: Verilated")] = "rtl"
    window: Annotated[
        Literal["rtl", "direct"],
        Option(
            meaning="the host's loads and stores; rtl: through the device's window, in its cycles; "
            "direct: behind its back, at once, unseen by a snapshot"
        ),
    ] = "rtl"
    link_latency: Annotated[
        int, Option(meaning="cycles from one end of a link to the other", low=1, high=1 << 20)
    ] = 100
    link_interval: Annotated[
        int,
        Option(meaning="cycles for each phit of 16 bytes, in each direction", low=1, high=1 << 10),
    ] = 1
    drop: Chance = 0.0
    duplicate: Chance = 0.0
    reorder: Chance = 0.0
    corrupt: Chance = 0.0

    def __post_init__(self) -> None:
        CoarseOptions.__post_init__(self)
        SimulationOptions.__post_init__(self)
        self.link()

    def link(self) -> LinkOptions:
        """Options of every link.

        Raises
        ------
        ValueError
        """
        try:
            return LinkOptions(
                latency=self.link_latency,
                interval=self.link_interval,
                seed=self.seed,
                drop=self.drop,
                duplicate=self.duplicate,
                reorder=self.reorder,
                corrupt=self.corrupt,
            )
        except LinkOptionError as error:
            if error.name not in ("latency", "interval"):
                raise
            raise ValueError(f"link_{error}") from None


GOLDEN = Family(
    "golden:coarse",
    (
        Variant(
            options=CoarseOptions,
            opens="nearstep_sim.coarse.golden:GoldenPool",
            summary="a pool of devices, without a clock",
        ),
    ),
)
SIM = Family(
    "sim:coarse",
    (
        Variant(
            options=VerilatedPoolOptions,
            opens="nearstep_sim.coarse.pool:PoolBackend",
            summary="the RTL of a pool of devices",
        ),
    ),
)
