"""The decompressor with registered ports, so that its clock can be gated."""

from collections.abc import Sequence

from amaranth import Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import wiring

from nearstep_hw.stream.slice import StreamSlice
from nearstep_hw.updater.pairs.decompress import Decompressor
from nearstep_spec.updater.compression import PairCause
from nearstep_spec.updater.decompressor import Decompressor as UserDecompressor

__all__ = ["IsolatedDecompressor"]


class IsolatedDecompressor(wiring.Component):
    """A `Decompressor` with registers at all its ports.

    No combinational path crosses the component, and no signal toggles while its clock is gated.
    Ports as of `Decompressor`.

    *Timing*: that of `Decompressor`, three cycles later. No output of a run is valid before
    the second cycle after `i_start`, and no pair of the run may be offered before then.

    Parameters
    ----------
    forms, lanes, pairs, chunk, cut, user : as of `Decompressor`.
    """

    def __init__(
        self,
        *,
        forms: Sequence[str],
        lanes: int,
        pairs: int,
        chunk: int,
        cut: bool = False,
        user: UserDecompressor | None = None,
    ) -> None:
        self._inner = Decompressor(
            forms=forms, lanes=lanes, pairs=pairs, chunk=chunk, cut=cut, user=user
        )
        self.choice = self._inner.choice
        super().__init__(self._inner.signature)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.inner = inner = self._inner
        told = Signal()  # the outputs are of this run
        settings = ["i_start", "i_pairs", "i_count", "i_format", "i_dry"]
        for name in [*settings, *(["i_scatter"] if self.choice else [])]:
            m.d.sync += getattr(inner, name).eq(getattr(self, name))
        with m.If(self.i_start):
            m.d.sync += told.eq(0)
        with m.Elif(inner.i_start):
            m.d.sync += told.eq(1)

        for name in ("i_index", "i_value"):
            mine = getattr(self, name)
            cut = StreamSlice(mine.payload.shape())
            m.submodules[name] = ResetInserter(inner.i_start)(cut)
            wiring.connect(m, wiring.flipped(mine), cut.i)
            wiring.connect(m, cut.o, getattr(inner, name))
        out = StreamSlice(self.o.payload.shape())
        m.submodules.o = ResetInserter(inner.i_start)(out)
        wiring.connect(m, inner.o, out.i)
        m.d.comb += [
            self.o.payload.eq(out.o.payload),
            self.o.valid.eq(out.o.valid & told),
            out.o.ready.eq(self.o.ready & told),
            self.o_done.eq(inner.o_done & ~out.o.valid & told),
            self.o_cause.eq(Mux(told, inner.o_cause, PairCause.NONE)),
            self.o_position.eq(inner.o_position),
            self.o_duplicates.eq(inner.o_duplicates),
        ]
        return m
