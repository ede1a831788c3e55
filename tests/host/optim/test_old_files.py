"""Files of version 1: checkpoints load, drives are refused by version.

The files of `version_1` are of three steps as below, by commit 81085d21.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
import torch

import nearstep
from nearstep.storage.drive_errors import FormatVersionError
from nearstep.storage.store import Store

FILES = Path(__file__).parent / "version_1"
URL = "golden:axdimm?memory_bytes=1MiB"
CHECKPOINTS = {
    "adamw": (nearstep.optim.AdamW, torch.float32, {}),
    "amsgrad_bf16": (nearstep.optim.Adam, torch.bfloat16, {"amsgrad": True}),
}


def train(name, device, count, saved=None):
    """Parameters after so many steps, the first ones from a checkpoint if one is given."""
    made, dtype, options = CHECKPOINTS[name]
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in ((16,), (8, 4))]
    first = 0
    if saved is not None:
        first, values = 3, saved["parameters"]
    parameters = [torch.nn.Parameter(each.clone()) for each in values]
    optimizer = made(parameters, lr=1e-2, device=device, **options)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, count):
        generator = torch.Generator().manual_seed(50 + step)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("adamw", "host:"),
        ("adamw", URL),
        ("adamw", "golden:smartssd?memory_bytes=1MiB"),
        ("amsgrad_bf16", f"{URL}&rules=adam_amsgrad"),
    ],
)
def test_an_old_checkpoint_goes_on_where_it_was_saved(name, device) -> None:
    saved = torch.load(FILES / f"{name}.pt")
    assert all(map(torch.equal, train(name, device, 3), saved["parameters"]))
    assert all(map(torch.equal, train(name, device, 5, saved), train(name, device, 5)))


def opened(path):
    Store.open([path], owner=None, direct=False)


def resumed(path):
    p = torch.nn.Parameter(torch.zeros(16))
    nearstep.optim.AdamW([p], device=URL, drives=[path], memory=16_384, resume=True)


@pytest.mark.parametrize("use", [opened, resumed])
def test_old_drives_are_refused_by_version_and_stay_as_they_are(use, tmp_path) -> None:
    path = tmp_path / "drive"
    before = lzma.decompress((FILES / "drive.xz").read_bytes())
    path.write_bytes(before)
    with pytest.raises(FormatVersionError) as caught:
        use(path)
    assert (caught.value.expected, caught.value.actual) == (2, 1)
    assert path.read_bytes() == before
