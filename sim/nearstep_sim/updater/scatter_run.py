# amaranth: UnusedElaboratable=no
"""A run of the scatter form of the decompressor by itself, chunks full, in cycles of its RTL."""

import numpy as np

from nearstep_hw.updater.pairs.decompress import SCATTER, Decompressor
from nearstep_sim.bench.stream_bench import StreamBench

__all__ = ["scatter_cycles"]


def scatter_cycles(
    *, pairs: int, spread: str = "random", total: int = 1 << 16, lanes: int = 16, chunk: int = 4096
) -> int:
    """Cycles of `total` pairs, one of every element, in a random order inside each chunk.

    Parameters
    ----------
    pairs : of a beat.
    spread : `"random"`, or `"even"`: every beat hits each bank as often as any other.

    Raises
    ------
    ValueError : another spread.
    RuntimeError : the run did not end, or ended with an error.
    """
    if spread not in ("random", "even"):
        raise ValueError(f"Spread must be 'random' or 'even', not {spread!r}")
    rng = np.random.default_rng(2)
    places = []
    for first in range(0, total, chunk):
        if spread == "random":
            places.append(first + rng.choice(chunk, chunk, replace=False))
        else:
            rows = rng.permutation(chunk // lanes)[:, None] * lanes
            places.append(first + (rows + np.arange(lanes)).reshape(-1))
    index = np.concatenate(places)[:total].astype(np.uint32)
    words = {"i_index": index, "i_value": rng.integers(0, 1 << 31, total).astype(np.uint32)}
    last = np.zeros((total // pairs, 1), np.uint32)
    streams = {
        name: np.concatenate([word.reshape(-1, pairs), last], axis=1)
        for name, word in words.items()
    }
    count = int(index.max()) // chunk * chunk + chunk
    bench = StreamBench(
        Decompressor(forms=(SCATTER,), lanes=lanes, pairs=pairs, chunk=chunk),
        name="scatter_decompressor",
        key=f"{lanes} {pairs} {chunk} ('scatter',)",
        start="i_start",
    )
    try:
        inputs = {"i_pairs": total, "i_count": count, "i_format": 0, "i_dry": 0}
        result = bench.run(streams, inputs, space=count // lanes + 1, quiet=2 * chunk)
    finally:
        bench.close()
    if not result.outputs["o_done"]:
        raise RuntimeError(f"{total} pairs: not done, cause {result.outputs['o_cause']}")
    return result.cycles
