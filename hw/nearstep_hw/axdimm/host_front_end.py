"""Front end of the host's DDR4 bus."""

from collections.abc import Sequence

from amaranth import Cat, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import enum, wiring
from amaranth.lib.data import View
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.host_command import HostCommandLayout, decode
from nearstep_hw.dram.dfi import DfiSignature
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.latency import (
    HOST_COMMAND_DELAY,
    HOST_DATA_BYTES,
    HOST_PHASES,
    HOST_READ_LATENCY,
    HOST_WRITE_LATENCY,
    TPHY_RDLAT,
    TPHY_WRLAT,
)

__all__ = [
    "HOST_READ_LATENCY",
    "HOST_WRITE_LATENCY",
    "HostFrontEnd",
    "ReadSource",
    "host_port",
    "slots_of",
]

HOST_BURST_CYCLES = BEAT_BYTES // HOST_DATA_BYTES


def host_port(ranks: int = 1) -> DfiSignature:
    """Return the host's bus of a channel, from the host's side."""
    return DfiSignature(phases=HOST_PHASES, data_bytes=HOST_DATA_BYTES, ranks=ranks)


def slots_of(slots: Sequence[View], rank: int) -> Sequence[View]:
    """Return the slots of a rank in a cycle, in order of time."""
    return slots[rank * HOST_PHASES : (rank + 1) * HOST_PHASES]


class ReadSource(enum.Enum, shape=2):
    """Source of the data of a host's read."""

    NONE = 0  # there was no read
    DRAM = 1
    CSR = 2
    REFUSED = 3  # the data are 0


class HostFrontEnd(wiring.Component):
    """Receives the host's commands and data, and returns read data with the fixed latency of its
    bus.

    The source of a read's data is selected with the command and delayed by a shift register; the
    data are always output `HOST_READ_LATENCY` cycles after the command.

    *Timing*: `o_slot` is the host's pins a cycle later: a command on the pins in cycle n is at
    `o_slot` in cycle n + 1, when `i_source` must select the source of its data. Its DRAM data or
    its line are taken in cycle n + 1 + `READ_DATA_DELAY`. Data of a write are at `o_write_data` in
    cycle n + 1 + `WRITE_DATA_DELAY`. The host spaces its column commands by tCCD_S = 4 clocks, two
    cycles, so there is at most one in two cycles.

    Members
    -------
    host : the host's bus: two slots of DDR4-800 and half a burst in a cycle.
    o_slot : the two slots in order of time, decoded for rank 0; then for rank 1.
    o_write_data, o_write_mask : a burst; a mask bit of 1 keeps the byte.
    i_source : for the read command in `o_slot`; NONE if there is none.
    i_dram_data, i_line_data : bursts.
    o_missing_data : write data were due in this cycle and missing. (Data without a command of this
        channel may be another channel's.)

    Ref: AXDIMM paper, section 3.1.
    """

    READ_DATA_DELAY = HOST_COMMAND_DELAY - 1 + TPHY_RDLAT
    WRITE_DATA_DELAY = HOST_COMMAND_DELAY - 1 + TPHY_WRLAT

    def __init__(self, geometry: DramGeometry) -> None:
        self.geometry = geometry
        super().__init__(
            {
                "host": In(host_port(geometry.ranks)),
                "o_slot": Out(HostCommandLayout(geometry), init={"cs_n": 1}).array(
                    geometry.ranks * HOST_PHASES
                ),
                "o_write_data": Out(8 * BEAT_BYTES),
                "o_write_mask": Out(BEAT_BYTES),
                "i_source": In(ReadSource),
                "i_dram_data": In(8 * BEAT_BYTES),
                "i_line_data": In(8 * BEAT_BYTES),
                "o_missing_data": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        write = Signal()
        half, half_mask = 8 * HOST_DATA_BYTES, HOST_DATA_BYTES

        for number, slot in enumerate(self.o_slot):
            rank, phase = divmod(number, HOST_PHASES)
            command = Signal(HostCommandLayout(self.geometry), name=f"command{number}")
            decode(m, getattr(self.host, f"p{phase}"), command, rank)
            m.d.sync += slot.eq(command)
            with m.If(command.write):
                m.d.comb += write.eq(1)

        due: list[Value] = [write]
        for stage in range(1, HOST_WRITE_LATENCY + HOST_BURST_CYCLES):
            due.append(Signal(name=f"data_due{stage}"))
            m.d.sync += due[-1].eq(due[-2])
        wanted = Cat(due[HOST_WRITE_LATENCY:]).any()
        m.d.comb += self.o_missing_data.eq(wanted & ~self.host.wrdata_en)
        m.d.sync += [
            self.o_write_data[half:].eq(self.host.wrdata),
            self.o_write_data[:half].eq(self.o_write_data[half:]),
            self.o_write_mask[half_mask:].eq(self.host.wrdata_mask),
            self.o_write_mask[:half_mask].eq(self.o_write_mask[half_mask:]),
        ]

        source = self.i_source
        for stage in range(self.READ_DATA_DELAY):
            following = Signal(ReadSource, name=f"source{stage + 1}")
            m.d.sync += following.eq(source)
            source = following
        burst = Signal(8 * BEAT_BYTES)
        second = Signal(half)
        has_second = Signal()
        with m.Switch(source):
            with m.Case(ReadSource.DRAM):
                m.d.comb += burst.eq(self.i_dram_data)
            with m.Case(ReadSource.CSR):
                m.d.comb += burst.eq(self.i_line_data)
        first = source != ReadSource.NONE
        m.d.sync += [
            has_second.eq(first),
            second.eq(burst[half:]),
            self.host.rddata_valid.eq(first | has_second),
            self.host.rddata.eq(Mux(first, burst[:half], Mux(has_second, second, 0))),
        ]
        return m
