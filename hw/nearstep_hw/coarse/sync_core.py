"""A sync core: all-reduces tensors of the local DRAM with the other devices of its ring."""

from amaranth import Cat, Const, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import (
    Axi4ReadSignature,
    Axi4WriteSignature,
    Response,
    connect_channels,
)
from nearstep_hw.coarse.cut import TensorCut
from nearstep_hw.coarse.entry import StepLayout, most_members, most_woven
from nearstep_hw.coarse.job_check import JobCheck
from nearstep_hw.coarse.local_load import LocalLoad
from nearstep_hw.coarse.receive_path import ReceivePath
from nearstep_hw.coarse.reduce import Reduce
from nearstep_hw.coarse.send_path import SendPath
from nearstep_hw.coarse.sequencer import StepSequencer
from nearstep_hw.coarse.sums import OwnerSums
from nearstep_hw.coarse.walker import EntryWalker
from nearstep_hw.coarse.wire import (
    MEMBER_BITS,
    DescriptionLayout,
    EntryPhit,
    JobLayout,
    Wire,
)
from nearstep_hw.coarse.write_back import WriteBack
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_spec.coarse.config import BEAT_BYTES, BEAT_ELEMENTS, CoarseConfig
from nearstep_spec.coarse.registers import ErrorCause, Stream

_STEPS_AHEAD = 2


class SyncCore(wiring.Component):
    """Executes one job at a time: every part of every chunk makes 2 (members - 1) hops.

    The job's description is sent to the next device, and compared with that of the previous device.
    Then parts of chunks are sent, combined with the device's own values, and the results written;
    see `EntryWalker` for the order. FIFOs of an entry before and after the ALUs overlap steps that
    only read or only write with the links. After an error or `i_halt` no job or burst starts until
    `i_clear`. The source is never written.

    In an exact sum, a job with a divisor, lists of addends go to the owner of their part, which
    adds them in `OwnerSums`. Its rounds are interleaved if what is then on its way fits into the
    buffers between two cores; else a batch has as many chunks as fit.

    *Timing*: a beat of the ALUs or a phit on each link a cycle, whichever takes longer. A job's
    first entry is sent 60 cycles and the latency of the memory after the job was accepted; 31 of
    the cycles divide the tensor by the ring (`TensorCut`). The first phit of a beat's result
    follows `Reduce.latency` + 8 = 24 cycles after the beat's last phit.

    Members
    -------
    i_members, i_position : of the ring; held while a job is running.
    i_window_base, i_window_limit : first byte that jobs may access, and first byte after the
        window; held.
    job : jobs.
    read, write : local DRAM; RREADY and BREADY are always high.
    send : entries for the next device.
    receive : entries from the device before.
    o_busy : a job is running.
    o_done : a job has completed: all its writes are acknowledged.
    o_error_valid : pulse: a job has failed; qualifies the other errors.
    o_error_cause, o_error_stream : an `ErrorCause`, a `Stream`.
    o_error_response, o_error_address : response and address at the local DRAM.
    i_halt : starts no job or burst; issued bursts complete.
    o_idle : no access of the local DRAM is outstanding.
    i_clear : clears all state; only while halted and idle.
    o_beat : the ALUs accept a beat.
    o_stall_local, o_stall_receive, o_stall_send, o_stall_write : the ALUs stall on this stream;
        valid only while a job is running.

    Ref: COARSE paper, section IV-A and figure 11.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        self.job_layout = JobLayout(address_width=config.address_width, exact=bool(config.exact))
        axi = {
            "address_width": config.address_width,
            "data_width": 8 * BEAT_BYTES,
            "id_width": 1,
        }
        super().__init__(
            {
                "i_members": In(MEMBER_BITS),
                "i_position": In(MEMBER_BITS),
                "i_window_base": In(config.address_width + 1),
                "i_window_limit": In(config.address_width + 1),
                "job": In(stream.Signature(self.job_layout)),
                "read": Out(Axi4ReadSignature(**axi)),
                "write": Out(Axi4WriteSignature(**axi)),
                "send": Out(stream.Signature(EntryPhit)),
                "receive": In(stream.Signature(EntryPhit)),
                "o_busy": Out(1),
                "o_done": Out(1),
                "o_error_valid": Out(1),
                "o_error_cause": Out(8),
                "o_error_stream": Out(8),
                "o_error_response": Out(2),
                "o_error_address": Out(config.address_width),
                "i_halt": In(1),
                "o_idle": Out(1),
                "i_clear": In(1),
                "o_beat": Out(1),
                "o_stall_local": Out(1),
                "o_stall_receive": Out(1),
                "o_stall_send": Out(1),
                "o_stall_write": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.check = check = JobCheck(self.config)
        job = Signal(self.job_layout)
        stop = Signal()
        failed = Signal()
        start = Signal()
        m.d.comb += stop.eq(self.i_halt | failed)

        load, write = self._memory(m, job, stop)
        sequencer = self._steps(m, job, load, start, stop)
        reduce = self._alus(m, job, sequencer, write, stop)
        receive, send = self._ring(m, job, sequencer, reduce, stop)
        m.d.comb += [
            check.i_start.eq(start),
            check.i_job.eq(job),
            check.i_members.eq(self.i_members),
            check.i_position.eq(self.i_position),
            check.i_window_base.eq(self.i_window_base),
            check.i_window_limit.eq(self.i_window_limit),
        ]
        with m.FSM() as fsm:
            with m.State("IDLE"):
                m.d.comb += self.job.ready.eq(~stop)
                with m.If(self.job.valid & self.job.ready):
                    m.d.sync += job.eq(self.job.payload)
                    m.next = "START"
            with m.State("START"):
                m.d.comb += start.eq(1)
                m.next = "CHECK"
            with m.State("CHECK"), m.If(check.o_done & (check.o_cause == ErrorCause.NONE)):
                m.next = "DESCRIBE"
            with m.State("DESCRIBE"):
                m.d.comb += send.i_describe.eq(1)
                with m.If(send.o_described):
                    m.next = "RUN"
            with m.State("RUN"):
                m.d.comb += receive.i_compare.eq(1)
                with m.If(reduce.o_end):
                    m.next = "DRAIN"
            with m.State("DRAIN"), m.If(write.o_idle & send.o_idle & ~stop):
                m.d.comb += [self.o_done.eq(1), receive.i_restart.eq(1)]
                m.next = "IDLE"
            m.d.comb += self.o_busy.eq(~fsm.ongoing("IDLE") & ~failed)
        self._errors(m, check, load, write, receive, failed)
        return ResetInserter(self.i_clear)(m)

    def _memory(self, m: Module, job: data.View, stop: Signal) -> tuple[LocalLoad, WriteBack]:
        m.submodules.load = load = LocalLoad(self.config)
        m.submodules.write = write = WriteBack(self.config)
        connect_channels(m, load.bus, self.read)
        connect_channels(m, write.bus, self.write)
        left_out = Signal(range(BEAT_ELEMENTS))  # elements missing in the last beat
        m.d.comb += [
            left_out.eq(-job.elements),
            load.i_source.eq(job.source),
            load.i_stop.eq(stop),
            write.i_destination.eq(job.destination),
            write.i_tail.eq(((1 << BEAT_BYTES) - 1) >> (left_out << 2)),
            write.i_stop.eq(stop),
            self.o_idle.eq(load.o_idle & write.o_bus_idle),
        ]
        return load, write

    def _steps(
        self, m: Module, job: data.View, load: LocalLoad, start: Signal, stop: Signal
    ) -> StepSequencer:
        """Add two walkers over the same steps: one prefetches values, one executes."""
        m.submodules.cut = cut = TensorCut(self.config)
        m.submodules.ahead = ahead = EntryWalker(self.config, loads=True)
        m.submodules.walker = walker = EntryWalker(self.config, loads=False)
        m.submodules.steps = steps = StreamFifo(StepLayout(self.config), depth=_STEPS_AHEAD)
        m.submodules.sequencer = sequencer = StepSequencer(self.config)
        m.d.comb += [
            cut.i_start.eq(start),
            cut.i_elements.eq(job.elements),
            cut.i_members.eq(self.i_members),
            cut.i_wire.eq(job.wire),
        ]
        batch = self._batch(m, job) if self.config.exact else None
        for each in (ahead, walker):
            m.d.comb += [
                each.i_start.eq(cut.o_done & ~stop),
                each.i_members.eq(self.i_members),
                each.i_position.eq(self.i_position),
                each.i_chunks.eq(cut.o_chunks),
                each.i_entry_beats.eq(cut.o_entry_beats),
                each.i_chunk_beats.eq(cut.o_chunk_beats),
                each.i_tail_beats.eq(cut.o_tail_beats),
                each.i_tail_exist.eq(cut.o_tail_exist),
            ]
            if batch is not None:
                m.d.comb += [
                    each.i_exact.eq(job.divisor != 0),
                    each.i_woven.eq(
                        (job.divisor != 0) & (self.i_members <= most_woven(self.config))
                    ),
                    each.i_halves.eq(job.wire != Wire.FP32),
                    each.i_ahead.eq(batch),
                ]
        wiring.connect(m, ahead.o, load.i)
        wiring.connect(m, walker.o, steps.i)
        wiring.connect(m, steps.o, sequencer.i)
        wiring.connect(m, load.o, sequencer.local)
        return sequencer

    def _alus(
        self, m: Module, job: data.View, sequencer: StepSequencer, write: WriteBack, stop: Signal
    ) -> Reduce:
        m.submodules.reduce = reduce = Reduce(self.config)
        wiring.connect(m, sequencer.o, reduce.i)
        wiring.connect(m, sequencer.writes, write.i)
        if not self.config.exact:
            wiring.connect(m, reduce.write, write.data)
        m.d.comb += [
            reduce.i_operation.eq(job.operation),
            reduce.i_wire.eq(job.wire),
            reduce.i_scale.eq(job.scale),
            reduce.i_stop.eq(stop),
            self.o_beat.eq(sequencer.o.valid & sequencer.o.ready),
            self.o_stall_local.eq(sequencer.o_stall_local),
            self.o_stall_receive.eq(sequencer.o_stall_receive),
            self.o_stall_send.eq(reduce.o_wait_send),
            self.o_stall_write.eq(reduce.o_wait_write | sequencer.o_stall_write),
        ]
        if self.config.exact:
            m.submodules.sums = sums = OwnerSums(self.config)
            wiring.connect(m, reduce.sums, sums.i)
            m.d.comb += [
                sums.i_wire.eq(job.wire),
                sums.i_divisor.eq(job.divisor),
                reduce.i_hold.eq(sums.o_busy),
            ]
            self._either(m, reduce.write, sums.write, write.data)
        return reduce

    def _batch(self, m: Module, job: data.View) -> Signal:
        """Return the chunks of a batch: as many as fit into the buffers between two cores."""
        most = self.config.chunks_ahead
        ahead = Signal(range(most + 1))
        fit = Cat(self.i_members <= most_members(self.config, n) for n in range(1, most + 1))
        m.d.sync += ahead.eq(Mux(job.divisor != 0, sum(fit, Const(0)), most))
        return ahead

    @staticmethod
    def _either(
        m: Module, first: stream.Interface, second: stream.Interface, to: stream.Interface
    ) -> None:
        """Connect two streams of which one at most offers a payload."""
        m.d.comb += [
            to.valid.eq(first.valid | second.valid),
            to.payload.eq(Mux(second.valid, second.payload, first.payload)),
            first.ready.eq(to.ready),
            second.ready.eq(to.ready),
        ]

    def _ring(
        self, m: Module, job: data.View, sequencer: StepSequencer, reduce: Reduce, stop: Signal
    ) -> tuple[ReceivePath, SendPath]:
        m.submodules.receive = receive = ReceivePath(self.config)
        m.submodules.send = send = SendPath(self.config)
        description = Signal(DescriptionLayout(exact=bool(self.config.exact)))
        wiring.connect(m, wiring.flipped(self.receive), receive.i)
        wiring.connect(m, receive.o, sequencer.received)
        if self.config.exact:
            self._either(m, reduce.send, m.submodules.sums.send, send.i)
            m.d.comb += description.divisor.eq(job.divisor)
        else:
            wiring.connect(m, reduce.send, send.i)
        wiring.connect(m, send.o, wiring.flipped(self.send))
        m.d.comb += [
            *(
                getattr(description, name).eq(getattr(job, name))
                for name in ("elements", "scale", "tag", "operation", "wire")
            ),
            description.members.eq(self.i_members),
            receive.i_stop.eq(stop),
        ]
        for each in (receive, send):
            m.d.comb += [
                each.i_description.eq(description),
                each.i_halves.eq(job.wire != Wire.FP32),
            ]
        return receive, send

    def _errors(
        self,
        m: Module,
        check: JobCheck,
        load: LocalLoad,
        write: WriteBack,
        receive: ReceivePath,
        failed: Signal,
    ) -> None:
        """Latch the first error of a job, which stops the job."""
        m.d.sync += self.o_error_valid.eq(0)
        with m.If(~failed):
            with m.If(check.o_done & (check.o_cause != ErrorCause.NONE)):
                self._fail(m, failed, check.o_cause, check.o_stream, Response.OKAY, check.o_address)
            with m.If(receive.o_mismatch):
                self._fail(m, failed, ErrorCause.MISMATCH, Stream.RECEIVE, Response.OKAY, 0)
            for cause, where, part in (
                (ErrorCause.WRITE_RESPONSE, Stream.DESTINATION, write),
                (ErrorCause.READ_RESPONSE, Stream.SOURCE, load),
            ):
                with m.If(part.fault.valid):
                    self._fail(m, failed, cause, where, part.fault.response, part.fault.address)

    def _fail(
        self,
        m: Module,
        failed: Signal,
        cause: object,
        where: object,
        response: object,
        address: object,
    ) -> None:
        m.d.sync += [
            failed.eq(1),
            self.o_error_valid.eq(1),
            self.o_error_cause.eq(cause),
            self.o_error_stream.eq(where),
            self.o_error_response.eq(response),
            self.o_error_address.eq(address),
        ]
