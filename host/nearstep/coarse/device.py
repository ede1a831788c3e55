"""Driver of a pool's memory devices: their registers, their memory and their update kernels."""

from __future__ import annotations

from collections.abc import Mapping

from nearstep.backends.base import Backend
from nearstep.errors import ArgumentError, MismatchError
from nearstep.registers import BlockRegisters, Registers
from nearstep.updater.channel import KernelChannel
from nearstep.updater.updating import UpdatingDevice
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import UPDATER, device_maps, register_bytes
from nearstep_spec.updater.config import UpdateKernelConfig


class CoarseDevice(UpdatingDevice):
    """All memory devices of a pool; each memory channel is the DRAM of one device.

    `nearstep.coarse.CoarsePool` sums tensors with these devices. With an update kernel at each
    device (`rules=`), `update` starts the kernel of the device that holds the arrays.

    Attributes
    ----------
    config : configuration of each device.
    nodes : tuple[Registers, ...]. Registers of each device as objects:
        `device.nodes[2].sync0.status.busy`.

    Raises
    ------
    MismatchError : the registers of a device are not those of the backend's configuration.

    Ref: COARSE paper, section IV-A.
    """

    def __init__(self, backend: Backend, url: str) -> None:
        config = backend.config
        if not isinstance(config, CoarseConfig):
            raise MismatchError("configuration", "of a COARSE pool", f"a {type(config).__name__}")
        super().__init__(backend, url)
        self.config = config
        space = register_bytes(config)
        maps = device_maps(config)
        self.nodes = tuple(
            Registers(
                backend,
                {name: (number * space + base, each) for name, (base, each) in maps.items()},
            )
            for number in range(len(backend.regions))
        )
        if config.updater is not None:
            self.channels = tuple(
                KernelChannel(backend, number, base, self.nodes[number][UPDATER])
                for number, (base, _) in enumerate(backend.regions)
            )

    @property
    def kernel_config(self) -> UpdateKernelConfig:
        if self.config.updater is None:
            raise ArgumentError(
                f"{self.url} must have an update kernel at each device: open it with rules=adam"
            )
        return self.config.updater

    @property
    def blocks(self) -> Mapping[str, BlockRegisters]:
        return {
            f"device{number}.{block.name}": block
            for number, node in enumerate(self.nodes)
            for block in node
        }

    def local_address(self, address: int, device: int) -> int:
        """Return the address, local to `device`, of a pool address."""
        return address - self._allocators[device].base
