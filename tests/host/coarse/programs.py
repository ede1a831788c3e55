"""Programs of clients: which tensors they push to which proxies, and how these arrive."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

FIGURE_10 = ((0, 0, 0), (0, 1, 1), (1, 1, 0), (1, 0, 1))
"""Pushes (client, proxy, tensor): at each proxy another tensor comes first."""


@dataclass(frozen=True)
class Program:
    """Tensors, who brings each of them to each proxy, and the order in which they arrive.

    Attributes
    ----------
    pushes : (client, proxy, tensor); of one client in the order of the program.
    stops : numbers of pushes before which the proxies run.
    """

    tensors: int
    clients: int
    pushes: tuple[tuple[int, int, int], ...]
    stops: frozenset[int]


@st.composite
def programs(draw, devices: int) -> Program:
    tensors, clients = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 1 << 32))
    chance = random.Random(seed)
    lines: list[list[tuple[int, int, int]]] = [[] for _ in range(clients)]
    for tensor in range(tensors):
        for proxy in chance.sample(range(devices), devices):
            client = chance.randrange(clients)
            lines[client].append((client, proxy, tensor))
    pushes = []
    while left := [line for line in lines if line]:
        pushes.append(chance.choice(left).pop(0))
    stops = frozenset(chance.sample(range(len(pushes)), min(2, len(pushes))))
    return Program(tensors, clients, tuple(pushes), stops)
