"""The commands that firmware executes."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for

from nearstep_hw.nvme.layout import (
    IDENTIFIER_BITS,
    RESULT_BITS,
    STATUS_BITS,
    DoneLayout,
)


class UnderWay(wiring.Component):
    """One admin command and one I/O command, from the fetch to the completion.

    A command that is aborted stays until firmware says that it is done, and has no completion.

    *Timing*: all changes in the next cycle.

    Parameters
    ----------
    queues : pairs of queues, that of admin commands included.

    Members
    -------
    i_take : a command of `i_queue` was fetched; the one before it has ended.
    i_queue, i_identifier : its queue and identifier.
    i_clear : both are aborted.
    i_delete : those of `i_queue` are aborted.
    i_done : commands that were executed.
    i_end : the completion of the I/O command (`i_io`), or of the admin command, was posted or
        cannot be.
    i_io : see `i_end`.
    o_busy : of the admin and of the I/O command: firmware executes it, or it waits.
    o_alive : it was not aborted.
    o_due : it must be completed.
    o_queue, o_identifier, o_status, o_result : of both, while `o_busy`; the last two when due.
    """

    def __init__(self, *, queues: int) -> None:
        number = bits_for(queues - 1)
        super().__init__(
            {
                "i_take": In(1),
                "i_queue": In(number),
                "i_identifier": In(IDENTIFIER_BITS),
                "i_clear": In(1),
                "i_delete": In(1),
                "i_done": In(stream.Signature(DoneLayout)),
                "i_end": In(1),
                "i_io": In(1),
                "o_busy": Out(2),
                "o_alive": Out(2),
                "o_due": Out(2),
                "o_queue": Out(number).array(2),
                "o_identifier": Out(IDENTIFIER_BITS).array(2),
                "o_status": Out(STATUS_BITS).array(2),
                "o_result": Out(RESULT_BITS).array(2),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        alive, done = Signal(2), Signal(2)
        m.d.comb += [
            self.o_alive.eq(self.o_busy & alive & ~self.i_clear.replicate(2)),
            self.o_due.eq(self.o_busy & done & alive),
            self.i_done.ready.eq(1),
        ]
        answer = self.i_done.payload
        for io in range(2):
            aborted = self.i_clear | (self.i_delete & (self.o_queue[io] == self.i_queue))
            with m.If(self.i_done.valid & (answer.io == io)):
                m.d.sync += [
                    done[io].eq(1),
                    self.o_status[io].eq(answer.status),
                    self.o_result[io].eq(answer.result),
                ]
                with m.If(~answer.complete):
                    m.d.sync += self.o_busy[io].eq(0)
            with m.If(aborted):
                m.d.sync += alive[io].eq(0)
            with m.If((done[io] & ~alive[io]) | (self.i_end & (self.i_io == io))):
                m.d.sync += self.o_busy[io].eq(0)
            with m.If(self.i_take & ((self.i_queue != 0) == io)):
                m.d.sync += [
                    self.o_busy[io].eq(1),
                    alive[io].eq(1),
                    done[io].eq(0),
                    self.o_queue[io].eq(self.i_queue),
                    self.o_identifier[io].eq(self.i_identifier),
                ]
        return m
