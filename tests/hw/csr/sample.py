"""A small map with one register of each kind, and a block that has it, for tests."""

from amaranth.hdl import Module
from amaranth.lib.wiring import Component, In, connect, flipped

from nearstep_hw.csr.axi_lite import AxiLiteAdapter, AxiLiteSignature
from nearstep_hw.csr.bank import CsrBank
from nearstep_spec.csr.block import fields, register, value_register
from nearstep_spec.csr.model import Access, Kind, Register, RegisterMap, place, port_name


def sample_map() -> RegisterMap:
    """A block with constants, status, configuration, pulses and counters."""
    status = (
        *fields(Access.STATUS, ("busy", 0, 1, ""), ("level", 4, 7, "")),
        *fields(Access.REFUSED, ("refused", 30, 1, "")),
    )
    wide = fields(
        Access.CONFIG,
        ("low", 3, 20, "", 0x12345),
        ("across", 24, 17, "", 0x1_5A5A),
        ("high", 60, 4, "", 9),
    )
    return RegisterMap(
        name="sample",
        busy="status.busy",
        latch="control.latch",
        clear="control.clear",
        registers=place(
            [
                [
                    value_register("id", Access.CONSTANT, "", reset=0xCAFE_F00D),
                    value_register("map_hash", Access.MAP_HASH, ""),
                ],
                [register("start", Access.PULSE, "", ("go", 0, 1, ""), locked=True)],
                [register("control", Access.PULSE, "", ("latch", 1, 1, ""), ("clear", 31, 1, ""))],
                [
                    Register(name="status", fields=status),
                    value_register("where", Access.STATUS, "", width=64),
                ],
                [
                    Register(name="wide", width=64, locked=True, fields=wide),
                    value_register("free", Access.CONFIG, "", reset=7),
                    value_register("eps", Access.CONFIG, "", kind=Kind.FLOAT32, locked=True),
                ],
                [
                    value_register("cycles", Access.COUNTER, "", width=64),
                    Register(
                        name="beats",
                        width=64,
                        fields=fields(Access.COUNTER, ("value", 0, 40, "")),
                    ),
                ],
            ]
        ),
    )


class AxiLiteBlock(Component):
    """A bank behind an AXI4-Lite adapter, with the hardware ports of the bank."""

    def __init__(self, register_map: RegisterMap) -> None:
        self.bank = CsrBank(register_map)
        self.ports = [
            name
            for register, field in register_map.fields()
            if (name := port_name(register, field)) is not None
        ]
        super().__init__(
            {
                "s_axil": In(AxiLiteSignature()),
                **{name: self.bank.signature.members[name] for name in self.ports},
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.bank = self.bank
        m.submodules.adapter = adapter = AxiLiteAdapter()
        connect(m, flipped(self.s_axil), adapter.s_axil)
        connect(m, adapter.csr, self.bank.bus)
        for name in self.ports:
            inner, outer = getattr(self.bank, name), getattr(self, name)
            m.d.comb += inner.eq(outer) if name.startswith("i_") else outer.eq(inner)
        return m
