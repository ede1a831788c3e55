"""Arbiter of streams, round robin or by priority."""

from collections.abc import Sequence

from amaranth import Array, Elaboratable, Module, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.burst import id_width


class StreamArbiter(wiring.Component):
    """Forwards payloads of several streams, one at a time, with the number of the stream.

    *Timing*: a payload is at the output one cycle after it was taken; one payload a cycle. `ready`
    of an input depends on that of the output and on `valid` of all inputs.

    Parameters
    ----------
    shape : shape of a payload.
    ports : number of input streams.
    fixed : priority by order of the streams; otherwise round robin: a stream waits for at most one
        payload of each other stream.

    Members
    -------
    i : the streams.
    i_stop : deasserts `ready` of all streams.
    o : payloads, each with the number of its stream, `owner`.
    o_take : a payload is taken in this cycle.
    o_owner : number of the taken payload's stream; valid only with `o_take`.

    Raises
    ------
    ValueError : `ports` is less than 1.
    """

    def __init__(self, shape: ShapeLike, *, ports: int, fixed: bool = False) -> None:
        if ports < 1:
            raise ValueError(f"Number of ports must be at least 1, not {ports!r}")
        self.ports = ports
        self.fixed = fixed
        owner_width = id_width(ports)
        layout = data.StructLayout({"payload": shape, "owner": owner_width})
        super().__init__(
            {
                "i": In(stream.Signature(shape)).array(ports),
                "i_stop": In(1),
                "o": Out(stream.Signature(layout)),
                "o_take": Out(1),
                "o_owner": Out(owner_width),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        asked = Signal()

        if self.fixed:
            self._grant(m, range(self.ports), asked)
        else:
            with m.Switch(self.o.payload.owner):  # granted last
                for number in range(self.ports):
                    with m.Case(number):
                        turns = [(number + k) % self.ports for k in range(1, self.ports + 1)]
                        self._grant(m, turns, asked)
        m.d.comb += self.o_take.eq(asked & ~self.i_stop & (~self.o.valid | self.o.ready))
        for number, port in enumerate(self.i):
            m.d.comb += port.ready.eq(self.o_take & (self.o_owner == number))
        with m.If(self.o_take):
            m.d.sync += [
                self.o.valid.eq(1),
                self.o.payload.owner.eq(self.o_owner),
                self.o.payload.payload.eq(Array(port.payload for port in self.i)[self.o_owner]),
            ]
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        return m

    def _grant(self, m: Module, order: Sequence[int], asked: Signal) -> None:
        """Grant the first valid stream in `order`."""
        for number in reversed(order):
            with m.If(self.i[number].valid):
                m.d.comb += [asked.eq(1), self.o_owner.eq(number)]
