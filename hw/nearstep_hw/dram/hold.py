"""Minimum distances between commands."""

from collections.abc import Mapping

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class HoldLine(wiring.Component):
    """Holds banks, bank groups or ranks ("things") for fixed cycles after an event.

    A shift register of words with a bit for each thing. An event sets the bit in the word that is
    the event's distance from the end; a thing is held while its bit is set in any word.

    *Timing*: an event of distance d in cycle n holds its things in cycles n + 1 to n + d - 1.

    Parameters
    ----------
    things : number of things.
    distances : least cycles from each kind of event to the commands that it delays, by name.

    Members
    -------
    i_<event> : a bit for each thing: the event occurs in this cycle.
    o_held : a bit for each thing.

    Raises
    ------
    ValueError : no things, or a distance that is negative.
    """

    def __init__(self, things: int, distances: Mapping[str, int]) -> None:
        if things < 1:
            raise ValueError(f"Number of things must be at least 1, not {things!r}")
        for name, distance in distances.items():
            if distance < 0:
                raise ValueError(f"Distance of {name} must not be negative, not {distance!r}")
        self.things = things
        self.distances = dict(distances)
        super().__init__({**{f"i_{name}": In(things) for name in distances}, "o_held": Out(things)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        length = max(0, *(distance - 1 for distance in self.distances.values()))
        line = [Signal(self.things, name=f"line{place}") for place in range(length)]
        for place, word in enumerate(line):
            enters = line[place + 1] if place + 1 < length else 0
            for name, distance in self.distances.items():
                if distance - 1 == place + 1:
                    enters = enters | getattr(self, f"i_{name}")
            m.d.sync += word.eq(enters)
        held = 0
        for word in line:
            held = held | word
        m.d.comb += self.o_held.eq(held)
        return m
