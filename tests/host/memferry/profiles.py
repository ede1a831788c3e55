"""Profiles at random, and others that tests share."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np

from nearstep.memferry.cost import DECISIONS, Costs, Decision
from nearstep.memferry.profile import LayerProfile, Profile

FINGERPRINT = "0123456789abcdef"


def layer(name: str = "a", **changes: object) -> LayerProfile:
    """A layer that can do everything."""
    values: dict[str, object] = {
        "name": name,
        "parameter_bytes": 100,
        "gradient_bytes": 100,
        "load_s": 4e-3,
        "send_s": 4e-3,
        "forward_s": 1e-3,
        "backward_s": 2e-3,
        "forward_dha_s": 3e-3,
        "backward_dha_s": 3e-3,
        "backward_write_s": 5e-3,
        "backward_dha_write_s": 6e-3,
        "update_s": 1e-3,
    }
    return LayerProfile(**{**values, **changes})  # type: ignore[arg-type]


def made_of(*layers: LayerProfile) -> Profile:
    return Profile(
        source="file", description="of a test", fingerprint=FINGERPRINT, layers=tuple(layers)
    )


def at_random(rng: random.Random, count: int) -> Profile:
    """Embeddings, normalisations and matrices; some frozen, without parameters, or without DHA."""
    return made_of(*(_layer_at_random(rng, f"layer{i}") for i in range(count)))


def _layer_at_random(rng: random.Random, name: str) -> LayerProfile:
    kind = rng.choice(["embedding", "norm", "matrix", "matrix"])
    low, high = {"embedding": (2, 20), "norm": (0.01, 0.2), "matrix": (0.5, 5)}[kind]
    load, forward = rng.uniform(low, high) * 1e-3, rng.uniform(0.1, 4) * 1e-3
    ahead = forward + load * {"embedding": 0.1, "norm": 1.0, "matrix": rng.uniform(0.5, 4)}[kind]
    back = 2 * forward + load * rng.uniform(0, 2)
    trained, dha, writes = (rng.random() < share for share in (0.9, 0.93, 0.95))
    size = 0 if rng.random() < 0.05 else max(int(load * 1e6) // 64, 1) * 64
    write = 2 * forward + load * rng.uniform(0.2, 1.5) if trained and writes else None
    return LayerProfile(
        name=name,
        parameter_bytes=size,
        gradient_bytes=max(size, 64) if trained else 0,
        load_s=load,
        send_s=load * rng.uniform(0.8, 1.2) if trained else 0.0,
        forward_s=forward,
        backward_s=2 * forward,
        forward_dha_s=ahead if dha else None,
        backward_dha_s=back if dha else None,
        backward_write_s=write,
        backward_dha_write_s=None if write is None or not dha else max(write, back) * 1.05,
        between_forward_s=rng.choice([0.0, rng.uniform(0, 0.5) * 1e-3]),
        between_backward_s=rng.choice([0.0, rng.uniform(0, 1) * 1e-3]),
        update_s=load * rng.uniform(0.3, 1) if trained else 0.0,
    )


def tied_at_random(rng: random.Random, count: int, tied: int) -> Profile:
    """The same, of which some layers have one parameter: each loads it, the first has its
    gradient."""
    layers = [_layer_at_random(rng, f"layer{i}") for i in range(count)]
    size = rng.randint(1, 100) * 64
    places = sorted(rng.sample(range(count), tied))
    for place in places[1:]:
        layers[place] = replace(
            layers[place],
            gradient_bytes=0,
            send_s=0.0,
            update_s=0.0,
            backward_write_s=None,
            backward_dha_write_s=None,
        )
    for place in places:
        layers[place] = replace(layers[place], parameter_bytes=size, load_s=size / 1e6)
    first = layers[places[0]]
    layers[places[0]] = replace(first, gradient_bytes=size, send_s=size / 1e6, update_s=size / 2e6)
    return made_of(*layers)


def slowed(profile: Profile, factor: float) -> Profile:
    """All times so much longer."""
    times = [each.name for each in fields(LayerProfile) if each.name.endswith("_s")]
    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                **{
                    name: None if (value := getattr(layer, name)) is None else value * factor
                    for name in times
                },
            )
            for layer in profile.layers
        ),
    )


def decisions_at_random(rng: random.Random, costs: Costs) -> list[Decision]:
    return [rng.choice(choices(costs, i)) for i in range(len(costs))]


def choices(costs: Costs, place: int) -> list[Decision]:
    """Decisions that a layer allows."""
    return [each for each in DECISIONS if costs.allowed[place, each.index]]


def fewest_bytes(costs: Costs) -> list[Decision]:
    return [
        min(choices(costs, i), key=lambda d: int(_sizes(costs)[i, d.index]))
        for i in range(len(costs))
    ]


def _sizes(costs: Costs) -> np.ndarray:
    return costs.parameter_bytes + costs.gradient_bytes


def bytes_between(costs: Costs, share: float) -> int:
    """Of the fewest and the most bytes a mean."""
    low = costs.bytes_of(fewest_bytes(costs))
    high = int(np.where(costs.allowed, _sizes(costs), 0).max(1).sum())
    return low + int(share * (high - low))
