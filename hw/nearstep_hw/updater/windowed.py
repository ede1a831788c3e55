"""Movers of arrays in bursts, each checked against the windows that the host granted."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from amaranth import Module, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out, Signature

from nearstep_hw.axi.burst import id_width
from nearstep_hw.axi.reader import ReadMover
from nearstep_hw.axi.schedule import BlockSchedule
from nearstep_hw.axi.signature import Axi4ReadSignature, Axi4WriteSignature
from nearstep_hw.axi.window import WindowChecker, window_port
from nearstep_hw.axi.writer import WriteMover
from nearstep_hw.updater.fault import FaultLayout, mover_fault
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import ErrorCause, Stream

NO_PORTS: Mapping[str, Value] = MappingProxyType({})


class _Windowed(wiring.Component):
    """Schedule, window checker and mover of `WindowedRead` and `WindowedWrite`, and their ports."""

    BUS: ClassVar[type[Signature]]
    MOVER: ClassVar[type[ReadMover | WriteMover]]
    RESPONSE: ClassVar[ErrorCause]

    def __init__(
        self,
        config: UpdateKernelConfig,
        streams: Sequence[Stream],
        members: Mapping[str, Any],
        **schedule: Any,
    ) -> None:
        self.config = config
        self.arrays = tuple(streams)
        shape = {
            "streams": len(self.arrays),
            "address_width": config.address_width,
            "beat_bytes": config.beat_bytes,
            "burst_beats": config.burst_beats,
        }
        self.shape = shape
        self.schedule = BlockSchedule(**shape, **schedule)
        width, windows = config.address_width, config.window_count
        ids = id_width(len(self.arrays))
        bus = self.BUS(address_width=width, data_width=config.data_width, id_width=ids)
        super().__init__(
            {
                "bus": Out(bus),
                "window": window_port(address_width=width, windows=windows, cut=config.cut),
                "i_base": In(width).array(len(self.arrays)),
                **members,
                "i_launch": In(1),
                "o_fault": Out(FaultLayout()),
                "i_stop": In(1),
                "o_idle": Out(1),
                "i_clear": In(1),
            }
        )

    def move(self, m: Module, **mover: Any) -> Any:
        """Add schedule, checker and mover; return the mover, with its beats unconnected.

        Parameters
        ----------
        mover : more parameters of the mover.
        """
        config = self.config
        m.submodules.schedule = schedule = self.schedule
        m.submodules.checker = checker = WindowChecker(
            schedule.o.payload.shape(),
            beat_bytes=config.beat_bytes,
            windows=config.window_count,
            write=self.MOVER is WriteMover,
            cut=config.cut,
        )
        m.submodules.mover = moving = self.MOVER(**self.shape, cut=config.cut, **mover)
        wiring.connect(m, schedule.o, checker.i)
        wiring.connect(m, checker.o, moving.i)
        wiring.connect(m, wiring.flipped(self.bus), moving.bus)
        for mine, its in zip(self.window, checker.window, strict=True):
            wiring.connect(m, wiring.flipped(mine), its)
        for index, base in enumerate(self.i_base):
            m.d.comb += schedule.i_base[index].eq(base)
            if self.MOVER is ReadMover:
                m.d.comb += moving.i_base[index].eq(base)
        return moving

    def control(
        self, m: Module, schedule: Mapping[str, Value], mover: Mapping[str, Value] = NO_PORTS
    ) -> None:
        """Connect the ports that begin and end a run, but `o_idle`.

        Parameters
        ----------
        schedule, mover : values of more ports of each, by name.
        """
        to, moving = self.schedule, m.submodules.mover
        m.d.comb += [
            *(getattr(to, name).eq(value) for name, value in schedule.items()),
            to.i_clear.eq(self.i_stop | self.i_clear),
            m.submodules.checker.i_clear.eq(self.i_stop | self.i_clear),
            moving.i_stop.eq(self.i_stop),
            *(getattr(moving, name).eq(value) for name, value in mover.items()),
            moving.i_clear.eq(self.i_clear),
        ]

    def fault(self, m: Module) -> FaultLayout:
        """Return the fault of the mover or the checker; cause 0 is none."""
        checker = m.submodules.checker
        return mover_fault(
            m,
            bus=m.submodules.mover.fault,
            refused=checker.o_refused,
            burst=checker.o_burst,
            response=self.RESPONSE,
            streams=self.arrays,
        )


class WindowedRead(_Windowed):
    """Reads blocks of the arrays, in turn, inside the granted windows.

    Parameters
    ----------
    streams : the `Stream` of each array, for `o_fault`.
    members : more members.
    schedule : more parameters of the `BlockSchedule`.

    Members
    -------
    bus : AR and R.
    window : the windows, see `window_port`.
    i_base : byte address of each array; held while `o_idle` is low.
    i_launch : starts a run.
    o_fault : a fault in this cycle; cause 0 is none.
    i_stop : no further burst is issued.
    o_idle : no burst is outstanding.
    i_clear : clears all state; only when `o_idle`.
    """

    BUS, MOVER, RESPONSE = Axi4ReadSignature, ReadMover, ErrorCause.READ_RESPONSE


class WindowedWrite(_Windowed):
    """Writes blocks of the arrays, in turn, inside the granted windows.

    Parameters and members are those of `WindowedRead`; the bus has AW, W, B. After `i_stop` no
    further AW is issued; bursts with an issued AW complete.
    """

    BUS, MOVER, RESPONSE = Axi4WriteSignature, WriteMover, ErrorCause.WRITE_RESPONSE
