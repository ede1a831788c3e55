"""A small map with one register of each kind, and a block that has it, for tests."""

from amaranth.hdl import Module
from amaranth.lib.wiring import Component, In, connect, flipped

from nearstep_hw.csr.axi_lite import AxiLiteAdapter, AxiLiteSignature
from nearstep_hw.csr.bank import CsrBank
from nearstep_spec.csr.model import (
    Access,
    Field,
    Kind,
    Register,
    RegisterMap,
    place,
    port_name,
)


def _field(name: str, access: Access, **kwargs: object) -> Field:
    return Field(name=name, access=access, **kwargs)


def sample_map() -> RegisterMap:
    """A block with constants, status, configuration, pulses and counters."""
    return RegisterMap(
        name="sample",
        busy="status.busy",
        latch="control.latch",
        clear="control.clear",
        registers=place(
            [
                [
                    Register(
                        name="id",
                        fields=(_field("value", Access.CONSTANT, width=32, reset=0xCAFE_F00D),),
                    ),
                    Register(name="map_hash", fields=(_field("value", Access.MAP_HASH, width=32),)),
                ],
                [Register(name="start", fields=(_field("go", Access.PULSE),), locked=True)],
                [
                    Register(
                        name="control",
                        fields=(
                            _field("latch", Access.PULSE, lsb=1),
                            _field("clear", Access.PULSE, lsb=31),
                        ),
                    )
                ],
                [
                    Register(
                        name="status",
                        fields=(
                            _field("busy", Access.STATUS),
                            _field("level", Access.STATUS, lsb=4, width=7),
                            _field("refused", Access.REFUSED, lsb=30),
                        ),
                    ),
                    Register(
                        name="where", width=64, fields=(_field("value", Access.STATUS, width=64),)
                    ),
                ],
                [
                    Register(
                        name="wide",
                        width=64,
                        locked=True,
                        fields=(
                            _field("low", Access.CONFIG, lsb=3, width=20, reset=0x12345),
                            _field("across", Access.CONFIG, lsb=24, width=17, reset=0x1_5A5A),
                            _field("high", Access.CONFIG, lsb=60, width=4, reset=9),
                        ),
                    ),
                    Register(
                        name="free",
                        fields=(_field("value", Access.CONFIG, width=32, reset=7),),
                    ),
                    Register(
                        name="eps",
                        locked=True,
                        fields=(_field("value", Access.CONFIG, width=32, kind=Kind.FLOAT32),),
                    ),
                ],
                [
                    Register(
                        name="cycles", width=64, fields=(_field("value", Access.COUNTER, width=64),)
                    ),
                    Register(
                        name="beats", width=64, fields=(_field("value", Access.COUNTER, width=40),)
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
