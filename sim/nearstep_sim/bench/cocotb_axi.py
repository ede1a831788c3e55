"""Joins the Python AXI4 memory and checker to a port of a design under cocotb."""

from collections.abc import Callable

from cocotb.handle import HierarchyObject
from cocotb.triggers import RisingEdge

from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.axi_memory import AxiMemory
from nearstep_sim.bench.axi_sample import (
    Address,
    AxiSample,
    ReadBeat,
    WriteBeat,
    WriteResponse,
)

PAYLOADS = {
    "ar": (Address, ("id", "addr", "len", "size", "burst")),
    "r": (ReadBeat, ("id", "data", "resp", "last")),
    "aw": (Address, ("id", "addr", "len", "size", "burst")),
    "w": (WriteBeat, ("data", "strb", "last")),
    "b": (WriteResponse, ("id", "resp")),
}


class AxiPort:
    """Samples an AXI4 port `<prefix>__<member>` of `dut` at clock edges.

    Observers are called with each `AxiSample`; `memory`, if given, drives the port. `write_prefix`
    is the prefix of AW, W and B, if different.
    """

    def __init__(
        self,
        dut: HierarchyObject,
        prefix: str,
        *,
        checker: AxiChecker,
        memory: AxiMemory | None = None,
        write_prefix: str | None = None,
    ) -> None:
        self.dut = dut
        self.checker = checker
        self.memory = memory
        self.observers: list[Callable[[AxiSample], None]] = []

        def handle(name: str) -> object:
            writes = name.startswith(("aw", "w", "b")) and write_prefix is not None
            return getattr(dut, f"{write_prefix if writes else prefix}__{name}")

        self.valid = {channel: handle(f"{channel}valid") for channel in PAYLOADS}
        self.ready = {channel: handle(f"{channel}ready") for channel in PAYLOADS}
        self.payload = {
            channel: tuple(handle(f"{channel}{name}") for name in names)
            for channel, (_, names) in PAYLOADS.items()
        }
        self._shown: AxiSample | None = None

    def sample(self) -> AxiSample:
        """Sample the port."""
        sample = AxiSample()
        for channel, (layout, _) in PAYLOADS.items():
            if self.valid[channel].value:
                values = (int(signal.value) for signal in self.payload[channel])
                setattr(sample, channel, layout(*values))
        sample.ready = frozenset(name for name, signal in self.ready.items() if signal.value)
        return sample

    async def run(self) -> None:
        """Follow the port for ever; `rst` resets checker and memory."""
        if self.memory is not None:
            self._drive()
        while True:
            await RisingEdge(self.dut.clk)
            if self.dut.rst.value:
                self.checker.reset()
                if self.memory is not None:
                    self.memory.reset()
                    self._drive()
                continue
            sample = self.sample()
            self.checker.step(sample)
            for observer in self.observers:
                observer(sample)
            if self.memory is not None:
                self.memory.step(sample)
                self._drive()

    def _drive(self) -> None:
        for channel in ("r", "b"):
            shown = getattr(self.memory, channel)
            self.valid[channel].value = int(shown is not None)
            if shown is not None:
                for signal, value in zip(self.payload[channel], shown, strict=True):
                    signal.value = value
        for channel in ("ar", "aw", "w"):
            self.ready[channel].value = int(channel in self.memory.ready)
