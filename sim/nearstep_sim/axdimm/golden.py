"""`golden:axdimm`: a kernel, or a DIMM, without a clock."""

from __future__ import annotations

from collections.abc import Sequence

from nearstep_sim.axdimm.golden_channel import ArbitratedChannel
from nearstep_sim.axdimm.options import GoldenOptions
from nearstep_sim.updater.golden import GoldenBackend, make_bulk, make_engines, make_taker
from nearstep_sim.updater.golden_channel import GoldenChannel
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import device_maps


class GoldenAxdimm(GoldenBackend):
    """A kernel by itself, or the channels of a DIMM."""

    family = "axdimm"
    config: UpdateKernelConfig | DimmConfig

    def __init__(self, options: GoldenOptions) -> None:
        self.config = options.dimm() or options.config()
        self._engines = make_engines(options.config(), options.engine)
        self.lends = options.in_place
        self._bulk = make_bulk(options.engine)
        super().__init__(options.capacity_bytes, make_taker(options.engine))

    def _make_channels(self) -> Sequence[GoldenChannel]:
        config, memory_bytes, log = self.config, self.capacity_bytes, self._log.append
        if isinstance(config, UpdateKernelConfig):
            (kernel,) = device_maps(config).values()
            return [
                GoldenChannel(config, 0, memory_bytes, kernel, self._engines, log, bulk=self._bulk)
            ]
        maps = config.maps()
        return [
            ArbitratedChannel(
                config.kernel,
                number * config.channel_bytes,
                memory_bytes // config.channels,
                maps[f"adam{number}"],
                self._engines,
                log,
                config.memory_bytes,
                self._bulk,
                arbiter=maps[f"arbiter{number}"],
            )
            for number in range(config.channels)
        ]
