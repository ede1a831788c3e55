"""What a sum of any number of clients on any number of devices gives, written from the docs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.coarse import ring_all_reduce
from nearstep_spec.coarse.config import CoarseConfig

F32 = NDArray[np.float32]


def expected_sum(
    arrays: Sequence[F32],
    *,
    devices: int,
    operation: str,
    wire: str,
    shard_bytes: int,
    config: CoarseConfig,
    places: Sequence[int] | None = None,
) -> F32:
    """Shard by shard: rounds of a client on each device, then what the rounds gave.

    `places` are the devices of the clients; by default client r is on device r modulo all.
    """
    identity = np.float32(-np.inf if operation == "max" else -0.0)
    scale = np.float32(1 / len(arrays))
    units, unit = arrays[0].size // 512, shard_bytes // 2048
    count = max(1, units // unit)  # shards of at least `shard_bytes`, the first ones longer
    starts = [512 * (i * (units // count) + min(i, units % count)) for i in range(count)]
    out = []
    for number, (start, stop) in enumerate(pairwise([*starts, arrays[0].size])):
        values = [each[start:stop] for each in arrays]
        silent = np.full_like(values[0], identity)
        on = [rank % devices for rank in range(len(arrays))] if places is None else places
        queues = [
            [value for value, at in zip(values, on, strict=True) if at == device]
            for device in range(devices)
        ]
        rounds = []
        while any(queues):
            rounds.append([each.pop(0) if each else silent for each in queues])
        while True:
            last = len(rounds) == 1
            values = [
                ring_all_reduce(
                    each,
                    operation="sum" if operation == "average" and not last else operation,
                    wire=wire,
                    config=config,
                    reverse=bool(number % config.groups % 2),
                    scale=scale,
                )
                for each in rounds
            ]
            if last:
                break
            values += [silent] * (-len(values) % devices)
            rounds = [values[i : i + devices] for i in range(0, len(values), devices)]
        out.append(values[0])
    return np.concatenate(out)
