"""The machine that gives a recording its times: a processor, and the owner of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from nearstep.errors import ArgumentError
from nearstep.updater.device import KernelDevice
from nearstep.work.clock import Clock
from nearstep.work.operation import Transfer
from nearstep_spec.platform.load import load
from nearstep_spec.platform.machine import Platform, Processor


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Parts of a platform and their roles.

    Attributes
    ----------
    compute : name of the processor that layers run on.
    memory : name of the part that owns and updates the parameters: a DIMM or a processor.
    params_per_s : update rate of one channel, in parameters per second.
    hertz : clock rate of the optimizer's device; None without a clock, where the platform gives the
        times of transfers and updates.
    drives : names of the drives that state is on.
    """

    platform: Platform
    compute: str
    memory: str
    params_per_s: float
    hertz: float | None
    drives: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        platform: str | Platform,
        device: KernelDevice,
        compute: str | None = None,
        memory: str | None = None,
        hertz: float | None = None,
        host_params_per_s: float | None = None,
        drives: int = 0,
    ) -> Self:
        """Return the machine of named parts; a part not given must be the only candidate.

        Parameters
        ----------
        platform : name of a shipped platform, or a file, as for `nearstep_spec.platform.load`.
        device : device of the optimizer.
        host_params_per_s : update rate of a processor without fp32 FLOP/s, if the platform lacks
            it.
        drives : number of the optimizer's drives.
        hertz : clock rate of the device. None: the rate at which one beat per cycle is the
            bandwidth of a channel of the DIMM.

        Raises
        ------
        ArgumentError : a part is unknown or lacks a figure.
        PlatformError : the platform is unknown, or has no route between the two parts.
        """
        found = load(platform) if isinstance(platform, str) else platform
        able = [name for name, each in found.processors.items() if "fp32" in each.flops]
        compute = _one("compute", compute, able, f"with fp32 FLOP/s in {found.name}")
        if host_params_per_s is not None and not 0 < host_params_per_s < float("inf"):
            raise ArgumentError(
                f"host_params_per_s must be above 0 and finite, not {host_params_per_s}"
            )
        updating = [
            name
            for name, each in found.processors.items()
            if each.adam_params_per_s or (host_params_per_s and name not in able)
        ]
        keeping = [*found.dimms] if found.dimms and memory is None else [*found.dimms, *updating]
        memory = _one("memory", memory, keeping, f"that updates parameters in {found.name}")
        if memory == compute:
            raise ArgumentError(
                f"{found.name}: {compute} would compute and own the parameters, so there are no "
                "transfers to record: name a machine with a part for each, such as 'axdimm' or "
                "'memferry-a100' (nearstep platform list)"
            )
        if memory in found.dimms:
            dimm = found.dimms[memory]
            if device.cycles is None and device.channel_count > int(dimm.channels.value):
                raise ArgumentError(
                    f"{memory} of {found.name} has {int(dimm.channels.value)} channels, fewer than "
                    f"{device.url} with {device.channel_count}"
                )
            rate = float(dimm.adam_params_per_s) / float(dimm.channels)
            beats = float(dimm.channel_bytes_per_s) / device.config.beat_bytes
        else:
            known = found.processors[memory].adam_params_per_s
            rate, beats = float(known or host_params_per_s or 0), None
        if device.cycles is None:
            hertz = None
        else:
            hertz = beats if hertz is None else hertz
            if hertz is None:
                raise ArgumentError(f"hertz must be given: {memory} of {found.name} is no DIMM")
        if drives > len(found.drives):
            there = len(found.drives)
            raise ArgumentError(f"{found.name} must have {drives} drives or more, not {there}")
        machine = cls(
            platform=found,
            compute=compute,
            memory=memory,
            params_per_s=rate,
            hertz=hertz,
            drives=[*found.drives][:drives],
        )
        for channel in range(device.channel_count):
            for down in (True, False):
                machine.transfer(0, channel, down=down)  # raises if there is no route
        return machine

    @property
    def processor(self) -> Processor:
        """The processor that layers run on."""
        return self.platform.processors[self.compute]

    def clock(self) -> Clock:
        """Return a clock at the device's rate, or of the model alone."""
        return Clock(hertz=self.hertz)

    def transfer(self, nbytes: int, channel: int, *, down: bool) -> Transfer | None:
        """Return the transfer of bytes to or from a channel of the memory.

        With a clock the device times its channel and bus itself: only the other hops of the route
        are returned, at the same time. None: no other hop.
        """
        memory = self._of(channel)
        ends = (self.compute, memory) if down else (memory, self.compute)
        found = Transfer.between(self.platform, *ends, nbytes)
        if self.hertz is None:
            return found
        own = {memory, f"{self.memory} memory"}
        if self.memory in self.platform.dimms:
            links = self.platform.links
            own.update(name for name, link in links.items() if self.memory in link.ends)
        route = tuple(hop for hop in found.route if hop.link not in own)
        return replace(found, route=route) if route else None

    def _of(self, channel: int) -> str:
        return f"{self.memory}.{channel}" if self.memory in self.platform.dimms else self.memory

    def drive_seconds(self, nbytes: int, channel: int | None, *, stores: bool) -> float:
        """Return the seconds of a transfer of bytes, striped over the drives, to or from a channel
        of the memory; None: the compute device."""
        share, other = -(-nbytes // len(self.drives)), self.compute
        if channel is not None:
            other = self._of(channel)
        ends = [(other, each) if stores else (each, other) for each in self.drives]
        return max(Transfer.between(self.platform, *each, share).seconds for each in ends)

    def update_seconds(self, elements: int) -> float | None:
        """Return the seconds of an update on one channel; None for a device with a clock."""
        return None if self.hertz is not None else elements / self.params_per_s


def _one(what: str, given: str | None, known: list[str], kind: str) -> str:
    if given is None and len(known) == 1:
        return known[0]
    if given is None or given not in known:
        names = ", ".join(known) or "none"
        raise ArgumentError(f"{what} must be a part {kind}, of {names}; not {given}")
    return given
