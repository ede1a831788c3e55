"""Options of the emulated devices, as they stand in a device name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from nearstep_hw.axdimm.config import AdamKernelConfig, ConfigError
from nearstep_hw.axdimm.dimm import DimmConfig
from nearstep_hw.coarse.config import MAX_DEVICES, CoarseConfig
from nearstep_hw.dram.address import DEFAULT_MAPPING
from nearstep_hw.smartssd.config import SUBGROUPS_HELD, UPDATER, SmartssdConfig
from nearstep_sim.link.faults import LinkOptionError, LinkOptions

DDR4 = "ddr4-1600"
"""The memory of a whole DIMM: channels of DDR4, each with a mode arbiter."""


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Options that every emulated device with an update kernel has; families name its block.

    Parameters
    ----------
    lanes, functional_units, order :
        As in :class:`nearstep_hw.axdimm.config.AdamKernelConfig`.
    rules : str
        Update rules of the kernel, with commas between: ``adam,sgd,sgd_momentum,adagrad``.
    gradient_formats : str
        Formats that gradients may have, with commas between: ``fp32,fp16,bf16``.
    gradient_scale : bool
        Whether the kernel can multiply gradients by a factor.
    copy_out_formats : str
        Formats of a copy of the updated parameters, with commas between: ``fp16,bf16``.
    scan : bool
        Whether the kernel can read gradients alone.
    compression : str
        Forms of gradients in pairs, with commas between: ``fused,scatter``.
    """

    lanes: int = 16
    functional_units: int | None = None
    order: Literal["default", "paper"] = "default"
    rules: str = "adam"
    gradient_formats: str = "fp32"
    gradient_scale: bool = False
    copy_out_formats: str = ""
    scan: bool = False
    compression: str = ""

    def kernel_of(self, block_bytes: int) -> AdamKernelConfig:
        """Configuration of a kernel with this block, and a window for each array of any run.

        Raises
        ------
        nearstep_hw.axdimm.config.ConfigError
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
    """Options that every emulated AXDIMM device has, those of :class:`KernelOptions` among them.

    Parameters
    ----------
    block_bytes : int
        As in :class:`nearstep_hw.axdimm.config.AdamKernelConfig`.
    memory_bytes : int | None
        Size of the device memory, a multiple of 64. None: 16 GiB, all that the kernel addresses.
        The host's memory is taken as it is used, by the page.
    """

    block_bytes: int = 16384
    memory_bytes: int | None = None

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
        nearstep_hw.axdimm.config.ConfigError
        """
        return self.kernel_of(self.block_bytes)


@dataclass(frozen=True, kw_only=True)
class GoldenOptions(AxdimmOptions):
    """Options of ``golden:axdimm``.

    Parameters
    ----------
    engine : str
        ``cpp`` is compiled on first use; ``numpy`` needs no compiler and is slower.
    channels : int | None
        Channels of a DIMM, each with a mode arbiter, a kernel and a part of the memory, which is of
        8 GiB each if nothing is said. None is a kernel and its memory by themselves.
    """

    engine: Literal["cpp", "numpy"] = "cpp"
    channels: int | None = None

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
        nearstep_hw.axdimm.config.ConfigError
        """
        if self.channels is None:
            return None
        return DimmConfig(kernel=self.config(), channels=self.channels)


@dataclass(frozen=True, kw_only=True)
class CardOptions(KernelOptions):
    """Options that every emulated SmartSSD has, those of :class:`KernelOptions` among them.

    Parameters
    ----------
    chunk_bytes : int
        Bytes of a chunk of one array: the ``block_bytes`` of the kernel.
    memory_bytes : int
        DRAM of the card, a power of two. Pages are taken as they are used.
    subgroup_elements : int | None
        As in :class:`nearstep_hw.smartssd.config.SmartssdConfig`. None: as many as usual, or the
        whole chunks that fit into the memory twice if that is less.
    """

    rules: str = ",".join(UPDATER.rules)
    gradient_formats: str = ",".join(UPDATER.gradient_formats)
    gradient_scale: bool = UPDATER.gradient_scale
    copy_out_formats: str = ",".join(UPDATER.copy_out_formats)
    scan: bool = UPDATER.scan
    compression: str = ",".join(UPDATER.compression)
    chunk_bytes: int = UPDATER.block_bytes
    memory_bytes: int = SmartssdConfig.memory_bytes
    subgroup_elements: int | None = None

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> SmartssdConfig:
        """Configuration of the card.

        Raises
        ------
        nearstep_hw.axdimm.config.ConfigError
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
    """Options of ``golden:smartssd``.

    Parameters
    ----------
    engine : str
        As in :class:`GoldenOptions`.
    """

    engine: Literal["cpp", "numpy"] = "cpp"


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """How a device is simulated whose memory is one port.

    Parameters
    ----------
    memory : str
        ``ideal``: a read and a write beat a cycle. ``halfduplex``: one beat a cycle in all, 4
        cycles of turnaround.
    latency : int | None
        Cycles from the last address to the first beat, and from the last write beat to its
        response. None is the memory's own: 1 for ``ideal``, 40 for ``halfduplex``.
    fu : str
        ``rtl``: the functional units are Verilated. ``native``: a C++ kernel of equal latency
        stands in for them, proven to give the same bits.
    stall : float
        Fraction of cycles in which the memory stalls each of its channels, from 0 to 0.95.
    seed : int
        Seed of the stalls.
    trace : str | None
        VCD file to write. It goes under ``build/`` and slows the simulation down.
    """

    memory: Literal["ideal", "halfduplex"] = "ideal"
    latency: int | None = None
    fu: Literal["rtl", "native"] = "rtl"
    stall: float = 0.0
    seed: int = 1
    trace: str | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.stall <= 0.95:
            raise ValueError(f"stall must lie in [0, 0.95], not {self.stall}")
        _check_seed(self.seed)
        if self.latency is not None and not 1 <= self.latency <= 1 << 16:
            raise ValueError(f"latency must lie in [1, 65536], not {self.latency}")


@dataclass(frozen=True, kw_only=True)
class VerilatedOptions(SimulationOptions, AxdimmOptions):
    """Options of ``sim:axdimm``. (``memory=ddr4-1600`` is a device of its own: `DimmOptions`.)"""

    def __post_init__(self) -> None:
        AxdimmOptions.__post_init__(self)
        SimulationOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class VerilatedCardOptions(SimulationOptions, CardOptions):
    """Options of ``sim:smartssd``."""

    memory: Literal["ideal", "halfduplex"] = "halfduplex"

    def __post_init__(self) -> None:
        CardOptions.__post_init__(self)
        SimulationOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class DimmOptions(KernelOptions):
    """Options of ``sim:axdimm?memory=ddr4-1600``, those of :class:`KernelOptions` among them.

    The size of the memory follows from the parts: :class:`nearstep_hw.axdimm.dimm.DimmConfig`.

    Parameters
    ----------
    memory : str
        ``ddr4-1600``.
    channels, density, width, mapping :
        As in :class:`nearstep_hw.axdimm.dimm.DimmConfig`.
    block_bytes : int
        As in :class:`nearstep_hw.axdimm.config.AdamKernelConfig`.
    scheduler : str
        Of the host's memory controller: ``fr-fcfs`` or ``in-order``.
    postpone : int
        Refreshes that the host gathers before it gives them, 1 to 8.
    fu : str
        ``rtl``: the functional units are Verilated. ``native``: a C++ kernel of equal latency
        stands in for them, proven to give the same bits.
    stall : float
        Fraction of cycles in which the host issues no access, from 0 to 0.95.
    seed : int
        Seed of the stalls.
    trace : str | None
        VCD file to write. It goes under ``build/`` and slows the simulation down.
    commands : str | None
        File of DRAM commands to write, for each channel: this name with .0, .1 and so on.
    """

    memory: Literal["ddr4-1600"] = "ddr4-1600"
    channels: int = 2
    density: Literal["4Gb", "8Gb", "16Gb"] = "8Gb"
    width: Literal["x8", "x16"] = "x8"
    mapping: str = DEFAULT_MAPPING
    block_bytes: int = 16384
    scheduler: Literal["fr-fcfs", "in-order"] = "fr-fcfs"
    postpone: int = 1
    fu: Literal["rtl", "native"] = "rtl"
    stall: float = 0.0
    seed: int = 1
    trace: str | None = None
    commands: str | None = None

    def __post_init__(self) -> None:
        self.config()
        if not 0.0 <= self.stall <= 0.95:
            raise ValueError(f"stall must lie in [0, 0.95], not {self.stall}")
        _check_seed(self.seed)
        if not 1 <= self.postpone <= 8:
            raise ValueError(f"postpone must lie in [1, 8], not {self.postpone}")

    def config(self) -> DimmConfig:
        """Configuration of the DIMM.

        Raises
        ------
        nearstep_hw.axdimm.config.ConfigError
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
    """Options that every emulated pool of COARSE devices has.

    Parameters
    ----------
    devices : int
        Memory devices of the pool, joined to a ring; at least 2.
    groups, alus, entry_phits, buffer_entries, local_beats, chunks_ahead, queue_jobs,
    snapshot_pages :
        As in :class:`nearstep_hw.coarse.config.CoarseConfig`.
    memory_bytes : int
        Of each device, a power of two. Pages are taken as they are used.
    wire_formats : str
        Formats of elements on a link, with commas between: ``fp32,fp16,bf16``.
    """

    devices: int = 4
    groups: int = CoarseConfig.groups
    alus: int = CoarseConfig.alus
    entry_phits: int = CoarseConfig.entry_phits
    buffer_entries: int = CoarseConfig.buffer_entries
    local_beats: int = CoarseConfig.local_beats
    chunks_ahead: int = CoarseConfig.chunks_ahead
    queue_jobs: int = CoarseConfig.queue_jobs
    snapshot_pages: int = CoarseConfig.snapshot_pages
    memory_bytes: int = 16 << 20
    wire_formats: str = ",".join(CoarseConfig.wire_formats)

    def __post_init__(self) -> None:
        if not 2 <= self.devices <= MAX_DEVICES:
            raise ValueError(f"devices must be from 2 to {MAX_DEVICES}, not {self.devices}")
        self.config()

    def config(self) -> CoarseConfig:
        """Configuration of each device.

        Raises
        ------
        nearstep_hw.axdimm.config.ConfigError
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

    Parameters
    ----------
    window : str
        ``rtl``: the host's loads and stores go through the window of the device, in device cycles.
        ``direct``: memory is copied behind its back, at once; a snapshot does not see it.
    link_latency : int
        Cycles from one end of a link to the other.
    link_interval : int
        Cycles for each phit of 16 bytes, in each direction.
    drop, duplicate, reorder, corrupt : float
        Chance of each fault, for every frame on every link.
    """

    memory: Literal["ideal", "halfduplex"] = "halfduplex"
    fu: Literal["rtl"] = "rtl"
    window: Literal["rtl", "direct"] = "rtl"
    link_latency: int = 100
    link_interval: int = 1
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0

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


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be from 0 to 2**63 - 1, not {seed}")
