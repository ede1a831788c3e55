"""Files of snapshots: the same bytes in every release, and whole or refused."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from nearstep.errors import DeviceError
from nearstep.storage.errors import SnapshotError, SnapshotSaveError, TornSnapshotError
from nearstep.storage.snapshot_file import PREAMBLE, Arrays, load, open_file, save

from .conftest import HostSnapshot, random_snapshot

WRITTEN_BEFORE = base64.b64decode(
    b"TlNDT0FSU0UBAAAAdAAAAHsiZGV2aWNlcyI6IDIsICJkaWdlc3QiOiAic2hhMjU2IiwgImR0eXBlIjogIjxmNCIs"
    b"ICJ0ZW5zb3JzIjogW3sic2hhcGUiOiBbMiwgM119LCB7InNoYXBlIjogW119LCB7InNoYXBlIjogWzAsIDJdfV19"
    b"j94zXpPTc37tBoPfuMRZ96EwIixX4sCxQHZXu15VG5YAAIA/AAAAgAEAAAAAAIB/AADAfwAAIMDIdQNAEyvfxrdl"
    b"Rkax8UPZfuC9CxFJO2unlgiuAjl84gAAgL8AAAAAAQAAgAAAgP8AAMD/AAAgQJUOIQU5nnPAmoFekU3Gg1y5yPdm"
    b"iE1nUK67EDWl6MfJAABAQOooRZALWFbJvzVLGql2G1qmiI5e1hc4/pV5ykK8D2BUAACAQE9Lm32LhmM+KCTi9DmB"
    b"k1ewzQEKtBDqGmkbEsX5TpHg47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFXjsMRCmPwcFJr79MiZb7kk"
    b"J65B5GSbk0yklZkbeFK4VQ=="
)
"""A file that a pool of two devices wrote when this format was made (version 1)."""

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
    assert len(arrays) == len(snapshot.shapes)
    compared = 0
    for tensor, each in enumerate(arrays):
        assert len(each) == snapshot.devices
        for device, values in enumerate(each):
            expected = snapshot.read(tensor, device)
            assert (values.shape, values.dtype) == (expected.shape, np.float32)
            assert values.tobytes() == expected.tobytes()
            compared += values.size
    return compared


def test_a_file_written_before_loads_bit_by_bit(tmp_path) -> None:
    path = tmp_path / "state.000001"
    path.write_bytes(WRITTEN_BEFORE)
    assert check_equal(load(path, 2, ITS_VALUES.shapes), ITS_VALUES) == 2 * (6 + 1)


def test_the_same_values_are_written_as_the_same_bytes(tmp_path) -> None:
    assert len(WRITTEN_BEFORE) == 412
    assert save(tmp_path / "state", ITS_VALUES).read_bytes() == WRITTEN_BEFORE


def test_the_file_is_as_described(tmp_path) -> None:
    """Read without the code that wrote it."""
    snapshot = random_snapshot(4, [(40,), (3, 7)], seed=1)
    data = save(tmp_path / "s", snapshot).read_bytes()
    assert data[:8] == b"NSCOARSE"
    assert int.from_bytes(data[8:12], "little") == 1
    end = 16 + int.from_bytes(data[12:16], "little")
    header = json.loads(data[16:end])
    assert header["devices"] == 4
    assert header["tensors"] == [{"shape": [40]}, {"shape": [3, 7]}]
    assert data[end : end + 32] == hashlib.sha256(data[:end]).digest()
    at = end + 32
    for tensor in snapshot.values:
        for array in tensor:
            assert data[at : at + array.nbytes] == array.tobytes()
            at += array.nbytes
            assert data[at : at + 32] == hashlib.sha256(array.tobytes()).digest()
            at += 32
    assert at == len(data)


def test_a_file_is_refused_wherever_it_ends(tmp_path) -> None:
    snapshot = random_snapshot(2, [(30,)], seed=2)
    good, torn = (save(tmp_path / "s", snapshot) for _ in range(2))
    whole = torn.read_bytes()
    for cut in range(len(whole)):
        torn.write_bytes(whole[:cut])
        with pytest.raises(TornSnapshotError) as found:
            load(tmp_path / "s", 2, None)
        assert (found.value.path, found.value.last_good) == (torn, good)
    assert len(whole) > 300
    torn.write_bytes(whole)
    assert check_equal(load(tmp_path / "s", 2, None), snapshot) == 60


def test_a_corrupted_byte_is_found_wherever_it_is(tmp_path) -> None:
    good, bad = (save(tmp_path / "s", random_snapshot(2, [(30,)], seed=3)) for _ in range(2))
    whole = bad.read_bytes()
    for place in range(len(whole)):
        bad.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(TornSnapshotError) as found:
            load(bad, 2, None)
        assert found.value.last_good == good
    assert len(whole) > 300
    bad.write_bytes(whole + b"x")
    with pytest.raises(TornSnapshotError, match="behind its end"):
        load(bad, 2, None)


def test_without_a_whole_file_none_is_named(tmp_path) -> None:
    snapshot = random_snapshot(2, [(3,)], seed=4)
    for path in [save(tmp_path / "s", snapshot) for _ in range(2)]:
        path.write_bytes(path.read_bytes()[: PREAMBLE.size])
    with pytest.raises(TornSnapshotError, match="there is no good one") as found:
        load(tmp_path / "s", 2, None)
    assert found.value.last_good is None
    with pytest.raises(SnapshotError, match="cannot read"):
        load(tmp_path / "nothing", 2, None)


def test_the_temporary_file_is_a_new_one(tmp_path) -> None:
    with open_file(tmp_path / "x") as file:
        file.write(b"a")
    with pytest.raises(FileExistsError):
        open_file(tmp_path / "x")


def test_a_folder_that_is_not_there(tmp_path) -> None:
    with pytest.raises(SnapshotSaveError) as found:
        save(tmp_path / "no" / "s", ITS_VALUES)
    assert found.value.errno == errno.ENOENT


class Unreadable(HostSnapshot):
    """A snapshot whose last part cannot be read."""

    def read(self, tensor: int, device: int) -> np.ndarray:
        if (tensor, device) == (len(self.shapes) - 1, self.devices - 1):
            raise DeviceError("the device is gone")
        return super().read(tensor, device)


def test_a_snapshot_that_cannot_be_read_leaves_the_folder_as_it_was(tmp_path) -> None:
    good = save(tmp_path / "s", ITS_VALUES)
    with pytest.raises(DeviceError, match="is gone"):
        save(tmp_path / "s", Unreadable(ITS_VALUES.values))
    assert [*tmp_path.iterdir()] == [good]
    assert good.read_bytes() == WRITTEN_BEFORE


def test_shapes_and_devices_that_differ_are_refused(tmp_path) -> None:
    path: Path = save(tmp_path / "s", ITS_VALUES)
    with pytest.raises(SnapshotError, match="3 devices, not 2"):
        load(path, 3, None)
    with pytest.raises(SnapshotError, match="shapes"):
        load(path, 2, [(2, 3)])
