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
from nearstep.storage.snapshot_file import DIGEST, FORMAT, LENGTH, load

from .conftest import random_snapshot

ROUNDS = 1500


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A snapshot that is whole."""
    return random_snapshot(4, [(3, 7)], seed=1).save(tmp_path_factory.mktemp("snapshot") / "state")


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header, and what is between it and the digest."""
    data = path.read_bytes()
    end = LENGTH.size + LENGTH.unpack_from(data)[0]
    return json.loads(data[LENGTH.size : end]), data[end:-32]


def joined(text: bytes, rest: bytes) -> bytes:
    data = LENGTH.pack(len(text)) + text + rest
    return data + hashlib.sha256(data).digest()


def values(rng: random.Random) -> Any:
    """Something that JSON can say, as hostile as can be."""
    return rng.choice(
        [
            None, True, False, 0, 1, -1, 4, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**30, 1.0, 4.0,
            1e308, float("inf"), float("nan"), "", "4", "F32", "BF16", "F64", [], {}, [[]], [0],
            [1], [-1], [2**62], [2**32, 2**32], [0, 2**62], [1] * 33, [1] * 70, [True], [1.0],
            ["1"], [None], [0, 336], [336, 368], [0, 10**30], {FORMAT: "1"}, {FORMAT: 2}, "\ud800",
            "x" * 999,
        ]
    )  # fmt: skip


def mutate(rng: random.Random, header: dict[str, Any]) -> bytes:
    """A header with something wrong, mostly."""
    found: Any = json.loads(json.dumps(header))
    for _ in range(rng.randint(1, 2)):
        kind = rng.randrange(5)
        if kind == 0:
            found[rng.choice([*found, "more"])] = values(rng)
        elif kind == 1 and len(found) > 1:
            found.pop(rng.choice(list(found)))
        elif kind == 2:
            found["0"] = {"dtype": "F32", "shape": [4, 3, 7], "data_offsets": [0, 336]}
            found["0"][rng.choice(list(found["0"]))] = values(rng)
        elif kind == 3:
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
    yield "nothing", b""
    for what, shape, end in (
        ("a tensor of 2**63 bytes", [4, 2**59], 2**63),
        ("a shape that numpy has not", [4, 0, 2**63], 0),
        ("a shape of 70 dimensions", [0] * 70, 0),
        ("a tensor of 4 TiB", [4, 2**38], 2**42),
        ("2**80 devices", [2**80], 2**82),
    ):
        tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
        yield what, json.dumps({**header, "0": tensor}).encode()
    empty = {"dtype": "F32", "shape": [1, 0], "data_offsets": [0, 0]}
    yield "many tensors", json.dumps({**header, **{f"x{i}": empty for i in range(20_000)}}).encode()
    yield "no metadata", json.dumps({key: header[key] for key in ("0", DIGEST)}).encode()


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
            load(path)
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
            with pytest.raises(TornSnapshotError) as caught:
                load(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        print(f"{what}: {peak} bytes; {str(caught.value)[:150]}")
        assert peak < (1 << 21) + 1000 * len(text)
        refused += 1
    assert refused == 11
    path.write_bytes(joined(json.dumps(header).encode(), rest))
    assert np.shape(load(path)["0"]) == (4, 3, 7)
