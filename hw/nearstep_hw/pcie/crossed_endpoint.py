"""The endpoint in a clock domain of its own."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import Out, connect, flipped

from nearstep_hw.pcie.clock_crossing import ClockCrossing
from nearstep_hw.pcie.endpoint import PcieEndpoint

BLOCK_SIDE = frozenset(
    {"m_axis_cq", "s_axis_cc", "pcie_cq_np_req", "cfg_max_payload", "cfg_interrupt_msix"}
)
"""Members in the clock domain of the hard block."""


class CrossedEndpoint(wiring.Component):
    """A `PcieEndpoint` whose ports toward the hard block are in the domain `pcie`.

    `BLOCK_SIDE` names those ports; the others, and the endpoint itself, are in `sync`. See
    `ClockCrossing` for throughput and reset.

    Parameters
    ----------
    options : parameters of `PcieEndpoint`.
    """

    def __init__(self, **options: int) -> None:
        self.endpoint = PcieEndpoint(**options)
        super().__init__(dict(self.endpoint.signature.members.items()))

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        endpoint = self.endpoint
        m.submodules.endpoint = endpoint
        m.submodules.crossing = crossing = ClockCrossing(
            width=endpoint.width, requests=endpoint.requests
        )
        connect(m, crossing.cq, endpoint.m_axis_cq)
        connect(m, endpoint.s_axis_cc, crossing.cc)
        connect(m, endpoint.cfg_interrupt_msix, crossing.msix)
        m.d.comb += [
            crossing.i_np_req.eq(endpoint.pcie_cq_np_req),
            endpoint.cfg_max_payload.eq(crossing.o_max_payload),
        ]
        for name, member in self.signature.members.items():
            inner = getattr(crossing if name in BLOCK_SIDE else endpoint, name)
            outer = getattr(self, name)
            if member.is_signature:
                connect(m, inner, flipped(outer))
            else:
                m.d.comb += outer.eq(inner) if member.flow is Out else inner.eq(outer)
        return m
