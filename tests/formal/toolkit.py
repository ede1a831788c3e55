"""What several proofs state: values of the cycle before, inputs and streams that hold, registers
inside of a design, and proofs that must fail.

Counters of what is under way stay with their properties: each has its own bounds and its own ends.
"""

from __future__ import annotations

import pytest
from amaranth.hdl import Array, Assert, Assume, Const, Fragment, Module, Shape, Signal, Value
from amaranth.hdl._mem import MemoryInstance
from amaranth.lib.wiring import Component
from amaranth.utils import ceil_log2

from nearstep_sim.bench.formal import Mode, ProofError, prove


def past(m: Module, value: Value, name: str | None = None) -> Signal:
    """The value of the cycle before; 0 in the first."""
    value = Value.cast(value)
    out = Signal.like(value, name=f"past_{name}" if name else "past", init=0)
    m.d.sync += out.eq(value)
    return out


class History:
    """Values of the cycle before, for properties over two cycles."""

    def __init__(self, m: Module) -> None:
        self.m = m
        self.exists = Signal()  # there was a cycle before
        m.d.sync += self.exists.eq(1)

    def before(self, value: Value) -> Signal:
        return past(self.m, value)

    def hold(self, *values: Value) -> None:
        """Assume that inputs never change."""
        same = [Value.cast(value) == self.before(value) for value in values]
        with self.m.If(self.exists):
            self.m.d.comb += [Assume(one) for one in same]

    def keeps_valid(
        self, port: object, kind: type = Assert, *, cleared: Value | None = None
    ) -> None:
        """State that a stream holds valid and payload until the transfer."""
        valid, payload = self.before(port.valid), self.before(port.payload)
        ready = self.before(port.ready)
        waits = self.exists & valid & ~ready
        if cleared is not None:
            waits &= ~self.before(cleared)
        with self.m.If(waits):
            self.m.d.comb += [
                kind(port.valid),
                kind(Value.cast(port.payload) == payload),
            ]


class Inside:
    """Registers and memories of a design by path, as `space.taken0`, for invariants of inductions.

    The design is what it would be without; a name that is not there is a KeyError.
    """

    def __init__(self, whole: Fragment) -> None:
        self._registers: dict[str, Signal] = {}
        self._memories: dict[str, MemoryInstance] = {}
        self._enter(whole, "")

    def __getitem__(self, path: str) -> Signal:
        return self._registers[path]

    def read_data(self, path: str) -> Value:
        """What the only read port of a memory gives."""
        (port,) = self._memories[path]._read_ports
        return port._data

    def rows(self, path: str) -> Array:
        """The rows of a memory, by read ports that are only for this; once for each memory."""
        memory = self._memories[path]
        width, depth = Shape.cast(memory._data.shape).width, memory._data.depth
        rows = [Signal(width, name=f"row{row}") for row in range(depth)]
        for address, row in enumerate(rows):
            memory.read_port(
                domain="comb",
                addr=Const(address, ceil_log2(depth)),
                data=row,
                en=Const(1),
                transparent_for=(),
            )
        return Array(rows)

    def _enter(self, fragment: Fragment, path: str) -> None:
        if isinstance(fragment, MemoryInstance):
            self._memories[path.removesuffix(".")] = fragment
        for domain, statements in fragment.statements.items():
            if domain != "comb":
                for signal in statements._lhs_signals():
                    self._registers.setdefault(f"{path}{signal.name}", signal)
        for inner, name, _ in fragment.subfragments:
            self._enter(inner, f"{path}{name}.")


def opened(component: Component) -> tuple[Fragment, Inside]:
    """A component as it is to be added to a module, and what is inside of it."""
    whole = Fragment.get(component, None)
    return whole, Inside(whole)


def held(m: Module, *values: Value) -> None:
    """Assume that inputs never change."""
    History(m).hold(*values)


def refuted(
    component: Component, name: str, depth: int, mode: Mode = "bmc", status: str = "FAIL"
) -> ProofError:
    """Ask that a proof does not succeed, with this verdict: of properties that are wrong on
    purpose, which shows that the right ones can fail."""
    with pytest.raises(ProofError) as caught:
        prove(component, name, mode, depth)
    assert caught.value.status == status, caught.value
    return caught.value


MOVER_SHAPES = {
    "small": {},
    "late decision": {"cut": True},
    "own gain": {"own": (1,)},
}
"""Parameters of movers of two streams, each proven in seconds."""

each_shape = pytest.mark.parametrize(
    "shape",
    [pytest.param(n, marks=() if n == "small" else pytest.mark.deep) for n in MOVER_SHAPES],
)
