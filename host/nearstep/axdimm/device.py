"""Driver of an AXDIMM: channels with modes around its update kernels."""

from __future__ import annotations

from nearstep.axdimm.channel import Channel
from nearstep.backends.base import Backend
from nearstep.errors import MismatchError
from nearstep.registers import Registers
from nearstep.updater.device import KernelDevice
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import device_maps

SKEW_BEATS = 3
"""Beats between the beginnings of arrays in 8 bits, within a round of the banks: of 0 to 15, 2 and
3 take the fewest cycles on DDR4-1600, 2 % fewer than 0.
"""


class AxdimmDevice(KernelDevice):
    """An AXDIMM: one update kernel near the memory of each channel.

    On a DIMM with arbiters a channel is in one of two modes. In normal mode the host reads and
    writes its memory; in acceleration mode, inside `with dimm.acceleration(channel):`, its kernel
    does, and the host's reads and writes raise `ModeError`. Channels are independent. A
    device without arbiters (`memory=ideal`) has one channel whose kernel may always be started.

    `Buffer.read` and `Buffer.write` copy whole 64-byte lines before they return: there is no cached
    copy that could be stale or unflushed.

    Attributes
    ----------
    regs : registers as objects: `dev.regs.adam0.status.busy`, `dev.regs.arbiter1.mode`.
    channels : a `Channel` each.
    dimm : configuration of the DIMM; None on a device without arbiters.

    Raises
    ------
    MismatchError : the registers are not those of the backend's configuration.

    Ref: AXDIMM, sections 3.1 to 3.3, 4.1 and 4.2.
    """

    channels: tuple[Channel, ...]

    def __init__(self, backend: Backend, url: str) -> None:
        config = backend.config
        self.dimm = config if isinstance(config, DimmConfig) else None
        if isinstance(config, DimmConfig):
            kernel, maps = config.kernel, config.maps()
        elif isinstance(config, UpdateKernelConfig):
            kernel, maps = config, device_maps(config)
        else:
            raise MismatchError("configuration", "of an AXDIMM", f"a {type(config).__name__}")
        regs = Registers(backend, maps)
        channels = [
            Channel(
                backend,
                number,
                base,
                regs[f"adam{number}"],
                None if self.dimm is None else regs[f"arbiter{number}"],
            )
            for number, (base, _) in enumerate(backend.regions)
        ]
        super().__init__(backend, url, kernel, regs, channels)

    @property
    def stripe_align(self) -> int:
        if self.dimm is None:
            return super().stripe_align
        return self.dimm.geometry.banks * BEAT_BYTES  # arrays then begin in the same bank

    @property
    def stripe_skew(self) -> int:
        # A block with its scales ends in its first bank, in which the next array's block would
        # begin with another row.
        return 0 if self.dimm is None else SKEW_BEATS * BEAT_BYTES
