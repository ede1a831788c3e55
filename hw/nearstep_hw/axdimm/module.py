"""The module: its channels behind one host bus."""

from collections.abc import Sequence

from amaranth import Cat, Elaboratable, Module, Mux
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out, Signature

from nearstep_hw.axdimm.channel import AxdimmChannel
from nearstep_hw.axdimm.host_front_end import HOST_READ_LATENCY
from nearstep_hw.dram.dfi import HOST_DATA_BYTES, HOST_PHASES, DfiSignature
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.unit_row import UnitMaker
from nearstep_spec.axdimm.config import CHANNELS as CHANNEL_COUNTS
from nearstep_spec.axdimm.config import check_selects
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.command import ADDRESS_BITS
from nearstep_spec.dram.timing import DramTiming
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig

CHANNELS = 2
"""Channels of the module in the paper."""


class HostSlotSignature(Signature):
    """Command pins of one host slot, seen from the host: those of `CommandSignature`, with a chip
    select for each rank.

    Parameters
    ----------
    ranks : number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(
            {
                "cs_n": Out(ranks, init=(1 << ranks) - 1),
                "act_n": Out(1, init=1),
                "address": Out(ADDRESS_BITS),
                "bg": Out(2),
                "ba": Out(2),
            }
        )


class HostBusSignature(Signature):
    """The host's DDR4-800 bus, as delivered by its PHY in a 200 MHz cycle, from the host's side.

    A port called `host` becomes `host__p0__cs_n` ... `host__rddata_valid`, as with `DfiSignature`.

    Parameters
    ----------
    ranks : ranks on the bus.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(
            {
                **{f"p{slot}": Out(HostSlotSignature(ranks)) for slot in range(HOST_PHASES)},
                "wrdata": Out(8 * HOST_DATA_BYTES),
                "wrdata_mask": Out(HOST_DATA_BYTES),
                "wrdata_en": Out(1),
                "rddata": In(8 * HOST_DATA_BYTES),
                "rddata_valid": In(1),
            }
        )


class AxdimmModule(wiring.Component):
    """The whole module: channels of the same kind, each with its arbiter, registers and kernel.

    For the host the module has the ranks of channel 0, then those of channel 1 and so on; with one
    rank a channel, rank c is channel c. Each rank has its own rows and refreshes, so channels are
    independent. The host maps addresses to ranks; if the channel is the top of the address, the
    first byte of channel 1 is the capacity of a channel above that of channel 0. The last
    `WINDOW_BYTES` of each channel, by the mapping, are its registers.

    Flat Verilog ports, with n channels of r ranks, c = 0 to n - 1 and k = 0 to 3:

    - `clk`, `rst`.
    - `host__p0__cs_n[n*r-1:0]`, `host__p0__act_n address[17:0] bg[1:0] ba[1:0]`, `host__p1__...`,
      `host__wrdata[255:0] wrdata_mask[31:0] wrdata_en rddata[255:0] rddata_valid`.
    - `dfi<c>__p<k>__cs_n[r-1:0] act_n address bg ba`, `dfi<c>__wrdata[511:0] wrdata_mask[63:0]
      wrdata_en rddata[511:0] rddata_valid`.

    *Timing*: that of `MemoryChannel`.

    Parameters
    ----------
    config, timing, mapping : of every channel.
    channels : number of channels: 1, 2 or 4.
    unit : see `UnitMaker`.

    Attributes
    ----------
    latency : cycles from a read command of the host to its first data.

    Raises
    ------
    ConfigError : another number of channels, or more ranks than a host selects.

    Ref: AXDIMM paper, section 3, figure 2 and table 1.
    """

    latency = HOST_READ_LATENCY

    def __init__(
        self,
        config: UpdateKernelConfig,
        timing: DramTiming | None = None,
        mapping: AddressMapping | None = None,
        *,
        channels: int = CHANNELS,
        unit: UnitMaker = FunctionalUnit,
    ) -> None:
        if channels not in CHANNEL_COUNTS:
            raise ConfigError(f"channels must be one of {CHANNEL_COUNTS}, not {channels!r}")
        self.channels: Sequence[AxdimmChannel] = tuple(
            AxdimmChannel(config, timing, mapping, unit=unit) for _ in range(channels)
        )
        self.ranks = self.channels[0].memory.mapping.geometry.ranks
        check_selects(channels, self.ranks)
        super().__init__(
            {
                "host": In(HostBusSignature(channels * self.ranks)),
                **{
                    f"dfi{number}": Out(DfiSignature(ranks=self.ranks))
                    for number in range(channels)
                },
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        host = self.host
        data = 0
        for number, channel in enumerate(self.channels):
            m.submodules[f"channel{number}"] = channel
            for slot in range(HOST_PHASES):
                ours, theirs = getattr(channel.host, f"p{slot}"), getattr(host, f"p{slot}")
                m.d.comb += [
                    ours.cs_n.eq(theirs.cs_n.word_select(number, self.ranks)),
                    *(
                        getattr(ours, name).eq(getattr(theirs, name))
                        for name in ("act_n", "address", "bg", "ba")
                    ),
                ]
            m.d.comb += [
                channel.host.wrdata.eq(host.wrdata),
                channel.host.wrdata_mask.eq(host.wrdata_mask),
                channel.host.wrdata_en.eq(host.wrdata_en),
            ]
            data = Mux(channel.host.rddata_valid, channel.host.rddata, data)
            wiring.connect(m, channel.dfi, wiring.flipped(getattr(self, f"dfi{number}")))
        valid = Cat(channel.host.rddata_valid for channel in self.channels)
        m.d.comb += [host.rddata.eq(data), host.rddata_valid.eq(valid.any())]
        return m
