"""AXI4 ports of designs in Amaranth's simulator: what they show, and what a memory answers."""

from collections.abc import Collection, Mapping

from amaranth.hdl import Cat, Shape, Value
from amaranth.sim import SimulatorContext

from nearstep_sim.bench.axi_memory import AxiMemory
from nearstep_sim.bench.axi_sample import Address, AxiSample, ReadBeat, WriteBeat, WriteResponse

PAYLOADS = {
    "ar": (Address, ("id", "addr", "len", "size", "burst")),
    "r": (ReadBeat, ("id", "data", "resp", "last")),
    "aw": (Address, ("id", "addr", "len", "size", "burst")),
    "w": (WriteBeat, ("data", "strb", "last")),
    "b": (WriteResponse, ("id", "resp")),
}
ANSWERS = ("r", "b")


class AxiPins:
    """The signals of an AXI4 port, or of its `channels`, as one value each way.

    A simulator settles after every signal that a bench sets: one at a time took three times as
    long.
    """

    def __init__(self, port: object, channels: tuple[str, ...] = tuple(PAYLOADS)) -> None:
        streams = {name: getattr(port, name) for name in channels}
        self._all = Cat(
            Cat(each.valid, each.ready, Value.cast(each.payload)) for each in streams.values()
        )
        self._fields = {}
        at = 0
        for name, each in streams.items():
            layout = each.payload.shape()
            width = Shape.cast(layout).width
            fields = [layout[field] for field in PAYLOADS[name][1]]
            self._fields[name] = (
                at,
                [(at + 2 + f.offset, (1 << f.width) - 1, f.offset) for f in fields],
                2 + width,
            )
            at += 2 + width
        self._driven = {
            way: [(name, each) for name, each in streams.items() if (name in ANSWERS) is answers]
            for way, answers in (("initiator", False), ("memory", True))
        }
        self._inputs = {
            way: Cat(
                *(Cat(each.valid, Value.cast(each.payload)) for _, each in shown),
                *(each.ready for name, each in streams.items() if (name, each) not in shown),
            )
            for way, shown in self._driven.items()
        }
        self._last: int | None = None

    def sample(self, ctx: SimulatorContext) -> AxiSample:
        """What the port shows now."""
        word = ctx.get(self._all)
        seen = AxiSample()
        ready = []
        for name, (at, fields, _) in self._fields.items():
            if word >> at & 1:
                values = (word >> first & mask for first, mask, _ in fields)
                setattr(seen, name, PAYLOADS[name][0](*values))
            if word >> at & 2:
                ready.append(name)
        seen.ready = frozenset(ready)
        return seen

    def answer(
        self, ctx: SimulatorContext, memory: AxiMemory, ready: Collection[str] | None = None
    ) -> None:
        """Show what a memory answers; `ready` names the channels that are, in place of its own."""
        shown = {name: getattr(memory, name) for name in ANSWERS}
        self._drive(ctx, "memory", shown, memory.ready if ready is None else ready)

    def ask(
        self,
        ctx: SimulatorContext,
        shown: Mapping[str, tuple[int, ...] | None],
        ready: Mapping[str, int],
    ) -> None:
        """Show what an initiator asks for: payloads or None of AR, AW and W; whether it is ready
        for R and B."""
        self._drive(ctx, "initiator", shown, {name for name, is_ready in ready.items() if is_ready})

    def _drive(
        self, ctx: SimulatorContext, way: str, shown: Mapping, ready: Collection[str]
    ) -> None:
        word = at = 0
        for name, _ in self._driven[way]:
            _, fields, width = self._fields[name]
            if shown[name] is not None:
                word |= 1 << at
                for (_, mask, offset), value in zip(fields, shown[name], strict=True):
                    word |= (int(value) & mask) << at + 1 + offset
            at += width - 1
        mine = {name for name, _ in self._driven[way]}
        for name in self._fields:
            if name not in mine:
                word |= (name in ready) << at
                at += 1
        if word != self._last:
            ctx.set(self._inputs[way], word)
            self._last = word
