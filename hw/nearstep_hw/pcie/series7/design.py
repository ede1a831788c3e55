"""A design for the UltraScale+ block, on the 7-series block."""

from collections.abc import Mapping

from amaranth import DomainRenamer, Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import Out, connect, flipped

from nearstep_hw.pcie.crossed_endpoint import BLOCK_SIDE
from nearstep_hw.pcie.series7.adapter import BLOCK_MEMBERS, Series7Adapter

INNER = {
    "m_axis_cq": "cq",
    "s_axis_cc": "cc",
    "pcie_cq_np_req": "i_np_req",
    "cfg_max_payload": "o_max_payload",
    "cfg_interrupt_msix": "msix",
}
"""Ports of an endpoint toward its block, and the ports of the adapter they connect to."""


class Series7Design(wiring.Component):
    """A design with the ports of `PcieEndpoint`, and the adapter in front of it.

    Parameters
    ----------
    inner : the design, 128 bits wide.
    apertures : address bits of each BAR, by its number.
    requests : credits of the design for non-posted requests.
    domain : clock domain of the ports toward the block.

    Members
    -------
    m_axis_rx, s_axis_tx, rx_np_ok, cfg_bus_number, cfg_device_number, cfg_function_number,
        cfg_command, cfg_dcommand, cfg_interrupt_msixenable, cfg_interrupt_msixfm, cfg_to_turnoff,
        cfg_turnoff_ok : see `Series7Adapter`. The other ports are those of `inner`.
    """

    def __init__(
        self,
        inner: wiring.Component,
        apertures: Mapping[int, int],
        *,
        requests: int = 16,
        domain: str = "sync",
    ) -> None:
        assert set(INNER) == BLOCK_SIDE
        self.inner = inner
        self.domain = domain
        self.adapter = Series7Adapter(apertures, requests=requests)
        shown = inner.signature.members
        self.others = tuple(name for name in shown if name not in BLOCK_SIDE)
        super().__init__({**BLOCK_MEMBERS, **{name: shown[name] for name in self.others}})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.inner = self.inner
        m.submodules.adapter = DomainRenamer(self.domain)(self.adapter)
        pairs = [(self.inner, name, self.adapter, end) for name, end in INNER.items()]
        pairs += [(self, name, self.adapter, name) for name in BLOCK_MEMBERS]
        pairs += [(self, name, self.inner, name) for name in self.others]
        for owner, name, part, end in pairs:
            here, there = getattr(owner, name), getattr(part, end)
            member = owner.signature.members[name]
            if member.is_signature:
                connect(m, flipped(here) if owner is self else here, there)
            elif (member.flow is Out) == (owner is self):
                m.d.comb += here.eq(there)
            else:
                m.d.comb += there.eq(here)
        return m
