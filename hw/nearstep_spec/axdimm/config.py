"""Configuration of a whole DIMM, and addresses of its registers: plain data."""

from dataclasses import dataclass, field
from typing import Annotated

from nearstep_spec.axdimm.registers import WINDOW_BYTES, channel_maps
from nearstep_spec.codec import Nested, Option
from nearstep_spec.csr.model import RegisterMap
from nearstep_spec.dram.address import DEFAULT_INTERLEAVE, DEFAULT_MAPPING, AddressMapping
from nearstep_spec.dram.config import Density, Interleave, Mapping, Ranks, Width
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.latency import HOST_READ_LATENCY, HOST_WRITE_LATENCY
from nearstep_spec.dram.timing import DramTiming, dram_timing
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig

CHANNELS = (1, 2, 4)
SELECTS = 4  # ranks that a host selects on a module


def check_selects(channels: int, ranks: int) -> None:
    """Raise `ConfigError` if a host has too few chip selects for so many ranks."""
    if channels * ranks > SELECTS:
        raise ConfigError(
            f"channels times ranks must be at most {SELECTS}, the chip selects of a host, "
            f"not {channels} times {ranks}"
        )


@dataclass(frozen=True, kw_only=True)
class DimmConfig:
    """Channels, the DRAM of each, and the kernel beside it.

    A rank is 4 GiB with 4Gb x8 parts, 8 GiB with 8Gb x8, 16 GiB with 16Gb x8, half of that with
    x16, and 16 GiB with 32Gb x16, which is two dies of 16Gb x8. The last `WINDOW_BYTES` of a
    channel are registers.

    Parameters
    ----------
    kernel : of every channel; its beat is that of the memory, 16 lanes.
    channels : 1, 2 or 4.
    density, width : of the DRAM chips.
    mapping : order of the address bits inside a rank.
    ranks, interleave : of a channel, see `DramGeometry` and `AddressMapping`; a host selects at
        most `SELECTS` ranks.

    Raises
    ------
    ConfigError : with the value and what is allowed.
    """

    kernel: Annotated[UpdateKernelConfig, Nested()] = field(default_factory=UpdateKernelConfig)
    channels: Annotated[int, Option(meaning="channels, each with its kernel", choices=CHANNELS)] = 2
    density: Density = "8Gb"
    width: Width = "x8"
    mapping: Mapping = DEFAULT_MAPPING
    ranks: Ranks = 1
    interleave: Interleave = DEFAULT_INTERLEAVE

    def __post_init__(self) -> None:
        if self.channels not in CHANNELS:
            raise ConfigError(f"channels must be one of {CHANNELS}, not {self.channels!r}")
        if self.kernel.beat_bytes != BEAT_BYTES:
            raise ConfigError(
                f"lanes must be {BEAT_BYTES // 4}, a beat of the memory, not {self.kernel.lanes!r}"
            )
        try:
            mapping = self.address_mapping
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if mapping.geometry.address_bits > self.kernel.address_width:
            raise ConfigError(
                f"address_width must be at least {mapping.geometry.address_bits} bits for a "
                f"channel, not {self.kernel.address_width}"
            )
        check_selects(self.channels, self.ranks)

    @property
    def geometry(self) -> DramGeometry:
        """Geometry of a channel."""
        return DramGeometry(self.density, self.width, self.ranks)

    @property
    def address_mapping(self) -> AddressMapping:
        """Address mapping inside a channel."""
        return AddressMapping(self.geometry, self.mapping, self.interleave)

    @property
    def timing(self) -> DramTiming:
        """Timing of the DRAM parts, DDR4-1600."""
        return dram_timing("DDR4-1600", self.density, self.width)

    @property
    def refresh_bound(self) -> float:
        """Share of a channel's peak beside refresh; 1 if another rank transfers data meanwhile."""
        return self.timing.refresh_bound if self.ranks == 1 else 1.0

    @property
    def channel_bytes(self) -> int:
        """Bytes of a channel, registers included."""
        return self.geometry.capacity_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of a channel before its registers."""
        return self.channel_bytes - WINDOW_BYTES

    def maps(self) -> dict[str, tuple[int, RegisterMap]]:
        """Register blocks: `arbiter0`, `adam0`, `arbiter1`, ... to address in the module's memory
        and register map.
        """
        blocks = channel_maps(
            self.kernel,
            self.address_mapping,
            read_latency=HOST_READ_LATENCY,
            write_latency=HOST_WRITE_LATENCY,
        )
        return {
            f"{name}{channel}": (channel * self.channel_bytes + base, block)
            for channel in range(self.channels)
            for name, (base, block) in blocks.items()
        }
