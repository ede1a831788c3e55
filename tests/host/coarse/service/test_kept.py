"""What is kept in the devices, and snapshots of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearstep.coarse.service import Client
from nearstep.coarse.service.errors import DeviceMemoryError, RefusedError, UnlikeError
from nearstep.coarse.service.messages import MAX_KEYS
from nearstep.errors import ArgumentError


def values(version: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(version)
    return {key: rng.integers(0, 256, n, dtype=np.uint8) for key, n in (("a", 4099), ("b", 1))}


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_snapshot_is_loaded_by_fewer_clients_on_other_devices(serve, tmp_path, tcp) -> None:
    path = str(tmp_path / "state")

    def write(client: Client) -> list[str]:
        files = []
        for version in range(3):
            if client.rank == 0:
                for key, data in values(version).items():
                    client.keep(key, data)
                files.append(Path(client.save(path, ["a", "b"])).name)
            client.barrier()
        return files

    assert serve(4, tcp=tcp).run(3, write)[0] == [f"state.{n:06}" for n in (1, 2, 3)]

    def read(client: Client) -> int:
        checked = 0
        for version, name in ((2, path), (0, f"{path}.000001"), (1, f"{path}.000002")):
            if client.rank == 1:
                assert client.load(name) == {"a": 4099, "b": 1}
            client.barrier()
            for key, data in values(version).items():
                out = np.zeros_like(data)
                client.get(key, out)
                assert (out == data).all()
                checked += out.size
            client.barrier()
        with pytest.raises(UnlikeError, match="4099 bytes, not 5"):
            client.get("a", np.zeros(5, np.uint8))
        return checked

    assert serve(3, tcp=tcp).run(2, read) == [3 * 4100] * 2


def test_a_snapshot_without_space_replaces_no_value(serve, tmp_path: Path) -> None:
    """Of 4 MiB a device; the first value of the file would fit."""
    path = str(tmp_path / "state")
    small, large = np.arange(1000, dtype=np.uint8), np.ones(1 << 20, np.uint8)

    def write(client: Client) -> str:
        client.keep("a", small)
        client.keep("b", large)
        return client.save(path, ["a", "b"])

    serve(2).run(1, write)

    def load(client: Client) -> int:
        kept = {"a": small[:5] + 1, "c": np.full(7 << 19, 3, np.uint8)}
        for key, data in kept.items():
            client.keep(key, data)
        with pytest.raises(DeviceMemoryError):
            client.load(path)
        checked = 0
        for key, data in kept.items():
            out = np.zeros_like(data)
            client.get(key, out)
            checked += int((out == data).sum())
        client.keep("c", data[:1])
        assert client.load(path) == {"a": 1000, "b": 1 << 20}
        return checked

    assert serve(2).run(1, load) == [5 + (7 << 19)]


def test_a_snapshot_of_many_names_is_loaded(serve, tmp_path: Path) -> None:
    """More than an answer's text has room for; the job has other values beside."""
    path = str(tmp_path / "state")
    names = [f"tensor/transformer.blocks.{n}.attention.query_key_value.weight" for n in range(1200)]

    def write(client: Client) -> str:
        for number, key in enumerate(names):
            client.keep(key, np.full(1, number % 256, np.uint8))
        return client.save(path, names)

    service = serve(2)
    service.run(1, write)

    def load(client: Client) -> int:
        client.keep("other", np.zeros(1, np.uint8))
        assert client.load(path) == dict.fromkeys(names, 1)
        checked, out = 0, np.zeros(1, np.uint8)
        for number, key in enumerate(names):
            client.get(key, out)
            checked += int(out[0]) == number % 256
        return checked

    assert service.run(1, load) == [1200]


def test_what_the_service_would_not_take_is_not_sent(serve, tmp_path: Path) -> None:
    path, data = str(tmp_path / "state"), np.zeros(1, np.uint8)
    wide = [f"{number:0256}" for number in range(MAX_KEYS)]

    def action(client: Client) -> int:
        client.keep("a", data)
        refused = 0
        for match, act in (
            ("length <= 256", lambda: client.keep("n" * 257, data)),
            ("length <= 256", lambda: client.get("n" * 257, data)),
            ("length <= 256", lambda: client.save(path, ["a", "n" * 257])),
            (f"length <= {MAX_KEYS}", lambda: client.save(path, ["a"] * (MAX_KEYS + 1))),
            ("at most 524288 bytes", lambda: client.save(path, wide)),
            ("length <= 65536", lambda: client.load("p" * 65537)),
        ):
            with pytest.raises(ArgumentError, match=match):
                act()
            refused += 1
        client.save(path, ["a"] * MAX_KEYS)
        client.keep("n" * 256, data)
        client.save(path, ["a", "n" * 256])
        assert client.load(path) == {"a": 1, "n" * 256: 1}
        return refused

    assert serve(2).run(1, action) == [6]


def test_what_cannot_be_saved_or_loaded(serve, tmp_path: Path) -> None:
    def action(client: Client) -> list[str]:
        client.keep("a", np.arange(9, dtype=np.uint8))
        found = []
        for act in (
            lambda: client.save(str(tmp_path / "x"), ["c"]),
            lambda: client.save(str(tmp_path / "none" / "x"), ["a"]),
            lambda: client.load(str(tmp_path / "none")),
        ):
            with pytest.raises(RefusedError) as caught:
                act()
            found.append(caught.value.kind)
        torn = Path(client.save(str(tmp_path / "x"), ["a"]))
        torn.write_bytes(torn.read_bytes()[:-1])
        with pytest.raises(RefusedError) as caught:
            client.load(str(torn))
        found.append(caught.value.kind)
        out = np.zeros(9, np.uint8)
        client.get("a", out)
        assert (out == np.arange(9)).all()
        return found

    expected = ["ArgumentError", "SnapshotSaveError", "SnapshotError", "TornSnapshotError"]
    assert serve(2).run(1, action) == [expected]
