"""Threefry: counter-based random words."""

from collections.abc import Sequence

from nearstep_hw.fp.pipeline import Pipeline, Staged
from nearstep_spec.rounding import INJECTED, PARITY, ROTATIONS, ROUNDS, WORD_BITS

__all__ = ["DEPTH", "threefry"]

DEPTH = 1 + ROUNDS + ROUNDS // INJECTED
"""Latency in cycles, one an addition."""


def threefry(pipe: Pipeline, counter: Sequence[Staged], key: Sequence[Staged]) -> list[Staged]:
    """Return Threefry-2x32-13 of a counter, present at stage 0, and a constant key.

    *Timing*: latency `DEPTH`, one call a cycle; at most one addition a stage.

    Parameters
    ----------
    counter, key : two words of 32 bits, the lower first.

    Ref: Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011,
    section 4.2; see `nearstep_spec.rounding`.
    """
    words = [each.value for each in key]
    words.append((words[0] ^ words[1] ^ PARITY)[:WORD_BITS])
    words = [pipe.constant(each) for each in words]
    at = 0
    low, high = counter

    def register(name: str, value: object, stage: int) -> Staged:
        return pipe.delayed(pipe.wrap(value, stage, f"{name}_{stage}"), stage + 1)

    def inject(number: int) -> tuple[Staged, Staged]:
        one, other = (words[(number + k) % len(words)].value for k in range(2))
        return (
            register("low", (low.value + one)[:WORD_BITS], at),
            register("high", (high.value + other + number)[:WORD_BITS], at),
        )

    low, high = inject(0)
    at += 1
    for number in range(ROUNDS):
        rotated = high.value.rotate_left(ROTATIONS[number % len(ROTATIONS)])
        total = pipe.wrap((low.value + high.value)[:WORD_BITS], at, f"sum_{at}")
        low, high = register("low", total.value, at), register("high", rotated ^ total.value, at)
        at += 1
        if (number + 1) % INJECTED == 0:
            low, high = inject((number + 1) // INJECTED)
            at += 1
    return [low, high]
