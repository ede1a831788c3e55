"""The general updater: lanes that implement several update rules, selected by a register."""

from collections.abc import Callable, Sequence

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_spec.fp import FP32
from nearstep_spec.rule.combine import combine, selector
from nearstep_spec.rule.rule import Rule

__all__ = ["GeneralUpdater", "general_rule"]


def general_rule(rules: Sequence[Rule]) -> Rule:
    """Combine the rules into one; a single rule is returned as it is."""
    return combine("general", rules) if len(rules) > 1 else rules[0]


class GeneralUpdater(wiring.Component):
    """Applies the selected rule to beats of its arrays.

    `rule` is the number of a rule in `rules`. While `rule` is out of range, `o_unknown` is 1 and no
    beat is accepted or output.

    *Timing*: one beat a cycle; a result is at the output `latency` cycles after its beat was taken,
    if the output does not wait. While a result waits at the output the pipeline stalls: `i.ready`
    depends combinationally on `o.ready`.

    *Numerics*: each rule gives the bits of `nearstep_sim.golden.rule.evaluate`. Inputs of arrays
    that the rule does not read are ignored; outputs of arrays that the rule does not write are
    undefined.

    Parameters
    ----------
    rules : one or more rules, see `nearstep_spec.rule.combine`.
    lanes : FP32 elements in a beat.
    unit : makes a functional unit of the combined rule, see `UnitMaker`.

    Members
    -------
    i : In(stream), the lanes of each array read by any rule, lane k in bits 32 k to 32 k + 31.
    o : Out(stream), the lanes of each array written by any rule.
    s_<scalar>, s_<switch> : In(32), In(1), of all rules; stable from the first beat taken to the
        last result.
    rule : In, number of the rule; stable as `s_<scalar>`.
    o_unknown : Out(1).

    Attributes
    ----------
    rules : a tuple.
    whole : the combined rule.
    latency : cycles.

    Ref: Smart-Infinity, V-A.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        lanes: int = 16,
        unit: Callable[[Rule], wiring.Component] = FunctionalUnit,
    ) -> None:
        if not isinstance(lanes, int) or lanes < 1:
            raise ValueError(f"Lanes must be a positive integer, not {lanes!r}")
        self.lanes = lanes
        self.unit = unit
        self.rules = tuple(rules)
        self.whole = general_rule(self.rules)
        self.latency = FunctionalUnit(self.whole).latency
        words = data.ArrayLayout(FP32.width, lanes)
        rule = self.whole
        self._selectors = [selector(each) for each in self.rules[1:]]
        super().__init__(
            {
                "i": In(stream.Signature(data.StructLayout(dict.fromkeys(rule.arrays_in, words)))),
                "o": Out(
                    stream.Signature(data.StructLayout(dict.fromkeys(rule.arrays_out, words)))
                ),
                **{
                    f"s_{name}": In(width)
                    for name, width in rule.registers().items()
                    if name not in self._selectors
                },
                # One value more than there are rules: out of range.
                "rule": In(range(len(self.rules) + 1)),
                "o_unknown": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        rule, count = self.whole, len(self.rules)
        advance = Signal()
        chosen = {name: Signal(name=name) for name in self._selectors}
        for number, each in enumerate(chosen.values(), 1):
            m.d.comb += each.eq(self.rule == number)
        m.d.comb += [
            self.o_unknown.eq(self.rule >= count),
            advance.eq((self.o.ready | ~self.o.valid) & ~self.o_unknown),
            self.i.ready.eq(advance),
        ]
        for lane in range(self.lanes):
            unit = self.unit(rule)
            m.submodules[f"lane{lane}"] = unit
            m.d.comb += [
                unit.i_en.eq(advance),
                unit.i_valid.eq(self.i.valid),
            ]
            for name in rule.registers():
                register = chosen[name] if name in chosen else getattr(self, f"s_{name}")
                m.d.comb += getattr(unit, f"s_{name}").eq(register)
            for name in rule.arrays_in:
                m.d.comb += getattr(unit, f"i_{name}").eq(getattr(self.i.payload, name)[lane])
            for name in rule.arrays_out:
                m.d.comb += getattr(self.o.payload, name)[lane].eq(getattr(unit, f"o_{name}"))
            if lane == 0:
                m.d.comb += self.o.valid.eq(unit.o_valid & ~self.o_unknown)
        return m
