"""Reaches two of three states."""

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles


@cocotb.test()
async def it_runs(dut: object) -> None:
    cocotb.start_soon(Clock(dut.clk, 10, "ns").start())
    dut.rst.value, dut.x.value = 1, 0
    await ClockCycles(dut.clk, 2)
    dut.rst.value, dut.x.value = 0, 3
    await ClockCycles(dut.clk, 3)
    assert int(dut.y.value) == 5
