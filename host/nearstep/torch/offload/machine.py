"""The machine whose time a recording has: what computes, and what has the parameters."""

from __future__ import annotations

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
    """Parts of a platform and what they do.

    Attributes
    ----------
    compute : processor that layers run on.
    memory : what has the parameters and updates them: a DIMM, or a processor.
    params_per_s : that one channel updates.
    hertz : cycles of the optimizer's device in a second; None of one without a clock, whose
        transfers and updates are those of the platform.
    """

    platform: Platform
    compute: str
    memory: str
    params_per_s: float
    hertz: float | None

    @classmethod
    def of(
        cls,
        platform: str | Platform,
        device: KernelDevice,
        compute: str | None = None,
        memory: str | None = None,
        hertz: float | None = None,
        host_params_per_s: float | None = None,
    ) -> Self:
        """Parts by name; those that are not given, if there is one alone that it can be.

        Parameters
        ----------
        platform : a shipped one by name, or a file, as of `nearstep_spec.platform.load`.
        device : of the optimizer.
        host_params_per_s : that a processor without fp32 FLOP/s updates, where the platform does
            not say it.
        hertz : of the device's clock. None: that at which a beat in each cycle is the rate of a
            channel of the DIMM.

        Raises
        ------
        ArgumentError : there is no such part, or it has not what is needed.
        PlatformError : there is no such platform, or no way between the two.
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
                f"{found.name}: {compute} would compute and have the parameters, too, so that "
                "nothing goes over a link, and there is nothing to record: name a machine in which "
                "they are two, such as 'axdimm' or 'memferry-a100' (nearstep platform list)"
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
        machine = cls(
            platform=found, compute=compute, memory=memory, params_per_s=rate, hertz=hertz
        )
        for channel in range(device.channel_count):
            for down in (True, False):
                machine.transfer(0, channel, down=down)  # raises if there is no way
        return machine

    @property
    def processor(self) -> Processor:
        """What computes."""
        return self.platform.processors[self.compute]

    def clock(self) -> Clock:
        """A clock with the cycles of the device, or of the model alone."""
        return Clock(hertz=self.hertz)

    def transfer(self, nbytes: int, channel: int, *, down: bool) -> Transfer | None:
        """Bytes to a channel of the memory or from it.

        With a clock the device has its channel, and the bus before it, itself: what is left of the
        way is gone meanwhile. None: nothing is.
        """
        memory = f"{self.memory}.{channel}" if self.memory in self.platform.dimms else self.memory
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

    def update_seconds(self, elements: int) -> float | None:
        """Of one channel; None of a device with a clock."""
        return None if self.hertz is not None else elements / self.params_per_s


def _one(what: str, given: str | None, known: list[str], kind: str) -> str:
    if given is None and len(known) == 1:
        return known[0]
    if given is None or given not in known:
        names = ", ".join(known) or "none"
        raise ArgumentError(f"{what} must be a part {kind}, of {names}; not {given}")
    return given
