"""Headers of snapshots that somebody wrote to do harm, with a digest that fits."""

from __future__ import annotations

import hashlib
import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearstep.storage.errors import SnapshotError, TornSnapshotError
from nearstep.storage.snapshot_file import MAGIC, PREAMBLE, load, save

from .conftest import HostSnapshot

DEVICES, SHAPE = 4, (3, 7)
ROUNDS = 1500


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A snapshot that is whole."""
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(SHAPE).astype(np.float32) for _ in range(DEVICES)]
    return save(tmp_path_factory.mktemp("snapshot") / "state", HostSnapshot([values]))


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header, and what is behind its digest."""
    data = path.read_bytes()
    _, _, length = PREAMBLE.unpack_from(data)
    end = PREAMBLE.size + length
    return json.loads(data[PREAMBLE.size : end]), data[end + 32 :]


def joined(text: bytes, rest: bytes) -> bytes:
    head = PREAMBLE.pack(MAGIC, 1, len(text)) + text
    return head + hashlib.sha256(head).digest() + rest


def values(rng: random.Random) -> Any:
    """Something that JSON can say, as hostile as can be."""
    return rng.choice(
        [
            None, True, False, 0, 1, -1, 4, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**30, 1.0, 4.0,
            1e308, float("inf"), float("nan"), "", "4", "<f4", "sha256", "<f8", [], {}, [[]], [0],
            [1], [-1], [2**62], [2**32, 2**32], [0, 2**62], [1] * 33, [1] * 70, [True], [1.0],
            ["1"], [None], {"shape": [21]}, [{"shape": [21]}], [{"shape": 21}], [{}], [None],
            [{"shape": [0, 10**30]}], [{"shape": [2**62]}] * 3, [{"shape": []}], "\ud800",
            "x" * 999,
        ]
    )  # fmt: skip


def mutate(rng: random.Random, header: dict[str, Any]) -> bytes:
    """A header with something wrong, mostly."""
    found: Any = json.loads(json.dumps(header))
    for _ in range(rng.randint(1, 2)):
        kind = rng.randrange(6)
        if kind == 0:
            found[rng.choice([*found, "more"])] = values(rng)
        elif kind == 1 and len(found) > 1:
            found.pop(rng.choice(list(found)))
        elif kind == 2:
            found["tensors"] = [{"shape": values(rng)}]
        elif kind == 3:
            found["tensors"] = [{"shape": [values(rng) for _ in range(rng.randint(1, 3))]}]
        elif kind == 4:
            found = values(rng)
        else:
            text = bytearray(json.dumps(found).encode())
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
            return bytes(text)
        if not isinstance(found, dict):
            break
    return json.dumps(found).encode()


def hostile(header: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """By hand: what a machine hardly finds."""
    text = json.dumps(header)
    yield "nested too deep", b"[" * 100_000
    yield "a number of many digits", text.replace("4", "4" * 5000, 1).encode()
    yield "no text", b"\xff\xfe" + text.encode()
    yield "a key twice", (text[:-1] + ', "devices": 4}').encode()
    yield "nothing", b""
    shapes = [{"shape": [2**61]}]
    yield "a tensor of 2**63 bytes", json.dumps({**header, "tensors": shapes}).encode()
    shapes = [{"shape": [0, 2**63]}]
    yield "a shape that numpy has not", json.dumps({**header, "tensors": shapes}).encode()
    shapes = [{"shape": [2**40]}]
    yield "a tensor of 4 TiB", json.dumps({**header, "tensors": shapes}).encode()
    yield "2**80 devices", json.dumps({**header, "devices": 2**80, "tensors": []}).encode()
    yield "many tensors", json.dumps({**header, "tensors": [{"shape": [1]}] * 20_000}).encode()


def test_only_typed_errors_come_out_of_a_header(good, tmp_path) -> None:
    seed = 20
    print(f"seed {seed}")
    rng = random.Random(seed)
    header, rest = split(good)
    path = tmp_path / "fuzzed"
    outcomes: Counter[str] = Counter()
    longest = 0
    for _ in range(ROUNDS):
        path.write_bytes(joined(mutate(rng, header), rest))
        try:
            load(path, DEVICES, None)
        except SnapshotError as error:
            outcomes[type(error).__name__] += 1
            longest = max(longest, len(str(error)))
        else:
            outcomes["loaded"] += 1
    print(dict(outcomes))
    assert outcomes.total() == ROUNDS
    assert longest < 1000
    assert outcomes["TornSnapshotError"] > ROUNDS * 0.8
    assert outcomes["loaded"] > 0, "a harmless change, such as a space"


def test_nothing_is_allocated_because_a_header_says_so(good, tmp_path) -> None:
    header, rest = split(good)
    path = tmp_path / "hostile"
    refused = 0
    for what, text in hostile(header):
        path.write_bytes(joined(text, rest))
        tracemalloc.start()
        try:
            if what == "a key twice":
                assert np.isfinite(load(path, DEVICES, None)[0][0]).all()
                continue
            with pytest.raises(TornSnapshotError) as caught:
                load(path, DEVICES, None)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        print(f"{what}: {peak} bytes; {str(caught.value)[:150]}")
        assert peak < (1 << 20) + 100 * len(text)
        refused += 1
    assert refused == 9
