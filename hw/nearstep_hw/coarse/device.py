"""A COARSE memory device: sync cores, links, snapshot, update kernel, local DRAM and the window."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.axi.join import AxiReadJoin, AxiWriteJoin
from nearstep_hw.axi.signature import Axi4Signature, connect_channels
from nearstep_hw.coarse.faults import FaultControl
from nearstep_hw.coarse.job_queue import JobQueue
from nearstep_hw.coarse.link_layer import LinkLayer
from nearstep_hw.coarse.snapshot import SnapshotGate
from nearstep_hw.coarse.sync_core import SyncCore
from nearstep_hw.coarse.wire import LinkPhit
from nearstep_hw.csr.bank import CsrBank
from nearstep_hw.csr.counters import EventCounters
from nearstep_hw.csr.decoder import CsrDecoder
from nearstep_hw.csr.signature import CsrSignature
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.kernel_core import KernelCore
from nearstep_hw.updater.unit_row import UnitMaker, connect_units, outside_ports
from nearstep_spec.coarse.config import BEAT_BYTES, PORTS, CoarseConfig
from nearstep_spec.coarse.registers import (
    LINK_COUNTERS,
    SYNC_COUNTERS,
    ErrorCause,
    device_map,
    sync_core_map,
)
from nearstep_spec.csr.model import ADDRESS_WIDTH

HOST_ID_WIDTH = 4  # bits of an ID of the host's window


class MemoryDevice(wiring.Component):
    """A device of the pool.

    The host can access all of the local DRAM through its window at any time; sync cores read and
    write it for jobs; the update kernel, if there is one, updates parameters in it; the snapshot
    copies pages before they are first written. All share the memory burst by burst.

    Flat Verilog ports, with the defaults:

    - `clk`, `rst` (synchronous, active high).
    - `csr__address[13:0] read write write_data[31:0] write_mask[3:0] ack error
      read_data[31:0]`: registers, see `nearstep_spec.coarse.registers.device_maps`.
    - `s_axi__...`: the host's window, 512 bit, IDs of 4 bits; RREADY and BREADY are always
      high.
    - `m_axi__...`: to the local DRAM.
    - `link_out__0__valid ready payload[129:0]`, `link_in__0__valid payload[129:0]`; and 1.
    - `o_interrupt`.
    - `fu__...`, if the functional units are outside: see `UpdateKernel`.

    Parameters
    ----------
    unit : see `UnitMaker`; None: the units of the update kernel are outside.

    Members
    -------
    csr : registers.
    s_axi : AXI4 of the host's window, with RREADY and BREADY always high.
    m_axi : AXI4 to the local DRAM. IDs below `1 << HOST_ID_WIDTH` are of the window; the next `1 <<
        HOST_ID_WIDTH` read IDs are of page copies.
    link_out, link_in : phits of each link; received phits are always accepted.
    o_interrupt : pulses when a job has completed, all jobs have failed, or a run of the update
        kernel has ended.
    fu : the functional units, if there is an update kernel and they are outside.

    Ref: COARSE paper, section IV-A and figure 11.
    """

    def __init__(self, config: CoarseConfig, *, unit: UnitMaker | None = FunctionalUnit) -> None:
        self.config = config
        self.unit = unit
        self.kernel = (
            None
            if config.updater is None
            else KernelCore(config.updater, memory_bytes=config.memory_bytes)
        )
        initiators = config.groups + (self.kernel is not None)
        self.blocks = {
            "pool": CsrBank(device_map(config)),
            **{f"sync{g}": CsrBank(sync_core_map(config)) for g in range(config.groups)},
        }
        widths = {"address_width": config.address_width, "data_width": 8 * BEAT_BYTES}
        self.reads = AxiReadJoin(ports=initiators + 2, id_width=HOST_ID_WIDTH, **widths)
        self.writers = AxiWriteJoin(ports=initiators + 1, id_width=HOST_ID_WIDTH, **widths)
        gate_id_width = len(self.writers.m_axi.aw.payload.id)
        self.gate = SnapshotGate(config, id_width=gate_id_width)
        self.writes = AxiWriteJoin(ports=2, id_width=gate_id_width, fixed=True, **widths)
        id_width = max(len(self.reads.m_axi.ar.payload.id), len(self.writes.m_axi.aw.payload.id))
        super().__init__(
            {
                "csr": In(CsrSignature(ADDRESS_WIDTH + ceil_log2(self.block_count))),
                "s_axi": In(Axi4Signature(**widths, id_width=HOST_ID_WIDTH)),
                "m_axi": Out(Axi4Signature(**widths, id_width=id_width)),
                "link_out": Out(stream.Signature(LinkPhit)).array(PORTS),
                "link_in": In(stream.Signature(LinkPhit, always_ready=True)).array(PORTS),
                "o_interrupt": Out(1),
                **({} if self.kernel is None else outside_ports(self.kernel.config, unit)),
            }
        )

    @property
    def block_count(self) -> int:
        """Number of register blocks."""
        return len(self.blocks) + (self.kernel is not None)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        config, groups = self.config, range(self.config.groups)
        m.submodules.decoder = decoder = CsrDecoder(self.block_count)
        for index, (name, bank) in enumerate(self.blocks.items()):
            m.submodules[f"{name}_bank"] = bank
            wiring.connect(m, getattr(decoder, f"block{index}"), bank.bus)
        wiring.connect(m, wiring.flipped(self.csr), decoder.bus)
        m.submodules.faults = faults = FaultControl(groups=config.groups)
        m.submodules.links = links = LinkLayer(config)
        cores = [SyncCore(config) for _ in groups]
        queues = [
            JobQueue(
                address_width=config.address_width,
                depth=config.queue_jobs,
                exact=bool(config.exact),
            )
            for _ in groups
        ]
        for group in groups:
            m.submodules[f"core{group}"] = cores[group]
            m.submodules[f"queue{group}"] = queues[group]
            self._core(m, group, cores[group], queues[group], links, faults)
        self._memory(m, cores)
        self._links(m, links, faults)
        works = Cat(core.o_busy for core in cores).any()
        drained = Cat(core.o_idle for core in cores).all()
        self._pool(m, faults, links, Mux(faults.o_failed, ~drained, works))
        done = Cat(core.o_done for core in cores).any()
        failed = Signal()
        m.d.sync += failed.eq(faults.o_failed)
        ended = done | (faults.o_failed & ~failed)
        if self.kernel is not None:
            ended |= self._updater(m, self.kernel, decoder)
        m.d.comb += [faults.i_idle.eq(drained), self.o_interrupt.eq(ended)]
        return m

    def _core(
        self,
        m: Module,
        group: int,
        core: SyncCore,
        queue: JobQueue,
        links: LinkLayer,
        faults: FaultControl,
    ) -> None:
        """Connect a sync core to its registers, queue, ring buffers and counters."""
        bank, pool = self.blocks[f"sync{group}"], self.blocks["pool"]
        m.submodules[f"counters{group}"] = counters = EventCounters(tuple(SYNC_COUNTERS))
        job, ended, tag = queue.i_job, Signal(), Signal(15)
        busy = core.o_busy | (queue.o_waiting != 0)
        wiring.connect(m, queue.o, core.job)
        wiring.connect(m, core.send, links.send[group])
        wiring.connect(m, links.receive[group], core.receive)
        m.d.comb += [
            queue.i_push.eq(bank.o_start_go),
            queue.i_clear.eq(faults.o_clear),
            job.source.eq(bank.o_source),
            job.destination.eq(bank.o_destination),
            job.elements.eq(bank.o_elements),
            job.scale.eq(bank.o_scale),
            job.tag.eq(bank.o_job_tag),
            job.operation.eq(bank.o_job_operation),
            job.wire.eq(bank.o_job_wire),
            job.beyond.eq(
                Cat(each[len(job.source) :].any() for each in (bank.o_source, bank.o_destination))
            ),
            core.i_members.eq(bank.o_ring_members),
            core.i_position.eq(bank.o_ring_position),
            core.i_window_base.eq(self._within(pool.o_window_base)),
            core.i_window_limit.eq(self._within(pool.o_window_limit)),
            core.i_halt.eq(faults.o_halt),
            core.i_clear.eq(faults.o_clear),
            links.i_send_port[group].eq(bank.o_ring_send_port),
            links.i_receive_port[group].eq(bank.o_ring_receive_port),
            # After an error only outstanding memory accesses are in progress.
            bank.i_status_busy.eq(Mux(faults.o_failed, ~core.o_idle, busy | bank.o_start_go)),
            bank.i_status_done.eq(ended & ~faults.o_failed),
            *self._outcome(bank, faults),
            bank.i_jobs_waiting.eq(queue.o_waiting),
            bank.i_jobs_overflow.eq(queue.o_overflow),
            bank.i_jobs_tag.eq(tag),
            counters.i_clear.eq(faults.o_clear),
            counters.i_cycles.eq(core.o_busy & ~faults.o_failed),
            counters.i_beats.eq(core.o_beat),
        ]
        if self.config.exact:
            m.d.comb += [
                job.count.eq(bank.o_addends_count),
                job.divisor.eq(bank.o_addends_divisor),
            ]
        fault = faults.i_core[group]
        with m.If(core.o_error_valid):
            m.d.comb += [
                faults.i_core_valid[group].eq(1),
                fault.cause.eq(core.o_error_cause),
                fault.stream.eq(core.o_error_stream),
                fault.response.eq(core.o_error_response),
                fault.address.eq(core.o_error_address),
            ]
        with m.Elif(bank.o_control_abort & busy):
            m.d.comb += [faults.i_core_valid[group].eq(1), fault.cause.eq(ErrorCause.ABORTED)]
        for name in SYNC_COUNTERS:
            m.d.comb += bank.i[name].eq(counters.o[name])
            if name.startswith("stall"):
                m.d.comb += counters.i[name].eq(getattr(core, f"o_{name}"))
        with m.If(core.job.valid & core.job.ready):
            m.d.sync += tag.eq(core.job.payload.tag)
        with m.If(core.o_done):
            m.d.sync += [bank.i_completed.eq(bank.i_completed + 1), ended.eq(1)]
        with m.If(bank.o_start_go):
            m.d.sync += ended.eq(0)
        with m.If(faults.o_clear):
            m.d.sync += [bank.i_completed.eq(0), ended.eq(0)]

    def _updater(self, m: Module, kernel: KernelCore, decoder: CsrDecoder) -> Value:
        """Connect the update kernel to the last port of the local DRAM; return whether a run has
        ended.
        """
        m.submodules.kernel = kernel
        wiring.connect(m, getattr(decoder, f"block{len(self.blocks)}"), kernel.csr)
        connect_channels(m, self.reads.s_axi[-1], kernel.m_axi)
        connect_channels(m, self.writers.s_axi[-1], kernel.m_axi)
        connect_units(m, self, kernel, self.unit)
        was_busy = Signal()
        m.d.sync += was_busy.eq(kernel.o_busy)
        return was_busy & ~kernel.o_busy

    def _within(self, address: Value) -> Value:
        """Clip an address of 64 bits to the end of memory."""
        end = self.config.memory_bytes
        return Mux(address > end, end, address)

    @staticmethod
    def _outcome(bank: CsrBank, faults: FaultControl) -> list[Value]:
        """Drive the error registers of a block: every block shows the first fault of the device."""
        return [
            bank.i_status_error.eq(faults.o_failed),
            bank.i_error_cause.eq(faults.o_fault.cause),
            bank.i_error_stream.eq(faults.o_fault.stream),
            bank.i_error_response.eq(faults.o_fault.response),
            bank.i_error_address.eq(faults.o_fault.address),
        ]

    def _memory(self, m: Module, cores: list[SyncCore]) -> None:
        """Connect all readers and writers of the local DRAM."""
        m.submodules.reads = reads = self.reads
        m.submodules.writers = writers = self.writers
        m.submodules.gate = gate = self.gate
        m.submodules.writes = writes = self.writes
        host_reads, copy_reads, *core_reads = reads.s_axi
        host_writes, *core_writes = writers.s_axi
        connect_channels(m, host_reads, self.s_axi)
        connect_channels(m, host_writes, self.s_axi)
        for core, read, write in zip(cores, core_reads, core_writes, strict=self.kernel is None):
            connect_channels(m, read, core.read)
            connect_channels(m, write, core.write)
        connect_channels(m, copy_reads, gate.read)
        connect_channels(m, gate.s_axi, writers.m_axi)
        connect_channels(m, writes.s_axi[0], gate.m_axi)
        connect_channels(m, writes.s_axi[1], gate.write)
        connect_channels(m, reads.m_axi, self.m_axi)
        connect_channels(m, writes.m_axi, self.m_axi)

    def _links(self, m: Module, links: LinkLayer, faults: FaultControl) -> None:
        """Connect the link layer to its registers."""
        pool = self.blocks["pool"]
        for port in range(PORTS):
            wiring.connect(m, links.link_out[port], wiring.flipped(self.link_out[port]))
            wiring.connect(m, wiring.flipped(self.link_in[port]), links.link_in[port])
        m.d.comb += [
            links.i_epoch.eq(faults.o_epoch),
            links.i_used.eq(pool.o_link_used),
            links.i_silence_limit.eq(pool.o_silence_limit),
            links.i_keepalive.eq(pool.o_keepalive),
            links.i_retry.eq(pool.o_retry),
            links.i_abort.eq(faults.o_failed),
            links.i_abort_cause.eq(faults.o_origin.cause),
            links.i_abort_device.eq(faults.o_origin.device),
            links.i_abort_port.eq(faults.o_origin.port),
            links.i_clear.eq(faults.o_clear),
            faults.i_silent.eq(links.o_silent),
            faults.i_peer.eq(links.o_peer_abort),
            faults.i_peer_origin.cause.eq(links.o_peer_cause),
            faults.i_peer_origin.device.eq(links.o_peer_device),
            faults.i_peer_origin.port.eq(links.o_peer_port),
            faults.i_device.eq(pool.o_link_device),
            faults.i_epoch.eq(pool.o_link_epoch),
        ]

    def _pool(self, m: Module, faults: FaultControl, links: LinkLayer, busy: Value) -> None:
        """Connect the pool's registers, counters and the snapshot."""
        pool, gate = self.blocks["pool"], self.gate
        aborting = Signal()
        names = [f"link{port}_{name}" for port in range(PORTS) for name in LINK_COUNTERS]
        m.submodules.link_counters = counters = EventCounters(names)
        m.submodules.copy_counters = copies = EventCounters(("pages_copied", "stall"))
        with m.If(pool.o_control_abort):
            m.d.sync += aborting.eq(1)
        with m.Elif(faults.o_clear):
            m.d.sync += aborting.eq(0)
        m.d.comb += [
            links.i_watch.eq(busy),
            faults.i_abort.eq(pool.o_control_abort),
            pool.i_status_busy.eq(busy | pool.o_control_abort | aborting),
            pool.i_status_done.eq(0),
            *self._outcome(pool, faults),
            pool.i_error_link_cause.eq(faults.o_origin.cause),
            pool.i_error_link_device.eq(faults.o_origin.device),
            pool.i_error_link_port.eq(faults.o_origin.port),
            counters.i_clear.eq(faults.o_clear),
            gate.i_open.eq(pool.o_start_go),
            gate.i_close.eq(pool.o_snapshot_control_close),
            gate.i_base.eq(pool.o_snapshot_base),
            gate.i_area.eq(pool.o_snapshot_area),
            gate.i_pages.eq(pool.o_snapshot_pages),
            gate.i_word.eq(pool.o_page_number),
            pool.i_snapshot_open.eq(gate.o_open),
            pool.i_snapshot_failed.eq(gate.o_failed),
            pool.i_snapshot_taken.eq(gate.o_taken),
            pool.i_snapshot_written.eq(gate.o_written),
            pool.i_snapshot_copied.eq(gate.o_copied),
            copies.i_clear.eq(pool.o_start_go & ~gate.o_open),
            copies.i_pages_copied.eq(gate.o_page_copied),
            copies.i_stall.eq(gate.o_stall & gate.o_open),
            pool.i_snapshot_pages_copied.eq(copies.o_pages_copied),
            pool.i_snapshot_stall.eq(copies.o_stall),
        ]
        for port in range(PORTS):
            for name in LINK_COUNTERS:
                event = f"link{port}_{name}"
                m.d.comb += [
                    counters.i[event].eq(getattr(links.o_events[port], name)),
                    pool.i["links"][port][name].eq(counters.o[event]),
                ]
