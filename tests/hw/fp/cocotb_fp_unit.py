"""Drives every unit of a bank under cocotb: corners, idle cycles, and a reset in mid-run."""

import random

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge, RisingEdge

from nearstep_hw.fp.unit import OPERATIONS
from nearstep_sim.bench import patterns
from nearstep_sim.bench.vectors import golden

COUNT = 400


class UnitPort:
    """Ports of unit `k` of the bank."""

    def __init__(self, dut, k, operation):
        self.valid = getattr(dut, f"u{k}_i_valid")
        self.operands = [getattr(dut, f"u{k}_i_{x}") for x in "abc"[: operation.operands]]
        self.o_valid = getattr(dut, f"u{k}_o_valid")
        self.z = getattr(dut, f"u{k}_o_z")
        self.flags = getattr(dut, f"u{k}_o_flags")


async def start(dut):
    """Clock and reset; all units idle."""
    for k, operation in enumerate(OPERATIONS.values()):
        port = UnitPort(dut, k, operation)
        port.valid.value = 0
        for operand in port.operands:
            operand.value = 0
    cocotb.start_soon(Clock(dut.clk, 4, unit="ns").start())
    dut.rst.value = 1
    for _ in range(3):
        await FallingEdge(dut.clk)
    dut.rst.value = 0


@cocotb.test()
@cocotb.parametrize(name=list(OPERATIONS))
async def results_come_in_order_after_the_latency(dut, name):
    operation = OPERATIONS[name]
    port = UnitPort(dut, list(OPERATIONS).index(name), operation)
    columns = patterns.vectors(operation, COUNT, random.getrandbits(32))
    expected_z, expected_flags = golden(operation, columns)
    await start(dut)
    sent, received, pending = 0, 0, [False] * operation.depth
    while received < COUNT:
        valid = sent < COUNT and random.random() < 0.8
        port.valid.value = int(valid)
        for operand, column in zip(port.operands, columns, strict=True):
            operand.value = int(column[sent]) if valid else random.getrandbits(len(operand))
        sent += valid
        pending = [*pending[1:], valid]
        await RisingEdge(dut.clk)
        await FallingEdge(dut.clk)
        assert int(port.o_valid.value) == pending[0], "o_valid is i_valid of the latency before"
        if pending[0]:
            case = [hex(column[received]) for column in columns]
            assert int(port.z.value) == expected_z[received], case
            assert int(port.flags.value) == expected_flags[received], case
            received += 1
    dut._log.info("%s: %d results", name, received)
    assert received == COUNT


@cocotb.test()
async def reset_in_mid_run_drops_what_is_in_flight(dut):
    await start(dut)
    ports = [UnitPort(dut, k, operation) for k, operation in enumerate(OPERATIONS.values())]
    for port in ports:
        port.valid.value = 1
    for _ in range(10):
        await FallingEdge(dut.clk)
    for port in ports:
        port.valid.value = 0
    dut.rst.value = 1
    await FallingEdge(dut.clk)
    dut.rst.value = 0
    for _ in range(40):
        assert not any(int(port.o_valid.value) for port in ports)
        await FallingEdge(dut.clk)
