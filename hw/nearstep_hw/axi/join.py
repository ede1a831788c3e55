"""Several AXI4 initiators on one subordinate port."""

from amaranth import Array, Cat, Elaboratable, Module, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.arbiter import StreamArbiter
from nearstep_hw.axi.burst import id_width as number_width
from nearstep_hw.axi.signature import (
    AddressLayout,
    Axi4ReadSignature,
    Axi4WriteSignature,
    copied,
)
from nearstep_hw.stream.fifo import StreamFifo


class _AxiJoin(wiring.Component):
    """Base of the joins: initiators, an arbiter of addresses, the port."""

    def __init__(
        self,
        channels: type[Axi4ReadSignature] | type[Axi4WriteSignature],
        *,
        ports: int,
        address_width: int,
        data_width: int,
        id_width: int,
        fixed: bool,
    ) -> None:
        self.id_width = id_width
        self.arbiter = StreamArbiter(
            AddressLayout(address_width=address_width, id_width=id_width), ports=ports, fixed=fixed
        )
        widths = {"address_width": address_width, "data_width": data_width}
        port_id_width = id_width + number_width(ports)
        super().__init__(
            {
                "s_axi": In(channels(**widths, id_width=id_width)).array(ports),
                "m_axi": Out(channels(**widths, id_width=port_id_width)),
            }
        )

    def _join_addresses(self, m: Module, channels: list[object], joined: object) -> None:
        """Connect AR or AW of the initiators, through the arbiter, to that of the port."""
        taken = self.arbiter.o.payload
        for channel, entry in zip(channels, self.arbiter.i, strict=True):
            wiring.connect(m, wiring.flipped(channel), entry)
        m.d.comb += [
            joined.valid.eq(self.arbiter.o.valid),
            self.arbiter.o.ready.eq(joined.ready),
            *copied(joined.payload, taken.payload),
            joined.payload.id.eq(Cat(taken.payload.id, taken.owner)),
        ]

    def _owner(self, identifier: Value) -> Value:
        """Return the number of the initiator in an ID of the port."""
        return identifier[self.id_width :]


class AxiReadJoin(_AxiJoin):
    """Joins reads of several initiators on one port; responses are routed by ID.

    The ID at the port has the number of the initiator above the initiator's own ID, so beats may
    have any order that AXI4 allows. RREADY of every initiator must always be high, as that of a
    `ReadMover` is, and is ignored; RREADY of the port is always high.

    *Timing*: ARVALID one cycle after that of an initiator, a burst a cycle. R is combinational, a
    beat a cycle. ARREADY of an initiator depends on that of the port and on ARVALID of all; no
    `valid` depends on a `ready`.

    Parameters
    ----------
    ports : initiators.
    address_width, data_width, id_width : bits, of the initiators.
    fixed : the first initiator that asks is served; otherwise they are served in turn.

    Members
    -------
    s_axi : the initiators.
    m_axi : the port; its IDs are wider by the number of an initiator.
    """

    def __init__(
        self,
        *,
        ports: int,
        address_width: int,
        data_width: int,
        id_width: int,
        fixed: bool = False,
    ) -> None:
        super().__init__(
            Axi4ReadSignature,
            ports=ports,
            address_width=address_width,
            data_width=data_width,
            id_width=id_width,
            fixed=fixed,
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.arbiter = self.arbiter
        beats = self.m_axi.r

        self._join_addresses(m, [initiator.ar for initiator in self.s_axi], self.m_axi.ar)
        m.d.comb += beats.ready.eq(1)
        for number, initiator in enumerate(self.s_axi):
            mine = self._owner(beats.payload.id) == number
            m.d.comb += [
                initiator.r.valid.eq(beats.valid & mine),
                *copied(initiator.r.payload, beats.payload),
            ]
        return m


class AxiWriteJoin(_AxiJoin):
    """Joins writes of several initiators on one port; data in the order of addresses, responses by
    ID.

    IDs are those of `AxiReadJoin`, and BREADY of every initiator must always be high. WVALID may be
    high before the address is accepted, at the initiators and at the port.

    *Timing*: AWVALID one cycle after that of an initiator, a burst a cycle. WVALID is that of the
    initiator, from two cycles after its address was taken until its last beat; without a gap
    between bursts. W and B are combinational. No `valid` depends on a `ready`.

    Parameters
    ----------
    ports : initiators.
    address_width, data_width, id_width : bits, of the initiators.
    bursts_ahead : most bursts taken before their data, a power of two.
    fixed : the first initiator that asks is served; otherwise they are served in turn.

    Members
    -------
    s_axi : the initiators.
    m_axi : the port; its IDs are wider by the number of an initiator.
    """

    def __init__(
        self,
        *,
        ports: int,
        address_width: int,
        data_width: int,
        id_width: int,
        bursts_ahead: int = 16,
        fixed: bool = False,
    ) -> None:
        super().__init__(
            Axi4WriteSignature,
            ports=ports,
            address_width=address_width,
            data_width=data_width,
            id_width=id_width,
            fixed=fixed,
        )
        self.owners = StreamFifo(number_width(ports), depth=bursts_ahead)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.arbiter = arbiter = self.arbiter
        m.submodules.owners = owners = self.owners
        sender = owners.o.payload  # initiator of the current burst on W
        sending = Array(initiator.w.valid for initiator in self.s_axi)[sender]
        sent = Array(initiator.w.payload.as_value() for initiator in self.s_axi)[sender]
        data, answers = self.m_axi.w, self.m_axi.b

        self._join_addresses(m, [initiator.aw for initiator in self.s_axi], self.m_axi.aw)
        m.d.comb += [
            arbiter.i_stop.eq(~owners.i.ready),
            owners.i.valid.eq(arbiter.o_take),
            owners.i.payload.eq(arbiter.o_owner),
            data.valid.eq(owners.o.valid & sending),
            data.payload.eq(sent),
            owners.o.ready.eq(data.valid & data.ready & data.payload.last),
            answers.ready.eq(1),
        ]
        for number, initiator in enumerate(self.s_axi):
            answered = self._owner(answers.payload.id) == number
            m.d.comb += [
                initiator.w.ready.eq(data.ready & owners.o.valid & (sender == number)),
                initiator.b.valid.eq(answers.valid & answered),
                *copied(initiator.b.payload, answers.payload),
            ]
        return m
