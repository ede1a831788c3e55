"""Proofs of the register bank and of its AXI4-Lite adapter, for every stimulus."""

import pytest
from amaranth.hdl import Assert, Assume, Cat, Cover, Module, Signal
from amaranth.lib.wiring import Component, In, connect, flipped

from nearstep_hw.csr.axi_lite import AxiLiteAdapter, AxiLiteSignature
from nearstep_hw.csr.bank import CsrBank
from nearstep_hw.csr.signature import CsrSignature
from nearstep_sim.bench.formal import EmptyProofError, prove
from nearstep_spec.csr.block import Response, fields, register, value_register
from nearstep_spec.csr.model import Access, Register, RegisterMap, place, port_name

from .toolkit import History, refuted

pytestmark = pytest.mark.formal
BOUND = 6  # cycles from a complete request to its answer, when a read and a write compete


def small_map() -> RegisterMap:
    """One register of each kind."""

    status = (
        *fields(Access.STATUS, ("busy", 0, 1, "")),
        *fields(Access.REFUSED, ("refused", 1, 1, "")),
    )
    return RegisterMap(
        name="small",
        busy="status.busy",
        latch="control.latch",
        clear="control.clear",
        registers=place(
            [
                [value_register("id", Access.CONSTANT, "", reset=0xCAFE_F00D)],
                [register("start", Access.PULSE, "", ("go", 0, 1, ""), locked=True)],
                [register("control", Access.PULSE, "", ("latch", 0, 1, ""), ("clear", 1, 1, ""))],
                [Register(name="status", fields=status)],
                [
                    value_register("wide", Access.CONFIG, "", width=64, locked=True, reset=5),
                    value_register("free", Access.CONFIG, ""),
                ],
                [value_register("cycles", Access.COUNTER, "", width=64)],
            ]
        ),
    )


class BankProperties(Component):
    """A bank whose bus and hardware inputs are free."""

    def __init__(self) -> None:
        self.map = small_map()
        super().__init__({"bus": In(CsrSignature()), "i_status_busy": In(1), "i_cycles": In(64)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.bank = bank = CsrBank(self.map)
        connect(m, flipped(self.bus), bank.bus)
        bus = bank.bus
        m.d.comb += [
            bank.i_status_busy.eq(self.i_status_busy),
            bank.i_cycles.eq(self.i_cycles),
            Assume(~(bus.read & bus.write)),
        ]

        history = History(m)
        before = history.before
        request = before(bus.read | bus.write)
        write = before(bus.write & bus.write_mask.all())
        was_locked = before(self.i_status_busy | bank.o_start_go)
        word = before(bus.address[2:])
        data = before(bus.write_data)
        pulses = Cat(bank.o_start_go, bank.o_control_latch, bank.o_control_clear)
        config = Cat(bank.o_wide, bank.o_free)
        was_wide, was_config = before(bank.o_wide), before(config)
        to_start = word == self.map["start"].offset // 4
        to_control = word == self.map["control"].offset // 4
        with m.If(history.exists):
            m.d.comb += [
                Assert(bus.ack == request),
                Assert(bank.o_start_go == (write & to_start & data[0] & ~was_locked)),
                Assert(bank.o_control_latch == (write & to_control & data[0])),
                Assert(bank.o_control_clear == (write & to_control & data[1])),
            ]
            with m.If(was_locked):
                m.d.comb += Assert(bank.o_wide == was_wide)
            with m.If(~write | bus.error):
                m.d.comb += [Assert(config == was_config), Assert(pulses == 0)]
            with m.If(~request):
                m.d.comb += [Assert(~bus.error), Assert(bus.read_data == 0)]
        m.d.comb += Cover(bank.o_start_go & bus.ack & ~bus.error)
        m.d.comb += Cover(bus.ack & bus.error & was_locked & to_start & write)
        return m


class ReadsDoNothing(Component):
    """Two banks with the same writes and reads, and one of them with more reads in between."""

    def __init__(self) -> None:
        self.map = small_map()
        super().__init__(
            {
                "bus": In(CsrSignature()),
                "i_status_busy": In(1),
                "i_cycles": In(64),
                "more": In(1),
                "more_address": In(len(CsrSignature().create().address)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.quiet = quiet = CsrBank(self.map)
        m.submodules.read = read = CsrBank(self.map)
        extra = Signal()
        m.d.comb += [
            Assume(~(self.bus.read & self.bus.write)),
            extra.eq(self.more & ~self.bus.read & ~self.bus.write),
        ]
        connect(m, flipped(self.bus), quiet.bus)
        for bank in (quiet, read):
            m.d.comb += [
                bank.i_status_busy.eq(self.i_status_busy),
                bank.i_cycles.eq(self.i_cycles),
            ]
        for name in ("write", "write_data", "write_mask"):
            m.d.comb += getattr(read.bus, name).eq(getattr(self.bus, name))
        m.d.comb += [
            read.bus.read.eq(self.bus.read | extra),
            read.bus.address.eq(self.bus.address),
        ]
        with m.If(extra):
            m.d.comb += read.bus.address.eq(self.more_address)

        with m.If(quiet.bus.ack):
            m.d.comb += [
                Assert(read.bus.ack),
                Assert(read.bus.error == quiet.bus.error),
                Assert(read.bus.read_data == quiet.bus.read_data),
            ]
        for listed, field in self.map.fields():
            name = port_name(listed, field)
            if name is not None and field.access.writable:
                m.d.comb += Assert(getattr(read, name) == getattr(quiet, name))
        return m


class AdapterProperties(Component):
    """An adapter between a free AXI4-Lite manager and a register port that answers in a cycle."""

    s_axil: In(AxiLiteSignature())
    error: In(1)
    read_data: In(32)

    def __init__(self, flaw: str | None = None) -> None:
        self.flaw = flaw
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.adapter = adapter = AxiLiteAdapter()
        axi, csr = adapter.s_axil, adapter.csr
        connect(m, flipped(self.s_axil), axi)
        answer = Signal()
        m.d.sync += answer.eq(csr.read | csr.write)
        if self.flaw == "deaf":
            m.d.comb += csr.ack.eq(0)
        else:
            m.d.comb += csr.ack.eq(answer)
        m.d.comb += [csr.error.eq(self.error), csr.read_data.eq(self.read_data)]

        self._channel(m, "write", axi, csr, ("aw", "w"), "b")
        self._channel(m, "read", axi, csr, ("ar",), "r")
        m.d.comb += [
            Assert(~(csr.read & csr.write)),
            Assert(~((csr.read | csr.write) & csr.ack)),
            Cover(axi.bvalid & axi.rvalid & ~axi.awready & ~axi.arready),
        ]
        return m

    def _channel(
        self,
        m: Module,
        kind: str,
        axi: object,
        csr: object,
        requests: tuple[str, ...],
        response: str,
    ) -> None:
        """Every request of one direction has one access and one answer, in time."""
        strobe = getattr(csr, kind)
        valid, ready = getattr(axi, f"{response}valid"), getattr(axi, f"{response}ready")
        code = getattr(axi, f"{response}resp")
        taken = valid & ready
        waiting = []
        for channel in requests:
            fires = getattr(axi, f"{channel}valid") & getattr(axi, f"{channel}ready")
            open_requests = Signal(2, name=f"open_{channel}")
            m.d.sync += open_requests.eq(open_requests + fires - taken)
            held = ~getattr(axi, f"{channel}ready")
            m.d.comb += Assert(open_requests == held + valid)
            waiting.append(open_requests > valid)
        accesses = Signal(2, name=f"{kind}_accesses")  # made, and not yet answered on the bus
        m.d.sync += accesses.eq(accesses + strobe - taken)
        m.d.comb += [Assert(accesses <= 1), Assert(valid <= accesses)]
        with m.If(strobe):
            m.d.comb += [Assert(accesses == 0), Assert(Cat(waiting).all())]

        seen = {}
        payloads = ("awaddr", "wdata", "wstrb") if kind == "write" else ("araddr",)
        for name in payloads:
            channel = name[:2] if name[0] == "a" else "w"
            seen[name] = Signal.like(getattr(axi, name), name=f"seen_{name}")
            with m.If(getattr(axi, f"{channel}valid") & getattr(axi, f"{channel}ready")):
                m.d.sync += seen[name].eq(getattr(axi, name))
        with m.If(strobe):
            m.d.comb += Assert(csr.address == seen["awaddr" if kind == "write" else "araddr"])
            if kind == "write":
                m.d.comb += Assert(csr.write_data == seen["wdata"])
                m.d.comb += Assert(csr.write_mask == seen["wstrb"])

        mine = Signal(name=f"{kind}_in_flight")
        failed = Signal(name=f"{kind}_failed")
        m.d.sync += mine.eq(strobe)
        with m.If(mine):
            m.d.sync += failed.eq(self.error)
        with m.If(valid):
            expected = Signal.like(code, name=f"{kind}_expected")
            m.d.comb += expected.eq(Response.OKAY)
            with m.If(failed):
                m.d.comb += expected.eq(Response.SLVERR)
            m.d.comb += Assert(code == expected)
        if kind == "read":
            data = Signal.like(axi.rdata)
            with m.If(mine):
                m.d.sync += data.eq(self.read_data)
            with m.If(valid):
                m.d.comb += Assert(axi.rdata == data)

        stalled = Signal(name=f"{kind}_stalled")
        m.d.sync += stalled.eq(valid & ~ready)
        with m.If(stalled):
            m.d.comb += Assert(valid)
        patience = Signal(range(BOUND + 2), name=f"{kind}_waits")
        with m.If(Cat(waiting).all() & ~valid):
            m.d.sync += patience.eq(patience + 1)
        with m.Else():
            m.d.sync += patience.eq(0)
        m.d.comb += Assert(patience <= BOUND)


def test_bank_starts_locks_and_writes_as_it_should() -> None:
    proof = prove(BankProperties(), "csr_bank", "prove", depth=3)
    print(proof)
    assert proof.statements >= 9


@pytest.mark.deep
def test_bank_can_start_and_refuse() -> None:
    assert prove(BankProperties(), "csr_bank", "cover", depth=6).statements == 2


@pytest.mark.deep
def test_reads_have_no_side_effects() -> None:
    proof = prove(ReadsDoNothing(), "csr_reads", "bmc", depth=10)
    print(proof)
    assert proof.statements >= 8


@pytest.mark.deep
def test_adapter_answers_every_request_exactly_once() -> None:
    proof = prove(AdapterProperties(), "axi_lite", "bmc", depth=20)
    print(proof)
    assert proof.statements >= 20


@pytest.mark.deep
def test_adapter_overlaps_reads_and_writes() -> None:
    assert prove(AdapterProperties(), "axi_lite", "cover", depth=12).statements == 1


@pytest.mark.deep
def test_a_port_that_never_answers_is_found() -> None:
    found = refuted(AdapterProperties(flaw="deaf"), "axi_lite_deaf", depth=14)
    assert found.trace is not None
    assert found.trace.exists()


def test_a_design_that_states_nothing_proves_nothing() -> None:
    with pytest.raises(EmptyProofError):
        prove(AxiLiteAdapter(), "empty", "bmc", depth=2)
