"""A COARSE device with the pins of its links."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import connect_channels
from nearstep_hw.coarse.device import MemoryDevice
from nearstep_hw.coarse.lanes import LaneReceiver, LanesLayout, LaneTransmitter
from nearstep_spec.coarse.config import PORTS, CoarseConfig
from nearstep_spec.coarse.lanes import PINS


class CoarseCard(wiring.Component):
    """`MemoryDevice` whose links are lanes to other boards.

    Members
    -------
    csr, s_axi, m_axi : see `MemoryDevice`.
    o_link<n>, i_link<n> : pins of each link, `LanesLayout`.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.device = device = MemoryDevice(config)
        links = {}
        for port in range(PORTS):
            links |= {f"o_link{port}": Out(PINS), f"i_link{port}": In(PINS)}
        super().__init__(
            {
                "csr": In(device.csr.signature.flip()),
                "s_axi": In(device.s_axi.signature.flip()),
                "m_axi": Out(device.m_axi.signature),
                **links,
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.device = device = self.device
        wiring.connect(m, device.csr, wiring.flipped(self.csr))
        for name in ("s_axi", "m_axi"):
            connect_channels(m, getattr(device, name), getattr(self, name))
        for port in range(PORTS):
            m.submodules[f"transmitter{port}"] = transmitter = LaneTransmitter()
            m.submodules[f"receiver{port}"] = receiver = LaneReceiver()
            wiring.connect(m, device.link_out[port], transmitter.i)
            wiring.connect(m, receiver.o, device.link_in[port])
            m.d.comb += [
                getattr(self, f"o_link{port}").eq(transmitter.o),
                receiver.i.eq(LanesLayout(getattr(self, f"i_link{port}"))),
            ]
        return m
