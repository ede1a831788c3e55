"""Files of snapshots: as described, whole or refused."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from nearstep.errors import ArgumentError, DeviceError
from nearstep.storage import snapshot_file
from nearstep.storage.errors import (
    SnapshotError,
    SnapshotSaveError,
    SnapshotVersionError,
    TornSnapshotError,
)
from nearstep.storage.snapshot_file import DIGEST, FORMAT, Arrays, load, open_file, save

from .conftest import HostSnapshot, random_snapshot

OF_VERSION_1 = base64.b64decode(
    b"TlNDT0FSU0UBAAAAdAAAAHsiZGV2aWNlcyI6IDIsICJkaWdlc3QiOiAic2hhMjU2IiwgImR0eXBlIjogIjxmNCIs"
    b"ICJ0ZW5zb3JzIjogW3sic2hhcGUiOiBbMiwgM119LCB7InNoYXBlIjogW119LCB7InNoYXBlIjogWzAsIDJdfV19"
    b"j94zXpPTc37tBoPfuMRZ96EwIixX4sCxQHZXu15VG5YAAIA/AAAAgAEAAAAAAIB/AADAfwAAIMDIdQNAEyvfxrdl"
    b"Rkax8UPZfuC9CxFJO2unlgiuAjl84gAAgL8AAAAAAQAAgAAAgP8AAMD/AAAgQJUOIQU5nnPAmoFekU3Gg1y5yPdm"
    b"iE1nUK67EDWl6MfJAABAQOooRZALWFbJvzVLGql2G1qmiI5e1hc4/pV5ykK8D2BUAACAQE9Lm32LhmM+KCTi9DmB"
    b"k1ewzQEKtBDqGmkbEsX5TpHg47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFXjsMRCmPwcFJr79MiZb7kk"
    b"J65B5GSbk0yklZkbeFK4VQ=="
)
"""A file that a pool of two devices wrote in the first format."""

SPECIAL = np.array([[1.0, -0.0, 1e-45], [np.inf, np.nan, -2.5]], np.float32)
ITS_VALUES = HostSnapshot(
    [
        [SPECIAL, -SPECIAL],
        [np.array(3, np.float32), np.array(4, np.float32)],
        [np.zeros((0, 2), np.float32)] * 2,
    ]
)


def check_equal(arrays: Arrays, snapshot: HostSnapshot) -> int:
    """Assert that bits and shapes are equal, and say how many values there were."""
    assert sorted(arrays) == [str(number) for number in range(len(snapshot.values))]
    compared = 0
    for tensor, expected in enumerate(snapshot.values):
        found = arrays[str(tensor)]
        assert (found.shape, found.dtype) == (np.shape(expected), np.float32)
        assert found.tobytes() == np.array(expected).tobytes()
        compared += found.size
    return compared


def test_a_file_loads_bit_by_bit_and_other_readers_read_it(tmp_path) -> None:
    path = ITS_VALUES.save(tmp_path / "state")
    assert check_equal(load(tmp_path / "state"), ITS_VALUES) == 2 * (6 + 1)
    others = load_file(path)
    assert others.pop(DIGEST).tobytes() == path.read_bytes()[-32:]
    assert check_equal(others, ITS_VALUES) == 2 * (6 + 1)


def test_the_same_values_are_written_as_the_same_bytes(tmp_path) -> None:
    """Those of every release with this version of the format."""
    data = ITS_VALUES.save(tmp_path / "state").read_bytes()
    assert len(data) == 384
    assert hashlib.sha256(data).hexdigest().startswith("1a8977db14137cb9")


@pytest.mark.parametrize("version", ["1", "3"])
def test_another_version_is_refused_by_its_number(tmp_path, version: str) -> None:
    path = tmp_path / "state.000001"
    data = OF_VERSION_1
    if version != "1":
        data = ITS_VALUES.save(path).read_bytes().replace(b'"2"', f'"{version}"'.encode(), 1)
        data = data[:-32] + hashlib.sha256(data[:-32]).digest()
    path.write_bytes(data)
    for place in (path, tmp_path / "state"):
        with pytest.raises(SnapshotVersionError, match=f"version 2 .* not version {version}") as e:
            load(place)
        assert (e.value.path, e.value.expected, e.value.found) == (path, 2, version)


def test_the_file_is_as_described(tmp_path) -> None:
    """Read without the code that wrote it."""
    snapshot = random_snapshot(4, [(40,), (3, 7)], seed=1)
    data = snapshot.save(tmp_path / "s").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    assert end % 8 == 0
    header = json.loads(data[8:end])
    assert header.pop("__metadata__") == {FORMAT: "2"}
    assert [each["shape"] for each in header.values()] == [[4, 40], [4, 3, 7], [32]]
    at = end
    for tensor in snapshot.values:
        for array in tensor:
            assert data[at : at + array.nbytes] == array.tobytes()
            at += array.nbytes
    assert data[at:] == hashlib.sha256(data[:at]).digest()


def test_a_file_is_refused_wherever_it_ends_and_whichever_byte_is_corrupted(tmp_path) -> None:
    snapshot = random_snapshot(2, [(30,)], seed=2)
    good, bad = (snapshot.save(tmp_path / "s") for _ in range(2))
    whole = bad.read_bytes()
    assert len(whole) > 300
    damaged = [whole[:cut] for cut in range(len(whole))]
    damaged += [
        whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]
        for place in range(len(whole))
    ]
    for data in [*damaged, whole + b"x"]:
        bad.write_bytes(data)
        with pytest.raises(TornSnapshotError) as found:
            load(tmp_path / "s")
        assert (found.value.path, found.value.last_good) == (bad, good)
    bad.write_bytes(whole)
    assert check_equal(load(tmp_path / "s"), snapshot) == 60


def test_without_a_whole_file_none_is_named(tmp_path) -> None:
    snapshot = random_snapshot(2, [(3,)], seed=4)
    for path in [snapshot.save(tmp_path / "s") for _ in range(2)]:
        path.write_bytes(path.read_bytes()[:16])
    with pytest.raises(TornSnapshotError, match="there is no good one") as found:
        load(tmp_path / "s")
    assert found.value.last_good is None
    with pytest.raises(SnapshotError, match="cannot read"):
        load(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["__metadata__", DIGEST])
def test_reserved_names_are_refused(tmp_path, name: str) -> None:
    with pytest.raises(ArgumentError, match="reserved"):
        save(tmp_path / "s", {name: (1,)}, 1, lambda *_: np.zeros(1, np.float32))
    assert not [*tmp_path.iterdir()]


def test_the_temporary_file_is_a_new_one(tmp_path) -> None:
    with open_file(tmp_path / "x") as file:
        file.write(b"a")
    with pytest.raises(FileExistsError):
        open_file(tmp_path / "x")


def test_a_folder_that_is_not_there(tmp_path) -> None:
    with pytest.raises(SnapshotSaveError) as found:
        ITS_VALUES.save(tmp_path / "no" / "s")
    assert found.value.errno == errno.ENOENT


def test_a_file_is_removed_if_its_name_cannot_be_flushed(tmp_path, monkeypatch) -> None:
    good = ITS_VALUES.save(tmp_path / "s")

    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, "I/O")

    monkeypatch.setattr(snapshot_file, "sync_folder", fail)
    with pytest.raises(SnapshotSaveError, match="I/O"):
        ITS_VALUES.save(tmp_path / "s")
    assert [*tmp_path.iterdir()] == [good]


@pytest.mark.parametrize("name", ["s", "s.000001"])
def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read every file
    with pytest.raises(SnapshotError, match=f"cannot read {tmp_path / name}: .*denied"):
        load(tmp_path / name)


class Unreadable(HostSnapshot):
    """A snapshot whose last part cannot be read."""

    def read(self, tensor: int, device: int) -> np.ndarray:
        if (tensor, device) == (len(self.values) - 1, len(self.values[0]) - 1):
            raise DeviceError("the device is gone")
        return super().read(tensor, device)


def test_a_snapshot_that_cannot_be_read_leaves_the_folder_as_it_was(tmp_path) -> None:
    good: Path = ITS_VALUES.save(tmp_path / "s")
    before = good.read_bytes()
    with pytest.raises(DeviceError, match="is gone"):
        Unreadable(ITS_VALUES.values).save(tmp_path / "s")
    assert [*tmp_path.iterdir()] == [good]
    assert good.read_bytes() == before
