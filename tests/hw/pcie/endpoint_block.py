"""An endpoint with a small bank of registers behind it, for benches."""

from dataclasses import dataclass

from amaranth.hdl import Module
from amaranth.lib.wiring import Component, Out, connect, flipped

from nearstep_hw.csr.bank import CsrBank
from nearstep_hw.pcie.crossed_endpoint import CrossedEndpoint
from nearstep_hw.pcie.endpoint import PcieEndpoint
from nearstep_hw.pcie.series7.design import Series7Design
from nearstep_spec.csr.block import register, value_register
from nearstep_spec.csr.model import Access, RegisterMap, place
from nearstep_spec.pcie import MEMORY_BAR, REGISTER_BAR, REGISTER_BYTES


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """An endpoint of few bytes, so that a bench can compare all of its memory."""

    width: int = 128
    data_width: int = 512
    address_width: int = 16
    memory_bytes: int = 48 << 10
    vectors: int = 3
    crossed: bool = False  # the hard block has a clock of its own
    series7: bool = False  # the hard block is that of the 7 series

    @property
    def bar_bytes(self) -> int:
        """The memory BAR: what the memory does not fill is an address of nothing."""
        return 1 << (self.memory_bytes - 1).bit_length()


def block_map() -> RegisterMap:
    """A constant, words to write, and a pulse."""

    return RegisterMap(
        name="block",
        registers=place(
            [
                [value_register("id", Access.CONSTANT, "", reset=0xCAFE_F00D)],
                [
                    value_register("low", Access.CONFIG, "", reset=7),
                    value_register("high", Access.CONFIG, ""),
                ],
                [value_register("wide", Access.CONFIG, "", width=64)],
                [register("start", Access.PULSE, "", ("go", 0, 1, ""))],
            ]
        ),
    )


class EndpointBlock(Component):
    """An endpoint and a bank with `block_map`; the ports of the endpoint, and `o_start`."""

    def __init__(self, config: BlockConfig) -> None:
        self.bank = CsrBank(block_map())
        build = CrossedEndpoint if config.crossed else PcieEndpoint
        self.endpoint = build(
            width=config.width,
            data_width=config.data_width,
            address_width=config.address_width,
            memory_bytes=config.memory_bytes,
            vectors=config.vectors,
        )
        members = dict(self.endpoint.signature.members.items())
        del members["csr"]
        super().__init__({**members, "o_start": Out(1)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.bank = self.bank
        m.submodules.endpoint = endpoint = self.endpoint
        connect(m, endpoint.csr, self.bank.bus)
        m.d.comb += self.o_start.eq(self.bank.o_start_go)
        for name, member in self.signature.members.items():
            if name == "o_start":
                continue
            inner, outer = getattr(endpoint, name), getattr(self, name)
            if member.is_signature:
                connect(m, inner, flipped(outer))
            elif member.flow is Out:
                m.d.comb += outer.eq(inner)
            else:
                m.d.comb += inner.eq(outer)
        return m


def block(config: BlockConfig) -> Component:
    """The design of a bench: an `EndpointBlock`, with the adapter if `series7`."""
    if not config.series7:
        return EndpointBlock(config)
    sizes = {REGISTER_BAR: REGISTER_BYTES, MEMORY_BAR: config.bar_bytes}
    return Series7Design(
        EndpointBlock(config),
        {bar: (size - 1).bit_length() for bar, size in sizes.items()},
        domain="pcie" if config.crossed else "sync",
    )
