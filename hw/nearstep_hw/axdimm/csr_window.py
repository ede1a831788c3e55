"""The CSR window in the host's address space."""

from amaranth import Elaboratable, Module, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axdimm.host_front_end import HostFrontEnd
from nearstep_hw.csr.line import BLOCK_LINES, CsrLineSignature, LineDecoder
from nearstep_spec.axdimm.registers import WINDOW_BLOCKS, WINDOW_BYTES, Block
from nearstep_spec.csr.model import LINE_BYTES, WORD_BYTES
from nearstep_spec.dram.geometry import BEAT_BYTES

START = Block.KERNEL * BLOCK_LINES + 1  # line 1 of every block, see nearstep_spec.csr.block
LINES = WINDOW_BYTES // LINE_BYTES


class CsrWindow(wiring.Component):
    """Answers reads and writes of the CSR window with the latency of the host's bus, in either
    mode.

    *Timing*: `o_read_data` is output `HostFrontEnd.READ_DATA_DELAY` cycles after `i_line`, sampled
    a cycle earlier; write data are taken `HostFrontEnd.WRITE_DATA_DELAY` cycles after `i_write` and
    are in the registers a cycle later. The host's tWTR exceeds the difference, so that a read
    returns the data of an earlier write.

    Members
    -------
    i_line : line of this cycle's command.
    i_write : a write of the line. Reads have no side effects and need no strobe.
    i_write_data, i_write_mask : a mask bit of 1 keeps the byte.
    o_read_data : a line.
    i_acceleration : the kernel may be started.
    o_start_refused : a write of START outside acceleration mode was ignored.
    arbiter, kernel : line ports of the two banks.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                "i_line": In(range(LINES)),
                "i_write": In(1),
                "i_write_data": In(8 * BEAT_BYTES),
                "i_write_mask": In(BEAT_BYTES),
                "o_read_data": Out(8 * BEAT_BYTES),
                "i_acceleration": In(1),
                "o_start_refused": Out(1),
                "arbiter": Out(CsrLineSignature()),
                "kernel": Out(CsrLineSignature()),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.decoder = decoder = LineDecoder(WINDOW_BLOCKS)
        wiring.connect(m, decoder.block0, wiring.flipped(self.arbiter))
        wiring.connect(m, decoder.block1, wiring.flipped(self.kernel))
        line = decoder.line
        lines: list[Value] = [self.i_line]
        writes: list[Value] = [self.i_write]
        for stage in range(1, HostFrontEnd.READ_DATA_DELAY):
            lines.append(Signal(range(LINES), name=f"line{stage}"))
            m.d.sync += lines[-1].eq(lines[-2])
        for stage in range(1, HostFrontEnd.WRITE_DATA_DELAY + 1):
            writes.append(Signal(name=f"write{stage}"))
            m.d.sync += writes[-1].eq(writes[-2])

        start = Signal()
        write = writes[HostFrontEnd.WRITE_DATA_DELAY]
        written = lines[HostFrontEnd.WRITE_DATA_DELAY]
        go = self.i_write_data[0] & ~self.i_write_mask[:WORD_BYTES].any()
        m.d.comb += [
            start.eq(write & (written == START)),
            self.o_read_data.eq(line.read_data),
            self.o_start_refused.eq(start & go & ~self.i_acceleration),
            line.read_address.eq(lines[HostFrontEnd.READ_DATA_DELAY - 1]),
            line.write_address.eq(written),
            line.write.eq(write & ~(start & ~self.i_acceleration)),
            line.write_data.eq(self.i_write_data),
            line.write_mask.eq(~self.i_write_mask),
        ]
        return m
