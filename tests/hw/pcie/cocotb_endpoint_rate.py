"""Who makes whom wait, when nothing else does: the link, not the endpoint."""

import cocotb
from cocotb.triggers import RisingEdge
from pcie_bench import CONFIG, PcieBench


class Counts:
    """Cycles of a stream from its first beat to its last one: beats, no valid, no ready."""

    def __init__(self, bench: PcieBench, prefix: str) -> None:
        self.bench = bench
        self.valid = getattr(bench.dut, f"{prefix}__tvalid")
        self.ready = getattr(bench.dut, f"{prefix}__tready")
        self.beats = self.idle = self.stalled = 0
        self._quiet = 0

    async def run(self) -> None:
        while True:
            await RisingEdge(self.bench.clock)
            if not self.valid.value:
                self._quiet += 1
                continue
            if self.beats:
                self.idle += self._quiet
            self._quiet = 0
            if self.ready.value:
                self.beats += 1
            else:
                self.stalled += 1

    def log(self, what: str) -> None:
        cycles = self.beats + self.idle + self.stalled
        cocotb.log.info(
            "%s: %d beats in %d cycles, %d without valid, %d without ready",
            what, self.beats, cycles, self.idle, self.stalled,
        )  # fmt: skip


@cocotb.test()
@cocotb.parametrize(max_payload=[256, 1024])
async def reads_leave_no_gaps(dut: object, max_payload: int) -> None:
    """Reads of 4 KiB at once: CC waits for the link, hardly ever the link for CC."""
    bench = PcieBench(dut, max_payload=max_payload)
    await bench.begin()
    cc = Counts(bench, "s_axis_cc")
    cocotb.start_soon(cc.run())
    await bench.read(0, CONFIG.memory_bytes)
    cc.log(f"reads, completions of {max_payload} bytes")
    assert cc.beats > CONFIG.memory_bytes * 8 // CONFIG.width
    assert cc.idle <= (cc.beats + cc.stalled) // 20
    await bench.finish()


@cocotb.test()
async def writes_are_taken_without_waiting(dut: object) -> None:
    bench = PcieBench(dut)
    await bench.begin()
    cq = Counts(bench, "m_axis_cq")
    cocotb.start_soon(cq.run())
    await bench.write(0, bench.random.randbytes(16 << 10))
    await bench.write(5, bench.random.randbytes(16 << 10))
    await bench.settle()
    cq.log("writes of 256 bytes")
    assert cq.beats > (32 << 10) * 8 // CONFIG.width
    assert cq.stalled <= cq.beats // 20
    await bench.finish()
