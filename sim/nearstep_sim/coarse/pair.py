"""Two memory devices on one link, as one component."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.coarse.device import MemoryDevice
from nearstep_spec.coarse.config import CoarseConfig

DEVICES = 2


class CoarsePair(wiring.Component):
    """Port 1 of device 0 joined to port 0 of device 1, without a cycle between them.

    Parameters
    ----------
    config : of both devices.

    Members
    -------
    csr<n>, s_axi<n>, m_axi<n>, o_interrupt<n> : those of device n, 0 and 1.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.devices = [MemoryDevice(config) for _ in range(DEVICES)]
        members = {}
        for number, device in enumerate(self.devices):
            members |= {
                f"csr{number}": In(device.csr.signature.flip()),
                f"s_axi{number}": In(device.s_axi.signature.flip()),
                f"m_axi{number}": Out(device.m_axi.signature),
                f"o_interrupt{number}": Out(1),
            }
        super().__init__(members)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        for number, device in enumerate(self.devices):
            m.submodules[f"device{number}"] = device
            for name in ("csr", "s_axi", "m_axi"):
                outer = getattr(self, f"{name}{number}")
                wiring.connect(m, getattr(device, name), wiring.flipped(outer))
            m.d.comb += getattr(self, f"o_interrupt{number}").eq(device.o_interrupt)
            other, port = self.devices[1 - number], 1 - number
            sent, received = device.link_out[port], other.link_in[1 - port]
            m.d.comb += [
                received.valid.eq(sent.valid),
                received.payload.eq(sent.payload),
                sent.ready.eq(1),
                device.link_out[1 - port].ready.eq(0),
            ]
        return m
