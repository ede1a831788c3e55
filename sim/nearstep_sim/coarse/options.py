"""Options of emulated pools of COARSE devices in device names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from nearstep.backends.options import Family, Variant
from nearstep_sim.models.link.faults import LinkOptionError, LinkOptions
from nearstep_sim.verilate.options import Memory, SimulationOptions
from nearstep_spec.coarse.config import MAX_DEVICES, CoarseConfig
from nearstep_spec.codec import Nested, Option, check_bounds

MEMORY_BYTES = 16 << 20  # default of each device

Chance = Annotated[float, Option(meaning="chance of this for each frame on a link", low=0, high=1)]


@dataclass(frozen=True, kw_only=True)
class CoarseOptions:
    """Options that every emulated pool of COARSE devices has."""

    devices: Annotated[
        int,
        Option(
            meaning="memory devices, joined to a ring; of one, the update kernel sums (DENSE), "
            "or sums are exact",
            low=1,
            high=MAX_DEVICES,
        ),
    ] = 4
    device: Annotated[CoarseConfig, Nested(defaults={"memory_bytes": MEMORY_BYTES})] = field(
        default_factory=lambda: CoarseConfig(memory_bytes=MEMORY_BYTES)
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.devices == 1 and self.device.updater is None and not self.device.exact:
            raise ValueError(f"devices must lie in [2, {MAX_DEVICES}] without rules, not 1")

    def config(self) -> CoarseConfig:
        """Configuration of each device."""
        return self.device


@dataclass(frozen=True, kw_only=True)
class VerilatedPoolOptions(SimulationOptions, CoarseOptions):
    """Options of `sim:coarse`, with those of `CoarseOptions`.

    `memory`, `latency`, `stall` and `seed` are of the local DRAM of each device.
    """

    memory: Memory = "halfduplex"
    window: Annotated[
        Literal["rtl", "direct"],
        Option(
            meaning="the host's loads and stores; rtl: through the device's window, in its cycles; "
            "direct: in the memory model, at once, unseen by a snapshot"
        ),
    ] = "rtl"
    link_latency: Annotated[
        int, Option(meaning="cycles from one end of a link to the other", low=1, high=1 << 20)
    ] = 100
    link_interval: Annotated[
        int,
        Option(meaning="cycles for each phit of 16 bytes, in each direction", low=1, high=1 << 10),
    ] = 1
    client_latency: Annotated[
        int,
        Option(
            meaning="cycles from a client to its device, for transfers that are submitted",
            low=1,
            high=1 << 20,
        ),
    ] = 100
    client_interval: Annotated[
        int,
        Option(
            meaning="cycles for 16 bytes on the link of a client, in each direction",
            low=1,
            high=1 << 10,
        ),
    ] = 1
    drop: Chance = 0.0
    duplicate: Chance = 0.0
    reorder: Chance = 0.0
    corrupt: Chance = 0.0

    def __post_init__(self) -> None:
        CoarseOptions.__post_init__(self)
        if self.devices == 1 and self.device.updater is None:
            raise ValueError(f"devices must lie in [2, {MAX_DEVICES}] without rules, not 1")
        SimulationOptions.__post_init__(self)
        if self.fu != "rtl" and self.device.updater is None:
            raise ValueError(f"fu must be 'rtl' of devices without rules, not {self.fu!r}")
        self.link()

    def link(self) -> LinkOptions:
        """Options of every link.

        Raises
        ------
        ValueError : an option has an invalid value.
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
