"""Options of the emulated devices, as they stand in a device name.

What an option means, and what it may be, stands beside its type; ``nearstep devices`` and the
errors say it from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Literal

from nearstep.backends.options import Family, Option, Variant, check_bounds
from nearstep_sim.link.faults import LinkOptionError, LinkOptions
from nearstep_spec.axdimm.config import CHANNELS, DimmConfig
from nearstep_spec.coarse.config import MAX_DEVICES, WIRE_FORMATS, CoarseConfig
from nearstep_spec.dram.address import DEFAULT_MAPPING, MAPPINGS
from nearstep_spec.rule.rules import RULES
from nearstep_spec.smartssd.config import SUBGROUPS_HELD, UPDATER, SmartssdConfig
from nearstep_spec.updater.config import (
    COMPRESSIONS,
    COPY_OUT_FORMATS,
    GRADIENT_FORMATS,
    LANES,
    AdamKernelConfig,
    ConfigError,
)

DDR4 = "ddr4-1600"
"""The memory of a whole DIMM: channels of DDR4, each with a mode arbiter."""

BlockBytes = Annotated[
    int,
    Option(
        meaning="bytes loaded from one array before the next has its turn",
        allowed="a power of two from eight beats (512 with 16 lanes) to 1MiB",
    ),
]
Rules = Annotated[
    str, Option(meaning="update rules of the kernel", choices=("adam", *RULES), several=True)
]
GradientFormats = Annotated[
    str,
    Option(
        meaning="formats that gradients may have",
        choices=GRADIENT_FORMATS,
        several=True,
        allowed="fp32 among them",
    ),
]
GradientScale = Annotated[
    bool, Option(meaning="whether the kernel can multiply gradients by a factor")
]
CopyOutFormats = Annotated[
    str,
    Option(
        meaning="formats of a copy of the updated parameters",
        choices=COPY_OUT_FORMATS,
        several=True,
        unset="none",
    ),
]
Scan = Annotated[
    bool, Option(meaning="whether the kernel can search gradients for infinities, and sum them")
]
Compression = Annotated[
    str,
    Option(
        meaning="forms of gradients as pairs of index and value; needs two lanes",
        choices=COMPRESSIONS,
        several=True,
        unset="none",
    ),
]
Channels = Annotated[int, Option(meaning="channels, each with its kernel", choices=CHANNELS)]
Units = Annotated[
    Literal["rtl", "native"],
    Option(
        meaning="functional units; rtl: Verilated; native: C++ of equal bits and cycles, faster"
    ),
]
Engine = Annotated[
    Literal["cpp", "numpy"],
    Option(meaning="arithmetic: cpp is compiled on first use, numpy is slower"),
]
Seed = Annotated[int, Option(meaning="of stalls and faults", low=0, high=(1 << 63) - 1)]
Trace = Annotated[
    str | None,
    Option(meaning="VCD of every signal; large and slow", allowed="a file to write", unset="none"),
]
Memory = Annotated[
    Literal["ideal", "halfduplex"],
    Option(
        meaning="ideal: a read and a write beat a cycle; halfduplex: one in all, 4 cycles to turn"
    ),
]
Chance = Annotated[float, Option(meaning="chance of it for every frame on a link", low=0, high=1)]


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Options that every emulated device with an update kernel has; families name its block."""

    lanes: Annotated[
        int,
        Option(meaning="fp32 elements of a memory beat", choices=LANES, allowed="16 on DDR4 DIMMs"),
    ] = 16
    functional_units: Annotated[
        int | None,
        Option(
            meaning="update units; a beat takes lanes / units cycles",
            allowed="a divisor of lanes",
            unset="lanes",
        ),
    ] = None
    order: Annotated[
        Literal["default", "paper"],
        Option(meaning="of Adam's arithmetic: torch's bits, or Algorithm 1 of the AXDIMM paper"),
    ] = "default"
    rules: Rules = "adam"
    gradient_formats: GradientFormats = "fp32"
    gradient_scale: GradientScale = False
    copy_out_formats: CopyOutFormats = ""
    scan: Scan = False
    compression: Compression = ""

    def kernel_of(self, block_bytes: int) -> AdamKernelConfig:
        """Configuration of a kernel with this block, and a window for each array of any run.

        Raises
        ------
        nearstep_spec.updater.config.ConfigError
        """
        config = AdamKernelConfig(
            lanes=self.lanes,
            functional_units=self.functional_units,
            block_bytes=block_bytes,
            order=self.order,
            rules=tuple(self.rules.split(",")),
            gradient_formats=tuple(self.gradient_formats.split(",")),
            gradient_scale=self.gradient_scale,
            copy_out_formats=_names(self.copy_out_formats),
            scan=self.scan,
            compression=_names(self.compression),
        )
        arrays = len(config.arrays) + bool(config.compression) + bool(config.copy_out_formats)
        return replace(config, windows=max(config.windows, arrays))


@dataclass(frozen=True, kw_only=True)
class AxdimmOptions(KernelOptions):
    """Options that every emulated AXDIMM device has, those of :class:`KernelOptions` among them."""

    block_bytes: BlockBytes = 16384
    memory_bytes: Annotated[
        int | None,
        Option(
            meaning="device memory, over all channels; the host's is taken as it is used",
            allowed="a multiple of 64 up to 16GiB",
            unset="all that the kernel addresses",
        ),
    ] = None

    def __post_init__(self) -> None:
        limit = 1 << self.config().address_width
        given = self.memory_bytes
        if given is not None and (not 0 < given <= limit or given % 64):
            raise ValueError(f"memory_bytes must be a multiple of 64 up to {limit}, not {given}")

    @property
    def capacity_bytes(self) -> int:
        """Size of the device memory."""
        return self.memory_bytes or 1 << self.config().address_width

    def config(self) -> AdamKernelConfig:
        """Configuration of the kernel.

        Raises
        ------
        nearstep_spec.updater.config.ConfigError
        """
        return self.kernel_of(self.block_bytes)


@dataclass(frozen=True, kw_only=True)
class GoldenOptions(AxdimmOptions):
    """Options of ``golden:axdimm``."""

    engine: Engine = "cpp"
    channels: Annotated[
        int | None,
        Option(
            meaning="channels of a DIMM, each with a mode arbiter and a part of the memory",
            choices=CHANNELS,
            unset="a kernel alone",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        dimm = self.dimm()
        if dimm is None:
            return
        share, over = divmod(self.capacity_bytes, dimm.channels)
        if over or share % 64 or share > dimm.memory_bytes:
            raise ValueError(
                f"memory_bytes must be channels times a multiple of 64 up to {dimm.memory_bytes}, "
                f"not {self.memory_bytes}"
            )

    @property
    def capacity_bytes(self) -> int:
        dimm = self.dimm()
        if self.memory_bytes is None and dimm is not None:
            return dimm.channels * dimm.memory_bytes
        return super().capacity_bytes

    def dimm(self) -> DimmConfig | None:
        """Configuration of the DIMM, if it is one.

        Raises
        ------
        nearstep_spec.updater.config.ConfigError
        """
        if self.channels is None:
            return None
        return DimmConfig(kernel=self.config(), channels=self.channels)


UPDATER_TEXT = {
    name: ",".join(getattr(UPDATER, name))
    for name in ("rules", "gradient_formats", "copy_out_formats", "compression")
}
"""What a card's kernel has, as options."""


@dataclass(frozen=True, kw_only=True)
class CardOptions(KernelOptions):
    """Options that every emulated SmartSSD has, those of :class:`KernelOptions` among them."""

    rules: Rules = UPDATER_TEXT["rules"]
    gradient_formats: GradientFormats = UPDATER_TEXT["gradient_formats"]
    gradient_scale: GradientScale = UPDATER.gradient_scale
    copy_out_formats: CopyOutFormats = UPDATER_TEXT["copy_out_formats"]
    scan: Scan = UPDATER.scan
    compression: Compression = UPDATER_TEXT["compression"]
    chunk_bytes: BlockBytes = UPDATER.block_bytes
    memory_bytes: Annotated[
        int,
        Option(
            meaning="DRAM of the card; the host's is taken as it is used",
            allowed="a power of two from 4096 to 16GiB that holds two subgroups",
        ),
    ] = SmartssdConfig.memory_bytes
    subgroup_elements: Annotated[
        int | None,
        Option(
            meaning="elements that are updated while as many others are moved",
            allowed="whole chunks",
            unset="2**20, or what fits",
        ),
    ] = None

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> SmartssdConfig:
        """Configuration of the card.

        Raises
        ------
        nearstep_spec.updater.config.ConfigError
        """
        try:
            kernel = replace(self.kernel_of(self.chunk_bytes), windows=UPDATER.windows)
        except ConfigError as error:
            text = str(error)
            if not text.startswith("block_bytes "):
                raise
            raise ConfigError(f"chunk_{text.removeprefix('block_')}") from None
        elements = self.subgroup_elements
        if elements is None:
            elements = SmartssdConfig.largest_subgroup(kernel, self.memory_bytes)
            if elements <= 0:
                least = SUBGROUPS_HELD * len(kernel.arrays) * self.chunk_bytes
                raise ConfigError(
                    f"memory_bytes must hold {SUBGROUPS_HELD} chunks of {self.chunk_bytes} bytes "
                    f"of each of {len(kernel.arrays)} arrays, {least}, not {self.memory_bytes}"
                )
        return SmartssdConfig(
            kernel=kernel, memory_bytes=self.memory_bytes, subgroup_elements=elements
        )


@dataclass(frozen=True, kw_only=True)
class GoldenCardOptions(CardOptions):
    """Options of ``golden:smartssd``."""

    engine: Engine = "cpp"


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """How a device is simulated whose memory is one port."""

    memory: Memory = "ideal"
    latency: Annotated[
        int | None,
        Option(
            meaning="cycles from the last address to the first beat, and from the last beat to the "
            "response of a write",
            low=1,
            high=1 << 16,
            unset="1 for ideal, 40 for halfduplex",
        ),
    ] = None
    fu: Units = "rtl"
    stall: Annotated[
        float,
        Option(
            meaning="share of cycles in which the memory stalls each of its channels",
            low=0,
            high=0.95,
        ),
    ] = 0.0
    seed: Seed = 1
    trace: Trace = None

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, kw_only=True)
class VerilatedOptions(SimulationOptions, AxdimmOptions):
    """Options of ``sim:axdimm``. (``memory=ddr4-1600`` is a device of its own: `DimmOptions`.)"""

    def __post_init__(self) -> None:
        AxdimmOptions.__post_init__(self)
        SimulationOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class VerilatedCardOptions(SimulationOptions, CardOptions):
    """Options of ``sim:smartssd``."""

    memory: Memory = "halfduplex"

    def __post_init__(self) -> None:
        CardOptions.__post_init__(self)
        SimulationOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class DimmOptions(KernelOptions):
    """Options of ``sim:axdimm?memory=ddr4-1600``, those of :class:`KernelOptions` among them.

    The size of the memory follows from the parts: :class:`nearstep_spec.axdimm.config.DimmConfig`.
    """

    memory: Annotated[
        Literal["ddr4-1600"],
        Option(meaning="channels of DDR4, each with a mode arbiter and a controller"),
    ] = "ddr4-1600"
    channels: Channels = 2
    density: Annotated[Literal["4Gb", "8Gb", "16Gb"], Option(meaning="of a DRAM chip")] = "8Gb"
    width: Annotated[Literal["x8", "x16"], Option(meaning="data pins of a DRAM chip")] = "x8"
    mapping: Annotated[
        str,
        Option(
            meaning="order of the address bits in a channel, from the top",
            choices=MAPPINGS,
            allowed="or any other order of the four words",
        ),
    ] = DEFAULT_MAPPING
    block_bytes: BlockBytes = 16384
    scheduler: Annotated[
        Literal["fr-fcfs", "in-order"], Option(meaning="of the host's memory controller")
    ] = "fr-fcfs"
    postpone: Annotated[
        int, Option(meaning="refreshes that the host gathers before it gives them", low=1, high=8)
    ] = 1
    fu: Units = "rtl"
    stall: Annotated[
        float,
        Option(meaning="share of cycles in which the host issues no access", low=0, high=0.95),
    ] = 0.0
    seed: Seed = 1
    trace: Trace = None
    commands: Annotated[
        str | None,
        Option(
            meaning="DRAM commands of each channel, as text: this name with .0, .1 and so on",
            allowed="a file to write",
            unset="none",
        ),
    ] = None

    def __post_init__(self) -> None:
        self.config()
        check_bounds(self)

    def config(self) -> DimmConfig:
        """Configuration of the DIMM.

        Raises
        ------
        nearstep_spec.updater.config.ConfigError
        """
        return DimmConfig(
            kernel=self.kernel_of(self.block_bytes),
            channels=self.channels,
            density=self.density,
            width=self.width,
            mapping=self.mapping,
        )


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
            wire_formats=_names(self.wire_formats),
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


GOLDEN = MappingProxyType(
    {
        "axdimm": Family(
            "golden:axdimm",
            (Variant(options=GoldenOptions, summary="an AXDIMM or its kernel, without a clock"),),
        ),
        "smartssd": Family(
            "golden:smartssd",
            (Variant(options=GoldenCardOptions, summary="a SmartSSD card, without a clock"),),
        ),
        "coarse": Family(
            "golden:coarse",
            (Variant(options=CoarseOptions, summary="a pool of devices, without a clock"),),
        ),
    }
)
"""Families of ``golden:``."""

SIM = MappingProxyType(
    {
        "axdimm": Family(
            "sim:axdimm",
            (
                Variant(
                    options=VerilatedOptions,
                    summary="the RTL of an AXDIMM's kernel, with a memory of one port",
                ),
                Variant(
                    options=DimmOptions,
                    summary="the RTL of an AXDIMM: arbiters, DDR4 controllers, kernels",
                    when=("memory", DDR4),
                ),
            ),
        ),
        "smartssd": Family(
            "sim:smartssd",
            (Variant(options=VerilatedCardOptions, summary="the RTL of a SmartSSD card"),),
        ),
        "coarse": Family(
            "sim:coarse",
            (Variant(options=VerilatedPoolOptions, summary="the RTL of a pool of devices"),),
        ),
    }
)
"""Families of ``sim:``."""
