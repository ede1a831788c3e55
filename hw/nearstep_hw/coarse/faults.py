"""Faults, which end the jobs of a device, and recovery from them."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.coarse.wire import EPOCH_BITS, MEMBER_BITS
from nearstep_spec.coarse.config import PORTS
from nearstep_spec.coarse.registers import ErrorCause, Stream

FAULT = data.StructLayout(
    {"cause": 8, "stream": 8, "response": 2, "address": 64},
)
"""Fields of the registers `error` and `error_address`."""

ORIGIN = data.StructLayout({"cause": 8, "device": MEMBER_BITS, "port": ceil_log2(PORTS)})
"""Fields of the register `error_link`."""


class FaultControl(wiring.Component):
    """Latches the first fault of a device, ends its jobs and informs neighbours, until an abort.

    An abort by the host also ends all jobs; when no memory access is outstanding, sync cores,
    queues and links are cleared in one cycle, and the new epoch takes effect.

    Parameters
    ----------
    groups : sync cores.

    Members
    -------
    i_core : fault of each sync core; `i_core_valid` has a bit for each.
    i_silent : a bit for each link: its peer is dead.
    i_peer, i_peer_origin : a neighbour ended its jobs, and the first fault that it reports.
    i_device, i_epoch : written by the host.
    i_abort : pulse.
    i_idle : no memory access of the sync cores is outstanding.
    o_epoch : the current epoch.
    o_halt : sync cores end their jobs.
    o_clear : pulse: clear all state.
    o_failed : a fault is latched; the neighbours must be informed.
    o_fault, o_origin : the first fault and its origin.

    Ref: COARSE paper, section IV-A.
    """

    def __init__(self, *, groups: int) -> None:
        self.groups = groups
        super().__init__(
            {
                "i_core": In(FAULT).array(groups),
                "i_core_valid": In(groups),
                "i_silent": In(PORTS),
                "i_peer": In(1),
                "i_peer_origin": In(ORIGIN),
                "i_device": In(MEMBER_BITS),
                "i_epoch": In(EPOCH_BITS),
                "i_abort": In(1),
                "i_idle": In(1),
                "o_epoch": Out(EPOCH_BITS),
                "o_halt": Out(1),
                "o_clear": Out(1),
                "o_failed": Out(1),
                "o_fault": Out(FAULT),
                "o_origin": Out(ORIGIN),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        aborting = Signal()
        fault, origin = self.o_fault, self.o_origin

        m.d.comb += self.o_halt.eq(self.o_failed | aborting)
        with m.If(~self.o_failed):
            with m.If(self.i_peer):
                m.d.sync += [
                    self.o_failed.eq(1),
                    fault.eq(0),
                    fault.cause.eq(ErrorCause.PEER),
                    origin.eq(self.i_peer_origin),
                ]
            for port in range(PORTS):
                with m.If(self.i_silent[port]):
                    m.d.sync += [
                        self.o_failed.eq(1),
                        fault.eq(0),
                        fault.cause.eq(ErrorCause.SILENT),
                        fault.stream.eq(Stream.LINK0 + port),
                        origin.cause.eq(ErrorCause.SILENT),
                        origin.device.eq(self.i_device),
                        origin.port.eq(port),
                    ]
            for group in range(self.groups):
                with m.If(self.i_core_valid[group]):
                    m.d.sync += [
                        self.o_failed.eq(1),
                        fault.eq(self.i_core[group]),
                        origin.cause.eq(self.i_core[group].cause),
                        origin.device.eq(self.i_device),
                        origin.port.eq(0),
                    ]
        m.d.comb += self.o_clear.eq(aborting & self.i_idle)
        with m.If(self.o_clear):
            m.d.sync += [
                aborting.eq(0),
                self.o_failed.eq(0),
                fault.eq(0),
                origin.eq(0),
                self.o_epoch.eq(self.i_epoch),
            ]
        with m.If(self.i_abort):
            m.d.sync += aborting.eq(1)
        return m
