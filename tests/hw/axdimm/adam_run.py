"""A run of the Adam kernel of a module's channel, from registers to compared memory."""

from collections.abc import Callable

import numpy as np

from nearstep_sim.axdimm.module import ModuleDriver

BASES = {"p": 0x10_0000, "g": 0x20_0040, "m": 0x30_0080, "v": 0x40_00C0}
"""Byte addresses in a channel: in different banks, not at the start of a row."""

Words = np.ndarray[tuple[int], np.dtype[np.uint32]]


class AdamRun:
    """An Adam run on one channel, as a driver does it.

    `results` makes the arrays after a run from those before.
    """

    def __init__(
        self,
        bench: ModuleDriver,
        channel: int,
        count: int,
        seed: int,
        *,
        results: Callable[[dict[str, Words]], dict[str, Words]],
    ) -> None:
        self.bench, self.channel, self.count, self.results = bench, channel, count, results
        rng = np.random.default_rng(seed)
        padded = -(-count // 16) * 16
        self.arrays: dict[str, Words] = {
            name: rng.integers(0, 1 << 32, padded, dtype=np.uint32) for name in BASES
        }
        self.bases = dict(BASES)
        for name, words in self.arrays.items():
            bench.store(channel, BASES[name], words.view(np.uint8))

    def move(self, name: str, base: int) -> None:
        """Put an array somewhere else."""
        self.bases[name] = base
        self.bench.store(self.channel, base, self.arrays[name].view(np.uint8))

    def configure(self, *, reach: int | None = None) -> None:
        """Arrays, and one window over all of them that ends at `reach`."""
        line = {f"adam.{name}_address.value": base for name, base in self.bases.items()}
        self.bench.set(self.channel, {**line, "adam.count.value": self.count})
        window = "adam.window0"
        permissions = ("read", "write", "valid")
        self.bench.set(
            self.channel,
            {
                f"{window}_base.value": 0,
                f"{window}_limit.value": 0x50_0000 if reach is None else reach,
                **{f"{window}_permissions.{bit}": 1 for bit in permissions},
            },
        )

    def mode(self, acceleration: int) -> None:
        name = "acceleration" if acceleration else "normal"
        self.bench.set(self.channel, {"arbiter.mode.acceleration": acceleration})
        self.bench.wait(self.channel, f"arbiter.status.{name}", 1, 20_000)

    def start(self) -> None:
        self.bench.set(self.channel, {"adam.start.go": 1})

    def check(self) -> int:
        """Compare memory with the expected results, guards included. Words compared."""
        results = self.results(self.arrays)
        compared = 0
        for name in BASES:
            words = self.arrays[name]
            expected = words.copy()
            if name in results:
                expected[: self.count] = results[name][: self.count]
            found = self.bench.load(self.channel, self.bases[name], 4 * len(words)).view(np.uint32)
            assert np.array_equal(found, expected), f"{name} of channel {self.channel}"
            compared += len(words)
        return compared
