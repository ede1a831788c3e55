"""State machine of a run."""

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.updater.fault import FaultLayout
from nearstep_spec.updater.registers import ErrorCause


class RunControl(wiring.Component):
    """Controls a run and latches its first fault.

    A run is checked, verified if `i_verify`, launched, and done when `i_whole`. A fault or an abort
    stops the run: no further burst is issued, and once no burst is outstanding the kernel is idle,
    with `o_error` high and `o_done` low. START clears the error.

    *Timing*: `o_busy` the cycle after `i_go`; all outputs but `o_check` are registers or decoded
    from the state.

    Parameters
    ----------
    cut : registers the inputs from the movers: one more cycle of latency.

    Members
    -------
    i_go : START; ignored while busy.
    i_abort : ABORT; ignored when idle.
    i_empty : the run has no elements.
    o_check, i_checked, i_check_fault : start and outcome of the checks.
    i_verify : the indices must be verified before any write.
    o_verify, i_verified : start of the verification, and its success, with no burst outstanding.
    o_verifying : the verification is in progress.
    o_launch : starts the movers.
    i_fault : a fault while verifying or running; cause 0 is none.
    i_whole : all writes of the run are acknowledged.
    i_drained : no burst is outstanding, and the pipelines are empty.
    o_stop : issue no bursts, and discard the data of outstanding ones.
    o_clear : no run is in progress: clears buffers and counters of the data path.
    o_busy, o_done, o_error, o_fault : status and first fault of the run, for the registers.
    """

    i_go: In(1)
    i_abort: In(1)
    i_empty: In(1)
    o_check: Out(1)
    i_checked: In(1)
    i_check_fault: In(FaultLayout())
    i_verify: In(1)
    o_verify: Out(1)
    o_verifying: Out(1)
    i_verified: In(1)
    o_launch: Out(1)
    i_fault: In(FaultLayout())
    i_whole: In(1)
    i_drained: In(1)
    o_stop: Out(1)
    o_clear: Out(1)
    o_busy: Out(1)
    o_done: Out(1)
    o_error: Out(1)
    o_fault: Out(FaultLayout())

    def __init__(self, *, cut: bool = False) -> None:
        self.cut = cut
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        m = Module()
        fault, whole, verified, drained = (
            self.i_fault,
            self.i_whole,
            self.i_verified,
            self.i_drained,
        )
        if self.cut:
            fault = Signal(FaultLayout())
            whole, verified, drained, stopped = (Signal() for _ in range(4))
        aborted = FaultLayout().const({"cause": ErrorCause.ABORTED})
        m.d.comb += [
            self.o_error.eq(self.o_fault.cause != 0),
            self.o_clear.eq(1),
            self.o_busy.eq(1),
        ]
        with m.FSM() as fsm:
            with m.State("IDLE"):
                m.d.comb += self.o_busy.eq(0)
                with m.If(self.i_go):
                    m.d.comb += self.o_check.eq(1)
                    m.d.sync += [self.o_done.eq(0), self.o_fault.eq(0)]
                    m.next = "CHECK"
            with m.State("CHECK"):
                with m.If(self.i_abort):
                    m.d.sync += self.o_fault.eq(aborted)
                    m.next = "IDLE"
                with m.Elif(self.i_checked):
                    m.next = "IDLE"
                    with m.If(self.i_check_fault.cause != 0):
                        m.d.sync += self.o_fault.eq(self.i_check_fault)
                    with m.Elif(self.i_empty):
                        m.d.sync += self.o_done.eq(1)
                    with m.Elif(self.i_verify):
                        m.next = "BEGIN_VERIFY"
                    with m.Else():
                        m.next = "LAUNCH"
            with m.State("BEGIN_VERIFY"):
                m.d.comb += [self.o_clear.eq(0), self.o_verify.eq(1), self.o_verifying.eq(1)]
                m.next = "VERIFY"
                with m.If(self.i_abort):
                    m.d.sync += self.o_fault.eq(aborted)
                    m.next = "STOP"
            with m.State("VERIFY"):
                m.d.comb += [self.o_clear.eq(0), self.o_verifying.eq(1)]
                with m.If(fault.cause != 0):
                    m.d.sync += self.o_fault.eq(fault)
                    m.next = "STOP"
                with m.Elif(self.i_abort):
                    m.d.sync += self.o_fault.eq(aborted)
                    m.next = "STOP"
                with m.Elif(verified):
                    m.next = "VERIFIED"
            with m.State("VERIFIED"):
                m.next = "LAUNCH"
                with m.If(self.i_abort):
                    m.d.sync += self.o_fault.eq(aborted)
                    m.next = "STOP"
            with m.State("LAUNCH"):
                m.d.comb += [self.o_clear.eq(0), self.o_launch.eq(1)]
                m.next = "RUN"
                with m.If(self.i_abort):
                    m.d.sync += self.o_fault.eq(aborted)
                    m.next = "STOP"
            with m.State("RUN"):
                m.d.comb += self.o_clear.eq(0)
                with m.If(fault.cause != 0):
                    m.d.sync += self.o_fault.eq(fault)
                    m.next = "STOP"
                with m.Elif(whole):
                    m.d.sync += self.o_done.eq(1)
                    m.next = "IDLE"
                with m.Elif(self.i_abort):
                    m.d.sync += self.o_fault.eq(aborted)
                    m.next = "STOP"
            with m.State("STOP"):
                m.d.comb += [self.o_clear.eq(0), self.o_stop.eq(1)]
                with m.If(drained):
                    m.next = "IDLE"
        if self.cut:
            # Before these states the outputs of the parts are of another run.
            running, verifying = fsm.ongoing("RUN"), fsm.ongoing("VERIFY")
            m.d.sync += [
                fault.as_value().eq(Mux(running | verifying, self.i_fault.as_value(), 0)),
                whole.eq(self.i_whole & running),
                verified.eq(self.i_verified & verifying),
                # A burst issued in the cycle before STOP is outstanding in its first cycle.
                stopped.eq(self.o_stop),
                drained.eq(self.i_drained & stopped),
            ]
        return m
