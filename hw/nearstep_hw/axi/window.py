"""Address windows: ranges that an initiator may access."""

from amaranth import Cat, Elaboratable, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Member, Out, Signature

from nearstep_hw.axi.burst import BurstLayout


class WindowSignature(Signature):
    """A range of addresses and the accesses granted in it.

    Parameters
    ----------
    address_width : bits of an address.

    Members
    -------
    base : first byte granted.
    limit : first byte after the window.
    read, write : granted accesses.
    valid : the window is used.
    """

    def __init__(self, address_width: int) -> None:
        super().__init__(
            {
                "base": Out(address_width),
                "limit": Out(address_width + 1),
                "read": Out(1),
                "write": Out(1),
                "valid": Out(1),
            }
        )


def within(address_width: int, *, base: Value, limit: Value) -> tuple[Value, Value, Value]:
    """Clip `base` and `limit` of a window, of any width, to a `WindowSignature`.

    The third value is whether `base` is in the address space; otherwise the window must not be
    `valid`.
    """
    end = Mux(limit[address_width:].any(), 1 << address_width, limit[:address_width])
    return base[:address_width], end, ~base[address_width:].any()


def window_port(*, address_width: int, windows: int, cut: bool) -> Member:
    """Return the port for the windows: in parallel, or, if `cut`, one after the other.

    Concurrent comparisons with many windows need more wires in one place than small FPGAs have.
    """
    return In(WindowSignature(address_width)).array(1 if cut else windows)


class WindowMatch(wiring.Component):
    """Checks whether one window grants a whole range of bytes.

    A range that only several windows together cover is not granted.

    *Timing*: combinational; if `cut`, `windows` cycles, during which the range is held.

    Parameters
    ----------
    address_width : bits of an address.
    windows : number of windows.
    cut : the windows are presented one after the other, a cycle each, see `window_port`.

    Members
    -------
    window : the windows.
    i_start, i_end : first byte of the range, and first byte after it; `i_start` < `i_end`.
    i_read, i_write : requested accesses, one or both.
    o_granted : one window grants the whole range.
    """

    def __init__(self, *, address_width: int, windows: int, cut: bool = False) -> None:
        self.windows = windows
        self.cut = cut
        super().__init__(
            {
                "window": window_port(address_width=address_width, windows=windows, cut=cut),
                "i_start": In(address_width),
                "i_end": In(address_width + 1),
                "i_read": In(1),
                "i_write": In(1),
                "o_granted": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        grants = Cat(
            window.valid
            & (window.read | ~self.i_read)
            & (window.write | ~self.i_write)
            & (window.base <= self.i_start)
            & (self.i_end <= window.limit)
            for window in self.window
        )
        if self.cut:
            last = Signal(self.windows)  # result of each window
            m.d.sync += last.eq(Cat(last[1:], grants))
            grants = last
        m.d.comb += self.o_granted.eq(grants.any())
        return m


class WindowChecker(wiring.Component):
    """Forwards bursts granted by a window, up to the first refused one.

    A burst is granted if one window contains all its beats in full.

    *Timing*: a burst every three cycles, two cycles after it was taken; if `cut`, one cycle more
    and one for each window.

    Parameters
    ----------
    layout : layout of a burst.
    beat_bytes : bytes of a beat.
    windows : number of windows.
    write : the bursts write; else they read.
    cut : the windows are presented one after the other, and sums and comparisons are registered.

    Members
    -------
    window : the windows, see `window_port`; held while bursts are in flight.
    i : requested bursts.
    o : granted bursts.
    o_refused : the burst in `o_burst` is refused; held, and no burst passes, until `i_clear`.
    o_burst : the burst last taken.
    i_clear : withdraws the offered burst, and clears a refusal.
    """

    def __init__(
        self, layout: BurstLayout, *, beat_bytes: int, windows: int, write: bool, cut: bool = False
    ) -> None:
        self.windows = windows
        self.cut = cut
        self.beat_bytes = beat_bytes
        self.write = write
        self.address_width = layout["address"].width
        super().__init__(
            {
                "window": window_port(address_width=self.address_width, windows=windows, cut=cut),
                "i": In(stream.Signature(layout)),
                "o": Out(stream.Signature(layout)),
                "o_refused": Out(1),
                "o_burst": Out(layout),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.match = match = WindowMatch(
            address_width=self.address_width, windows=self.windows, cut=self.cut
        )
        burst = Signal.like(self.i.payload, reset_less=True)
        end = Signal(self.address_width + 1)

        for mine, its in zip(self.window, match.window, strict=True):
            for name in its.signature.members:
                m.d.comb += getattr(its, name).eq(getattr(mine, name))
        m.d.comb += [
            match.i_start.eq(burst.address),
            match.i_end.eq(end),
            match.i_read.eq(not self.write),
            match.i_write.eq(self.write),
            self.o.payload.eq(burst),
            self.o_burst.eq(burst),
        ]
        to = m.d.sync if self.cut else m.d.comb
        to += end.eq(burst.address + burst.beats * self.beat_bytes)
        with m.FSM() as fsm:
            with m.State("EMPTY"):
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += burst.eq(self.i.payload)
                with m.If(self.i.valid):
                    m.next = "ADD" if self.cut else "CHECK"
            if self.cut:
                turn = Signal(range(self.windows))
                with m.State("ADD"):
                    m.d.sync += turn.eq(0)
                    m.next = "COMPARE"
                with m.State("COMPARE"):
                    m.d.sync += turn.eq(turn + 1)
                    with m.If(turn == self.windows - 1):
                        m.next = "CHECK"
            with m.State("CHECK"):
                with m.If(match.o_granted):
                    m.next = "GRANTED"
                with m.Else():
                    m.next = "REFUSED"
            with m.State("GRANTED"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.next = "EMPTY"
            with m.State("REFUSED"):
                pass
            m.d.comb += self.o_refused.eq(fsm.ongoing("REFUSED"))
        return ResetInserter(self.i_clear)(m)
